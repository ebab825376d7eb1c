"""What changed most: requests, labels and depths, the largest changes first."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from specscope.analyze.compare.failif import LABEL
from specscope.analyze.compare.result import Comparison, Estimate
from specscope.trace.history.conditions import depth_rate

MOST = 8  # of each kind


@dataclass(frozen=True)
class Change:
    """A row: a figure of both sides, what it is a figure of, and how many drafts it is computed from."""

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


def changed(comparison: Comparison, limit: int = MOST) -> list[Change]:
    """Paired requests, labels, then depths: at most `limit` of each, and only those that changed."""
    labels = {title: each for title, each in comparison.groups.items() if title.startswith(LABEL)}
    every = (
        [
            Change("request", pair.id_a, "tokens a draft", pair.tau[0], pair.tau[1], pair.drafts)
            for pair in comparison.pairs
            if pair.tau[0] is not None and pair.tau[1] is not None
        ],
        _changes(
            "label",
            [
                (f"{of.removeprefix(LABEL)}: {estimate.name}", estimate)
                for of, each in labels.items()
                for estimate in each
            ],
        ),
        _changes(
            "depth", [(estimate.name.split()[1], estimate) for estimate in comparison.figures if is_depth(estimate)]
        ),
    )
    return [change for kind in every for change in sorted(kind, key=_size)[:limit] if change.difference]


def is_depth(figure: Estimate) -> bool:
    """Whether the figure is the acceptance rate of one depth."""
    words = figure.name.split()
    return len(words) == 3 and words[1].isdecimal() and figure.name == depth_rate(int(words[1]))


def _changes(kind: str, estimates: Iterable[tuple[str, Estimate]]) -> list[Change]:
    unit = "accepted" if kind == "depth" else "tokens a draft"
    return [
        Change(
            kind,
            name,
            unit,
            estimate.a,
            estimate.b,
            (int(estimate.weight[0]), int(estimate.weight[1])),
            estimate.low,
            estimate.high,
            estimate.significant,
            estimate.percent,
        )
        for name, estimate in estimates
        if estimate.a is not None and estimate.b is not None and estimate.difference
    ]


def _size(change: Change) -> float:
    return -abs(change.difference)
