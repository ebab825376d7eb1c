"""Shares with their errors, for text in which neighbouring tokens are easy or hard together."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from specscope.analyze.verify.sums import Z95, share_of


@dataclass
class Rate:
    """Hits out of so many, by request: requests are independent, the tokens of one are not."""

    by_request: dict[str, list[float]] = field(default_factory=lambda: defaultdict(lambda: [0.0, 0.0]))

    def add(self, request: str, hit: float, weight: float = 1.0) -> None:
        """Count a hit (0 to `weight`) out of `weight`."""
        counts = self.by_request[request]
        counts[0] += hit
        counts[1] += weight

    @property
    def hits(self) -> float:
        """How many hits."""
        return sum(hits for hits, _ in self.by_request.values())

    @property
    def total(self) -> float:
        """Out of how many."""
        return sum(total for _, total in self.by_request.values())

    @property
    def share(self) -> float:
        """Hits over total; 0 where there is nothing."""
        return self.hits / self.total if self.total else 0.0

    @property
    def variance(self) -> float:
        """The variance of the share; infinite where there is nothing."""
        pairs = np.array([*self.by_request.values()], np.float64).reshape(-1, 2)
        return share_of(pairs[:, 0], pairs[:, 1])[1]

    def __str__(self) -> str:
        """`0.63 ± 0.04 of 210`."""
        return f"{self.share:.2f} ± {Z95 * math.sqrt(self.variance):.2f} of {self.total:,.0f}" if self.total else "none"


def z_between(rate: Rate, other: Rate) -> float:
    """How many standard errors `rate` lies above `other`."""
    if not rate.total or not other.total:
        return 0.0
    return (rate.share - other.share) / math.sqrt(rate.variance + other.variance)


@dataclass
class ScoreSum:
    """A sum whose terms have mean 0 and known variances where all is right."""

    value: float = 0.0
    variance: float = 0.0
    count: int = 0

    def add(self, value: float, variance: float) -> None:
        """One more term."""
        self.value += value
        self.variance += variance
        self.count += 1

    @property
    def z(self) -> float:
        """The sum in standard deviations; 0 where nothing could vary."""
        return self.value / math.sqrt(self.variance) if self.variance > 1 else 0.0

    @property
    def mean(self) -> float:
        """The mean excess of a term."""
        return self.value / self.count if self.count else 0.0


def share(flags: Iterable[bool]) -> float:
    """The share of True; 0 of nothing."""
    some = list(flags)
    return sum(some) / len(some) if some else 0.0


def chance_of(z: float) -> float:
    """How often chance gives so many standard errors or more, on either side."""
    return math.erfc(abs(z) / math.sqrt(2))
