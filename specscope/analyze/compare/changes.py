"""What changed most: requests, labels and depths, the largest changes first."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from specscope.analyze.compare.failif import LABEL
from specscope.analyze.compare.result import Comparison, Estimate, depth_rate

MOST = 8  # of each kind


@dataclass(frozen=True)
class Change:
    """A row: a figure of both sides, what it is of, and how many drafts stand under it."""

    kind: str  # request, label, depth
    name: str
    unit: str  # of the figure
    a: float
    b: float
    drafts: tuple[int, int]
    low: float | None = None  # of the 95 % interval; a request alone has none
    high: float | None = None
    significant: bool = False
    percent: bool = False

    @property
    def difference(self) -> float:
        """B - A."""
        return self.b - self.a


def changed(comparison: Comparison, most: int = MOST) -> list[Change]:
    """Requests that are paired, labels, then depths; at most so many of each, and none that is the same."""
    labels = {title: each for title, each in comparison.groups.items() if title.startswith(LABEL)}
    every = (
        [
            Change("request", pair.id_a, "tokens a draft", pair.tau[0], pair.tau[1], pair.drafts)
            for pair in comparison.pairs
            if pair.tau[0] is not None and pair.tau[1] is not None
        ],
        _told("label", [(f"{of.removeprefix(LABEL)}: {one.name}", one) for of, each in labels.items() for one in each]),
        _told("depth", [(one.name.split()[1], one) for one in comparison.figures if is_depth(one)]),
    )
    return [one for kind in every for one in sorted(kind, key=_size)[:most] if one.difference]


def is_depth(one: Estimate) -> bool:
    """Whether it is the rate of one depth."""
    words = one.name.split()
    return len(words) == 3 and words[1].isdecimal() and one.name == depth_rate(int(words[1]))


def _told(kind: str, estimates: Iterable[tuple[str, Estimate]]) -> list[Change]:
    unit = "accepted" if kind == "depth" else "tokens a draft"
    return [
        Change(
            kind,
            name,
            unit,
            one.a,
            one.b,
            (int(one.weight[0]), int(one.weight[1])),
            one.low,
            one.high,
            one.significant,
            one.percent,
        )
        for name, one in estimates
        if one.a is not None and one.b is not None and one.difference
    ]


def _size(one: Change) -> float:
    return -abs(one.difference)
