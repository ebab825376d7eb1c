"""Sums that are 0 on average whatever the text was, what they prove, and the checks that they make.

A martingale difference is a number whose mean is 0 given all that came before it, with a known variance. Sums of them
are judged by Bernstein's inequality as Freedman has it: for differences below b with a total variance V,

    P(|sum| >= t) <= 2 exp(-t^2 / (2 (V + b t / 3))).

It holds for three numbers as for three million, so that a short run raises no false alarm; compared with a normal
approximation it costs a sixth of the power.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from specscope.analyze.evidence.arrays import Indices
from specscope.analyze.findings import CheckResult, Finding, Unit
from specscope.trace.record.tree import Bools, Doubles

POWER = 1.645  # standard deviations by which a bias must lie beyond the limit to be seen in 95 % of runs
FEWEST = 20  # differences
Z95 = 1.96
SHARES = (1.0, 0.9, 0.5, 0.2, 0.1)  # of drafts that are taken as the likeliest and not drawn


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
    def log_chance(self) -> float:
        """The natural logarithm of an upper bound on the chance of a sum so far from 0."""
        t = abs(self.total)
        return min(0.0, math.log(2) - t * t / (2 * (self.variance + self.bound * t / 3)))

    @property
    def p_value(self) -> float:
        """The bound."""
        return math.exp(self.log_chance)

    def least_bias(self, alpha: float) -> float:
        """The smallest mean that a test at this level would have seen with 95 % power."""
        log = math.log(2 / alpha)
        limit = self.bound * log / 3
        limit += math.sqrt(limit * limit + 2 * self.variance * log)
        return (limit + POWER * math.sqrt(self.variance)) / self.count


@dataclass(frozen=True)
class Likeliest:
    """How often draws are the likeliest token of what they are said to be drawn from.

    A drafter that takes its likeliest token, of probability q, in a share s of its drafts and draws the others gives
    that token with s + (1 - s) q, and any other with 1 - s times its own probability. Over all drafts the product of
    these over the probabilities of draws is a martingale where drafts are drawn, whatever decides how many there are;
    so is its mean over SHARES. By Ville's inequality it ever exceeds 1 / x with a probability of x at most. For s = 1
    it is the product of 1 / q. What the likeliest token has where another was drawn is never asked.
    """

    hits: int
    count: int
    log_chance: float  # natural logarithm of an upper bound on the chance of so many hits; 0 at most

    @staticmethod
    def of(q: Doubles, hit: Bools) -> Likeliest:
        """`q` [n] of the tokens that were drawn, above 0; `hit` [n]: which of them are the likeliest of their row."""
        more, hits = 1 / np.minimum(q[hit], 1.0) - 1, int(hit.sum())
        logs = np.array([float(np.log1p(share * more).sum()) for share in SHARES])
        if misses := len(q) - hits:
            with np.errstate(divide="ignore"):
                logs += misses * np.log1p(-np.array(SHARES))
        largest = float(logs.max())
        mean = largest + math.log(float(np.exp(logs - largest).mean()))
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
        return f"{hits}; draws are so with a chance of {chance} at most"


@dataclass(frozen=True)
class DrawsFromQ:
    """Tokens against what they are said to be drawn from: their surprisal, and how often they are the likeliest."""

    surprisal: Sum
    likeliest: Likeliest

    @property
    def judged(self) -> bool:
        """Whether there are enough to say anything."""
        return self.surprisal.judged

    @property
    def count(self) -> int:
        """How many."""
        return self.surprisal.count

    @property
    def worst(self) -> int:
        """The draw that adds most to the surprisal's sum."""
        return self.surprisal.worst

    @property
    def z(self) -> float:
        """The surprisal's sum in standard deviations."""
        return self.surprisal.z

    @property
    def bias(self) -> float:
        """The surprisal's mean difference."""
        return self.surprisal.bias

    @property
    def takes_likeliest(self) -> bool:
        """Whether chance explains this worst: another temperature shows in surprisals first."""
        return self.likeliest.log_chance < self.surprisal.log_chance

    @property
    def p_value(self) -> float:
        """An upper bound on the chance of the rarer of the two (Bonferroni's correction)."""
        return min(1.0, 2 * min(self.surprisal.p_value, self.likeliest.p_value))

    def least_bias(self, alpha: float) -> float:
        """The smallest mean of surprisals that a test at this level would have seen with 95 % power."""
        return self.surprisal.least_bias(alpha / 2)


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


Scale = Callable[[float], str]
FEW = "too few to judge"
LOOSE = 1e-3  # about the level of each of a dozen checks


@dataclass(frozen=True)
class Cell:
    """One sum of a check: over everything, or over one depth, place or size."""

    name: str  # "" where there is only one
    sum: Sum | Distance | DrawsFromQ
    more: str = ""  # what else it is judged by, in words


@dataclass(frozen=True)
class Family:
    """A check before it is judged: one sum, or several of which the worst counts (Bonferroni's correction)."""

    name: str
    about: str
    cells: Sequence[Cell]
    unit: Scale
    of: Unit  # what the sums number
    lacking: str = FEW  # why it is skipped, where it is
    looked: int | None = None  # how many its cells are of, where they overlap

    @cached_property
    def judged(self) -> list[Cell]:
        """The cells with enough in them to show a bias of a possible size."""
        largest = math.inf if self.unit is nats else 1.0
        return [cell for cell in self.cells if cell.sum.judged and cell.sum.least_bias(LOOSE) < largest]

    @property
    def worst(self) -> Cell:
        """The cell with the smallest p-value."""
        return min(self.judged, key=lambda cell: cell.sum.p_value)

    @property
    def p_value(self) -> float:
        """The p-value of the whole check."""
        return min(1.0, len(self.judged) * self.worst.sum.p_value)

    def skipped(self) -> Finding:
        """The check, where it could not be judged."""
        return Finding(self.name, CheckResult.SKIPPED, self.about, note=self.lacking, unit=self.counted)

    @property
    def counted(self) -> str:
        """What the sums count: coins in themselves, or what chance decided or drew."""
        return "coin" if self.name.startswith("coins") else "decision" if self.name.startswith("acceptance") else "draw"

    def check(self, level: float, *, failed: bool) -> Finding:
        """The check, where it was judged. `level`: that of the first step of Holm's procedure."""
        worst, cells = self.worst, self.judged
        measured = worst.sum
        least = max(cell.sum.least_bias(level / len(cells)) for cell in _large(cells))
        here = f"{worst.name}: " if worst.name else ""
        detail = f"{here}off by {self.unit(measured.bias)} on average, z = {measured.z:.2f} over {measured.count:,}"
        detail += f"; {worst.more}" if worst.more else ""
        return Finding(
            self.name,
            CheckResult.FAILED if failed else CheckResult.PASSED,
            self.about,
            tested=sum(cell.sum.count for cell in cells) if self.looked is None else self.looked,
            example=self.of.where(measured.worst) if failed and measured.worst >= 0 else None,
            detail=detail if failed else "",
            note="" if failed else f"would have seen {self.unit(least)} with 95 % power",
            statistic=measured.z,
            p_value=self.p_value,
            bias=measured.bias,
            least_bias=least,
            unit=self.counted,
        )


def _large(cells: Sequence[Cell]) -> list[Cell]:
    """Cells with at least a tenth of the largest one's observations: that a smaller one passes says little."""
    largest = max(cell.sum.count for cell in cells)
    return [cell for cell in cells if cell.sum.count >= largest / 10]


def share(value: float) -> str:
    """A bias of a probability, in words."""
    return f"{100 * value:.2g} %"


def nats(value: float) -> str:
    """A bias of a surprisal, in words."""
    return f"{value:.2g} nats a token"


def correlation(value: float) -> str:
    """A correlation of two numbers, in words."""
    return f"a correlation of {value:.2g}"


def distance(value: float) -> str:
    """A distance from the uniform distribution, in words."""
    return f"a distance of {value:.2g}"


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
