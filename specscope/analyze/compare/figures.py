"""Both sides as distributions: acceptance, by depth and by group, and how well q predicts acceptance."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specscope.analyze.compare.align import Matched
from specscope.analyze.compare.bootstrap import Estimate, Ratio, marked, measured
from specscope.analyze.compare.side import Longs, Side
from specscope.analyze.evidence.columns import KINDS, PRECEDED
from specscope.trace.history.conditions import RATE, TAU, depth_rate
from specscope.trace.record.records import FinalKind
from specscope.trace.record.rules import sound
from specscope.trace.record.tree import Doubles

FEWEST_DRAFTS = 30  # on each side: a figure by depth or group with fewer is left out
DEEPEST = 16
MOST_VALUES = 20  # a label with more is an identifier, not a group
# tau is the primary figure: it is judged by the interval that is shown, which gives a false alarm in 1 of 20 runs. So
# that the others add little to that, all other figures together are allowed 1 in 100, and all groups together as well.
ALPHA = 0.01
LABEL = "label "  # before the name of a label that groups requests
BONUS = KINDS.index(FinalKind.BONUS)
# Lower ends of ranges: groups that are made where a condition of --fail-if names them
RANGES = {
    "output position": ("place", (0, 16, 64, 256, 1024, 4096)),
    "context length": ("context", (0, 128, 512, 1024, 2048, 4096, 8192, 16384, 32768)),
    "requests in the step": ("batch", (1, 2, 4, 8, 16, 32, 64, 128)),
}
Parts = tuple[NDArray[Any], ...]  # above and below the line by step; or by item, and the step of each
Sums = tuple[Doubles, Doubles]  # [clusters] above and below the line


@dataclass(frozen=True)
class FigureKind:
    of: Callable[[Side], Parts]
    percent: bool = True
    offset: float = 0.0  # a draft gives what was accepted of it, and one token more
    signed: bool = False  # whether it may be below 0
    fewest: int = 1  # below the line, on each side

    def ratio(self, name: str, a: Sums, b: Sums) -> Ratio:
        return Ratio(name, (a[0], b[0]), (a[1], b[1]), self.percent, self.offset, self.signed)


def believed(side: Side) -> NDArray[np.floating]:
    """[N] the drafter's probability of each node: q where it was sampled, else its own; NaN where neither is known."""
    return sound(np.where(side.columns.sampled, side.columns.q, side.columns.draft_prob))


def _errors(side: Side, power: int) -> Parts:
    """Of q, at first siblings that were tried: there it is as drawn."""
    c, q = side.columns, believed(side)
    nodes = np.flatnonzero(c.tried & ~np.isnan(q) & (c.sibling == 0))
    return (q - c.accepted)[nodes] ** power, np.ones(len(nodes)), c.step[nodes]


def _at_depth(side: Side, depth: int) -> Parts:
    return side.columns.depth_reached >= depth, side.drafts


LENGTH = FigureKind(lambda side: (side.columns.depth_reached, side.drafts), percent=False, offset=1.0)
FIGURES: Mapping[str, FigureKind] = {  # and, behind the first two, rates by depth
    TAU: LENGTH,
    RATE: FigureKind(lambda side: (side.columns.depth_reached, np.diff(side.columns.start))),
    "tokens per step": FigureKind(lambda side: (side.emitted, np.ones(len(side))), percent=False),
    "whole paths": FigureKind(lambda side: (side.columns.kind == BONUS, side.drafts)),
    "q above acceptance": FigureKind(partial(_errors, power=1), percent=False, signed=True),
    "squared error of q": FigureKind(partial(_errors, power=2), percent=False),
}


@dataclass(frozen=True)
class Counts:
    """A side, and which cluster each of its steps belongs to."""

    side: Side
    cluster: Longs  # [S]
    clusters: int
    is_alone: bool = False  # as it is, beside no other: however few its drafts

    @property
    def fewest(self) -> int:
        return 1 if self.is_alone else FEWEST_DRAFTS

    def sums(self, top: NDArray[Any], bottom: NDArray[Any], steps: Longs | None = None) -> Sums:
        """Of what is by step, or of what is at these steps; `top` counts where there is something below it."""
        cluster = self.cluster if steps is None else self.cluster[steps]
        every = np.where(bottom > 0, top, 0), bottom
        above, below = (np.bincount(cluster, each.astype(np.float64), self.clusters) for each in every)
        return above.astype(np.float64), below.astype(np.float64)


def clustered(a: Side, b: Side, pairs: Matched) -> tuple[Counts, Counts]:
    """A cluster is a pair, or a request that has none."""
    of: list[Longs] = []
    total = len(pairs)
    for side, places in zip((a, b), np.array([pair[:2] for pair in pairs], np.int64).reshape(-1, 2).T, strict=True):
        mine = np.full(len(side.requests), -1)
        mine[places] = np.arange(len(pairs))
        alone = np.flatnonzero(mine < 0)
        mine[alone] = total + np.arange(len(alone))
        total += len(alone)
        of.append(mine[side.request])
    return Counts(a, of[0], total), Counts(b, of[1], total)


def figures(a: Counts, b: Counts) -> list[Estimate]:
    deepest = min(int(of.side.columns.tree_depth.max(initial=0)) for of in (a, b))
    shown = range(1, 1 + (deepest if a.is_alone else min(deepest, DEEPEST)))
    depths = [(depth_rate(d), FigureKind(partial(_at_depth, depth=d), fewest=a.fewest)) for d in shown]
    every = dict([(TAU, LENGTH), (RATE, FIGURES[RATE]), *depths, *FIGURES.items()])
    sums = {name: tuple(of.sums(*figure.of(of.side)) for of in (a, b)) for name, figure in every.items()}
    ratios = [
        figure.ratio(name, *sums[name])
        for name, figure in every.items()
        if min(bottom.sum() for _, bottom in sums[name]) >= figure.fewest
    ]
    told = measured(ratios, a.clusters)
    tau = [replace(estimate, significant=estimate.nonzero) for estimate in told if estimate.name == TAU]
    return [*tau, *marked([estimate for estimate in told if estimate.name != TAU], ALPHA)]


def alone(side: Side, asked: Collection[str]) -> tuple[list[Estimate], dict[str, tuple[Estimate, ...]]]:
    """The figures and groups of one side, however few its drafts: as one cluster, so without intervals."""
    whole = Counts(side, np.zeros(len(side), np.int64), 1, is_alone=True)
    return figures(whole, whole), groups(whole, whole, asked)


def groups(a: Counts, b: Counts, asked: Collection[str] = ()) -> dict[str, tuple[Estimate, ...]]:
    """The acceptance length by label and by what came before, and by what is asked for; one Holm's correction."""
    found: dict[str, list[Ratio]] = {}
    for title, (names, *of) in _groupings((a.side, b.side), asked).items():
        ratios = []
        for value, name in enumerate(names):
            drafts = (each.side.drafts & (mine == value) for each, mine in zip((a, b), of, strict=True))
            sums = [each.sums(each.side.columns.depth_reached, mine) for each, mine in zip((a, b), drafts, strict=True)]
            if min(bottom.sum() for _, bottom in sums) >= a.fewest:
                ratios.append(LENGTH.ratio(name, *sums))
        found |= {title: ratios} if len(ratios) > (not a.is_alone) else {}  # one value repeats the overall figures
    told = iter(marked(measured([ratio for ratios in found.values() for ratio in ratios], a.clusters), ALPHA))
    return {title: tuple(islice(told, len(ratios))) for title, ratios in found.items()}


Grouping = tuple[list[str], Longs, Longs]  # names of the values, and the value of each step of A and of B


def _groupings(sides: tuple[Side, Side], asked: Collection[str]) -> dict[str, Grouping]:
    labels = [[{} if request.info is None else request.info.labels for request in side.requests] for side in sides]
    groupings: dict[str, Grouping] = {}
    for label in sorted({name for side in labels for each in side for name in each}):
        told = [[str(each.get(label, "")) for each in side] for side in labels]
        names = sorted(set(told[0]) & set(told[1]) - {""})
        if 0 < len(names) <= MOST_VALUES:
            codes = ([names.index(value) if value in names else -1 for value in each] for each in told)
            first, second = (np.array(code)[side.request] for code, side in zip(codes, sides, strict=True))
            groupings[f"{LABEL}{label}"] = names, first, second
    for title, (name, edges) in RANGES.items():
        if title in asked:
            ends = zip(edges, [*(edge - 1 for edge in edges[1:]), None], strict=True)
            names = [
                f"{low:,}+" if end is None else f"{low:,}" if low == end else f"{low:,} to {end:,}" for low, end in ends
            ]
            first, second = (np.searchsorted(np.array(edges), getattr(side, name), "right") - 1 for side in sides)
            groupings[title] = names, first, second
    return {**groupings, "after": (list(map(str, PRECEDED)), sides[0].preceded, sides[1].preceded)}
