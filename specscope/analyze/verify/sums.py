"""Sums that are 0 on average whatever the text was, and what they prove; and shares with their variance, by request.

A martingale difference is a number whose mean is 0 given all that came before it, with a known variance. Sums of them
are judged by Bernstein's inequality as Freedman has it: for differences below b with a total variance V,

    P(|sum| >= t) <= 2 exp(-t^2 / (2 (V + b t / 3))).

It holds for three numbers as for three million, so that a short run raises no false alarm; compared with a normal
approximation it costs a sixth of the power.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from specscope.analyze.evidence.arrays import Indices
from specscope.trace.record.tree import Doubles

POWER = 1.645  # standard deviations by which a bias must lie beyond the limit to be seen in 95 % of runs
FEWEST = 20  # differences
Z95 = 1.96


@dataclass(frozen=True)
class Sum:
    """A sum of martingale differences."""

    total: float
    variance: float
    count: int
    bound: float  # on each of them
    worst: int = -1  # the one that adds most in the direction of the sum, as the caller numbers them

    @staticmethod
    def of(difference: Doubles, variance: Doubles, bound: float, places: Indices) -> Sum:
        """Of these differences. `places`: how the caller numbers them."""
        total = float(difference.sum())
        worst = int(places[np.argmax(difference * math.copysign(1, total))]) if len(difference) else -1
        return Sum(total, float(variance.sum()), len(difference), bound, worst)

    @property
    def judged(self) -> bool:
        """Whether there are enough to say anything."""
        return self.count >= FEWEST and self.variance > 0

    @property
    def z(self) -> float:
        """The sum in standard deviations."""
        return self.total / math.sqrt(self.variance)

    @property
    def bias(self) -> float:
        """The mean difference."""
        return self.total / self.count

    @property
    def p_value(self) -> float:
        """An upper bound on the chance of a sum so far from 0."""
        t = abs(self.total)
        return min(1.0, 2 * math.exp(-t * t / (2 * (self.variance + self.bound * t / 3))))

    def least_bias(self, alpha: float) -> float:
        """The smallest mean that a test at this level would have seen with 95 % power."""
        log = math.log(2 / alpha)
        limit = self.bound * log / 3
        limit += math.sqrt(limit * limit + 2 * self.variance * log)
        return (limit + POWER * math.sqrt(self.variance)) / self.count


@dataclass(frozen=True)
class Distance:
    """How far numbers are from uniform on (0, 1): Kolmogorov's distance, judged by Massart's bound 2 exp(-2 n d^2)."""

    bias: float
    count: int
    worst: int = -1

    @staticmethod
    def of(values: Doubles) -> Distance:
        """Of these values."""
        ordered, n = np.sort(values), len(values)
        if not n:
            return Distance(0.0, 0)
        rank = np.arange(n)
        return Distance(float(max((ordered - rank / n).max(), ((rank + 1) / n - ordered).max())), n)

    @property
    def judged(self) -> bool:
        """Whether there are enough to say anything."""
        return self.count >= FEWEST

    @property
    def z(self) -> float:
        """The distance in units of 1 / sqrt(count)."""
        return self.bias * math.sqrt(self.count)

    @property
    def p_value(self) -> float:
        """An upper bound on the chance of a distance so large."""
        return min(1.0, 2 * math.exp(-2 * self.count * self.bias**2))

    def least_bias(self, alpha: float) -> float:
        """The smallest distance that a test at this level would have seen with 95 % power, roughly."""
        return (math.sqrt(math.log(2 / alpha) / 2) + POWER / 2) / math.sqrt(self.count)


def share_of(hits: Doubles, total: Doubles) -> tuple[float, float]:
    """(the share, its variance) of hits [R] out of totals [R]: requests are independent, the tokens of one are not.

    The variance is the larger of two: by request (the ratio estimator's), and Wilson's of independent trials, which is
    not 0 where all or nothing was a hit.
    """
    trials, count = float(total.sum()), int((total > 0).sum())
    if not trials:
        return 0.0, math.inf
    share = float(hits.sum()) / trials
    around = (float(hits.sum()) + Z95**2 / 2) / (trials + Z95**2)
    alone = around * (1 - around) / trials
    if count < 2:
        return share, alone
    return share, max(float(((hits - share * total) ** 2).sum()) * count / (count - 1) / trials**2, alone)
