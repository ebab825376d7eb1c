"""Sums that are 0 on average whatever the text was, what they prove, and the checks that they make.

Sums of martingale differences (whose mean is 0 given all that came before) are judged by Bernstein's inequality as
Freedman has it: for differences below b with a total variance V, P(|sum| >= t) <= 2 exp(-t^2 / (2 (V + b t / 3))). It
holds for three numbers as for three million; compared with a normal approximation it costs a sixth of the power.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from specscope.analyze.evidence.arrays import Indices
from specscope.analyze.findings import CheckResult, Finding, Reference
from specscope.trace.record.tree import Bools, Doubles

POWER = 1.645  # standard deviations by which a bias must lie beyond the limit to be seen in 95 % of runs
FEWEST = 20  # differences
Z95 = 1.96
SHARES = np.array([1.0, 0.9, 0.5, 0.2, 0.1])  # of drafts that are taken as the likeliest and not drawn


@dataclass(frozen=True)
class Sum:
    """A sum of martingale differences."""

    total: float
    variance: float
    count: int
    bound: float  # on each of them
    worst: int = -1  # the one that adds most in the direction of the sum, as the caller numbers them
    likeliest: Likeliest | None = None  # of draws: how often they are the likeliest token, by which they are judged too
    unit: float = 1.0  # standard deviations in which z is told

    @staticmethod
    def of(difference: Doubles, variance: Doubles, bound: float, places: Indices) -> Sum:
        """Of these differences. `places`: how the caller numbers them."""
        total = float(difference.sum())
        worst = int(places[np.argmax(difference * math.copysign(1, total))]) if len(difference) else -1
        return Sum(total, float(variance.sum()), len(difference), bound, worst)

    @staticmethod
    def uniform(values: Doubles) -> Sum:
        """How far numbers are from uniform on (0, 1): Kolmogorov's distance, by Massart's bound 2 exp(-2 n d^2).

        It is that of a sum n d with variance n / 4. z is in units of 1 / sqrt(n).
        """
        ordered, n = np.sort(values), len(values)
        rank = np.arange(n)
        far = np.concatenate([[0.0], ordered - rank / max(n, 1), (rank + 1) / max(n, 1) - ordered])
        return Sum(n * float(far.max()), n / 4, n, 0.0, unit=2.0)

    @property
    def judged(self) -> bool:
        """Whether there are enough to say anything."""
        return self.count >= FEWEST and self.variance > 0

    @property
    def z(self) -> float:
        """The sum in standard deviations."""
        return self.total / math.sqrt(self.variance) / self.unit

    @property
    def bias(self) -> float:
        """The mean difference."""
        return self.total / self.count

    @property
    def log_chance(self) -> float:
        """The natural logarithm of an upper bound on the chance of a sum so far from 0."""
        t = abs(self.total)
        return min(0.0, math.log(2) - t * t / (2 * (self.variance + self.bound * t / 3)))

    @property
    def takes_likeliest(self) -> bool:
        """Whether chance explains this worst: another temperature shows in the sum first."""
        return self.likeliest is not None and self.likeliest.log_chance < self.log_chance

    @property
    def p_value(self) -> float:
        """The bound; of two the rarer one (Bonferroni's correction)."""
        if self.likeliest is None:
            return math.exp(self.log_chance)
        return min(1.0, 2 * math.exp(min(self.log_chance, self.likeliest.log_chance)))

    def least_bias(self, alpha: float) -> float:
        """The smallest mean that a test at this level would have seen with 95 % power."""
        log = math.log((2 if self.likeliest is None else 4) / alpha)
        limit = self.bound * log / 3
        limit += math.sqrt(limit * limit + 2 * self.variance * log)
        return (limit + POWER * math.sqrt(self.variance)) / self.count


@dataclass(frozen=True)
class Likeliest:
    """How often draws are the likeliest token of what they are said to be drawn from.

    A drafter that takes its likeliest token, of probability q, in a share s of its drafts and draws the others gives
    that token with s + (1 - s) q, and any other with 1 - s times its own probability. The product of these over the
    probabilities of draws is a martingale where drafts are drawn; so is its mean over SHARES. By Ville's inequality it
    ever exceeds 1 / x with a probability of x at most.
    """

    hits: int
    count: int
    log_chance: float  # natural logarithm of an upper bound on the chance of so many hits; 0 at most

    @staticmethod
    def of(q: Doubles, hit: Bools) -> Likeliest:
        """`q` [n] of the tokens that were drawn, above 0; `hit` [n]: which of them are the likeliest of their row."""
        more, hits = 1 / np.minimum(q[hit], 1.0) - 1, int(hit.sum())
        logs = np.log1p(SHARES[:, None] * more).sum(axis=1)
        if misses := len(q) - hits:
            with np.errstate(divide="ignore"):
                logs += misses * np.log1p(-SHARES)
        mean = logs.max() + math.log(float(np.exp(logs - logs.max()).mean()))
        return Likeliest(hits, len(q), -max(mean, 0.0))

    @property
    def p_value(self) -> float:
        """The bound on the chance."""
        return math.exp(self.log_chance)

    @property
    def words(self) -> str:
        """`177 of 177 are the likeliest token of their q; draws are so with a chance of 10^-239 at most`."""
        power = self.log_chance / math.log(10)
        chance = f"10^{math.ceil(power)}" if power < -3 else f"{self.p_value:.2g}"
        hits = f"{self.hits:,} of {self.count:,} are the likeliest token of their q"
        return f"{hits}; in draws from q the probability of that is at most {chance}"


SHARE, NATS = (100, "{:.2g} %"), (1, "{:.2g} nats a token")  # biases in words: of a probability, of a surprisal,
CORRELATION, DISTANCE = (1, "a correlation of {:.2g}"), (1, "a distance of {:.2g}")  # of two numbers, from uniform
FEW = "too few to judge"
LOOSE = 1e-3  # about the level of each of a dozen checks


@dataclass(frozen=True)
class Family:
    """A check before it is judged: one sum, or several of which the worst counts (Bonferroni's correction)."""

    name: str
    about: str
    sums: Mapping[str, Sum]  # by what they are over: one depth, place or size; "" for everything
    unit: tuple[float, str]
    where: Callable[[int], Reference]  # of what the sums number
    lacking: str = FEW  # why it is skipped, where it is
    looked: int | None = None  # how many its sums are of, where they overlap

    @cached_property
    def judged(self) -> dict[str, Sum]:
        """The sums with enough in them to show a bias of a possible size; the worst first."""
        largest = math.inf if self.unit is NATS else 1.0
        judged = {name: sum_ for name, sum_ in self.sums.items() if sum_.judged and sum_.least_bias(LOOSE) < largest}
        return dict(sorted(judged.items(), key=lambda each: each[1].p_value))

    @property
    def p_value(self) -> float:
        """The p-value of the whole check."""
        return min(1.0, len(self.judged) * next(iter(self.judged.values())).p_value)

    def finding(self, level: float, *, failed: bool) -> Finding:
        """The check. `level`: that of the first step of Holm's procedure."""
        # What the sums count: coins in themselves, or what chance decided or drew
        counted = "coin" if self.name.startswith("coins") else "decision" if "acceptance" in self.name else "draw"
        found = Finding(self.name, CheckResult.SKIPPED, self.about, note=self.lacking, unit=counted)
        if not self.judged:
            return found
        name, worst = next(iter(self.judged.items()))
        counts, (factor, words) = [sum_.count for sum_ in self.judged.values()], self.unit
        # Of those with a tenth of the largest one's observations at least: that a smaller one passes says little
        large = [sum_ for sum_ in self.judged.values() if sum_.count >= max(counts) / 10]
        least = max(sum_.least_bias(level / len(counts)) for sum_ in large)
        found = replace(found, tested=sum(counts) if self.looked is None else self.looked, least_bias=least)
        found = replace(found, statistic=worst.z, p_value=self.p_value, bias=worst.bias)
        if not failed:
            seen = words.format(factor * least)
            return replace(found, result=CheckResult.PASSED, note=f"would have seen a bias of {seen} with 95 % power")
        detail = f"off by {words.format(factor * worst.bias)} on average, z = {worst.z:.2f} over {worst.count:,}"
        detail = ": ".join(filter(None, (name, detail))) + (f"; {worst.likeliest.words}" if worst.likeliest else "")
        example = self.where(worst.worst) if worst.worst >= 0 else None
        return replace(found, result=CheckResult.FAILED, note="", detail=detail, example=example)


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
    by_request = float(((hits - share * total) ** 2).sum()) * count / max(count - 1, 1) / trials**2
    return share, max(around * (1 - around) / trials, by_request if count > 1 else 0.0)
