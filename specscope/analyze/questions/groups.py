"""Groups of an array's items: counts, the first and the clearest item, and shares with their intervals."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specscope.analyze.evidence.arrays import Indices
from specscope.analyze.findings import Reference
from specscope.trace.record.tree import Bools

Z = 1.959963984540054  # of a 95 % interval


@dataclass(frozen=True)
class Share:
    """A part of a whole, with Wilson's 95 % interval, which takes what is counted as independent."""

    count: int
    total: int

    @property
    def value(self) -> float | None:
        """None where the total is 0."""
        return self.count / self.total if self.total else None

    @property
    def interval(self) -> tuple[float, float] | None:
        """The lowest and the highest share that the count allows."""
        n = self.total
        if not n:
            return None
        p, z2 = self.count / n, Z * Z
        middle = (p + z2 / (2 * n)) / (1 + z2 / n)
        half = Z * math.sqrt(p * (1 - p) / n + z2 / (4 * n * n)) / (1 + z2 / n)
        return max(middle - half, 0.0), min(middle + half, 1.0)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        interval = None if self.interval is None else list(self.interval)
        return {"count": self.count, "total": self.total, "share": self.value, "interval": interval}


@dataclass(frozen=True)
class Examples:
    """Where to look: the first of a row's items, and the one that shows it best."""

    first: Reference
    clearest: Reference


@dataclass(frozen=True)
class Grouping:
    """Items in groups 0 to `groups` - 1, none of them empty."""

    group: Indices  # [n] of each item
    groups: int

    def counts(self, chosen: Bools | None = None) -> list[int]:
        """[groups] how many items; with `chosen`, of the chosen ones only."""
        counts: list[int] = np.bincount(
            self.group[slice(None) if chosen is None else chosen], minlength=self.groups
        ).tolist()
        return counts

    def shares(self, chosen: Bools) -> list[Share]:
        """[groups] how many of the items are chosen."""
        return list(map(Share, self.counts(chosen), self.counts()))

    def means(self, values: NDArray[Any]) -> list[float | None]:
        """[groups] the mean over the items whose value is known (not NaN); None where there are none."""
        known = ~np.isnan(values)
        sums = np.bincount(self.group, np.where(known, values, 0), minlength=self.groups)
        pairs = zip(sums.tolist(), self.counts(known), strict=True)
        return [total / count if count else None for total, count in pairs]

    def best(self, weight: NDArray[Any]) -> Indices:
        """[groups] the item of the highest weight, the first of equals."""
        order = np.lexsort((-np.arange(len(weight)), np.nan_to_num(weight, nan=-np.inf)))
        items = np.zeros(self.groups, np.int64)
        items[self.group[order]] = order  # the last one assigned stays
        return items

    def commonest(self, values: Indices) -> list[list[tuple[int, int]]]:
        """[groups] the items' values (0 and up; -1 is none) with how often each occurs, the commonest first."""
        counted: list[list[tuple[int, int]]] = [[] for _ in range(self.groups)]
        there = values >= 0
        span = int(values.max(initial=0)) + 1
        key, count = np.unique(self.group[there].astype(np.int64) * span + values[there], return_counts=True)
        for place in np.argsort(-count, kind="stable").tolist():
            counted[int(key[place]) // span].append((int(key[place]) % span, int(count[place])))
        return counted

    def examples(self, weight: NDArray[Any], reference: Callable[[int], Reference]) -> list[Examples]:
        """[groups] the first item and that of the highest weight."""
        pairs = zip(self.best(np.zeros(len(weight))).tolist(), self.best(weight).tolist(), strict=True)
        return [Examples(reference(first), reference(clearest)) for first, clearest in pairs]


def by_value(values: Indices) -> tuple[Indices, Grouping]:
    """The different values, and the items in a group for each."""
    different, group = np.unique(values, return_inverse=True)
    return different.astype(np.int64), Grouping(group.reshape(-1), len(different))
