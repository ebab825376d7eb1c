"""Both sides as distributions: acceptance, by depth and by group, and how well q predicts acceptance."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specscope.analyze.compare.align import Matched
from specscope.analyze.compare.bootstrap import Ratio, marked, measured
from specscope.analyze.compare.failif import LABEL
from specscope.analyze.compare.result import (
    LOOPS,
    PER_STEP,
    Q_ABOVE,
    Q_ERROR,
    RATES_FROM,
    WHOLE_PATHS,
    WITHOUT_LOOPS,
    CalibrationBin,
    Estimate,
)
from specscope.analyze.compare.side import Longs, Side
from specscope.analyze.evidence.columns import KINDS, PRECEDED
from specscope.trace.history.conditions import RATE, TAU, depth_rate
from specscope.trace.record.records import FinalKind
from specscope.trace.record.rules import sound
from specscope.trace.record.tree import Bools, Doubles

FEWEST_DRAFTS = 30  # on each side: a figure by depth or group with fewer is left out
DEEPEST = 16
MOST_VALUES = 20  # a label with more is an identifier, not a group
BINS = 10
# tau is the primary figure: it is judged by the interval that is shown, which gives a false alarm in 1 of 20 runs. So
# that the others add little to that, all other figures together are allowed 1 in 100, and all groups together as well.
ALPHA = 0.01
ONE_MORE = (TAU, WITHOUT_LOOPS)  # a draft gives what was accepted of it, and one token more
NUMBERS = (*ONE_MORE, PER_STEP, Q_ABOVE, Q_ERROR)  # the other figures are shares
UNJUDGED = (LOOPS, WITHOUT_LOOPS)  # named beside a difference in tau: rounding alone can make a text loop
BONUS = KINDS.index(FinalKind.BONUS)
# Lower ends of ranges: groups that are made where a condition of --fail-if names them
RANGES = {
    "output position": ("place", (0, 16, 64, 256, 1024, 4096)),
    "context length": ("context", (0, 128, 512, 1024, 2048, 4096, 8192, 16384, 32768)),
    "requests in the step": ("batch", (1, 2, 4, 8, 16, 32, 64, 128)),
}
Sums = tuple[Doubles, Doubles]  # [clusters] above and below the line


@dataclass(frozen=True)
class Counts:
    """What the figures of a side are made of, by step, and which cluster each step belongs to."""

    side: Side
    cluster: Longs  # [S]
    clusters: int

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
    for side, places in ((a, [first for first, _, _ in pairs]), (b, [second for _, second, _ in pairs])):
        mine = np.full(len(side.requests), -1)
        mine[places] = np.arange(len(pairs))
        alone = np.flatnonzero(mine < 0)
        mine[alone] = total + np.arange(len(alone))
        total += len(alone)
        of.append(mine[side.request])
    return Counts(a, of[0], total), Counts(b, of[1], total)


def figures(a: Counts, b: Counts) -> list[Estimate]:
    """Acceptance length, rate, by depth and by who drafted, tokens per step, loops, and the calibration of q."""
    deepest = min(DEEPEST, *(int(of.side.columns.tree_depth.max(initial=0)) for of in (a, b)))
    rates = [depth_rate(depth) for depth in range(1, deepest + 1)]
    first, second = (_sums(of, rates) for of in (a, b))
    looped = sum(float(each[LOOPS][0].sum()) for each in (first, second))
    left_out = () if looped and a.side.tells_tokens and b.side.tells_tokens else UNJUDGED
    ratios = []
    for name, (top, bottom) in first.items():
        fewest = FEWEST_DRAFTS if name in rates else 1
        if name not in left_out and min(bottom.sum(), second[name][1].sum()) >= fewest:
            ratios.append(_ratio(name, (top, bottom), second[name]))
    known = measured(ratios, a.clusters)
    tau = [replace(estimate, significant=estimate.nonzero) for estimate in known if estimate.name == TAU]
    unjudged = [estimate for estimate in known if estimate.name in UNJUDGED]
    others = [estimate for estimate in known if estimate.name not in (TAU, *UNJUDGED)]
    return [*tau, *unjudged, *marked(others, ALPHA)]


def _sums(of: Counts, rates: Sequence[str]) -> dict[str, Sums]:
    """The sums of each figure of a side. `rates`: those by depth."""
    side, c = of.side, of.side.columns
    accepted, drafts, depth = c.depth_reached, side.drafts, c.tree_depth
    new_text = drafts & ~((side.looped == side.emitted) & (side.emitted > 0))
    tried, q, got = tried_first(side)
    sources = {name: c.source == number for number, name in enumerate(RATES_FROM.values())}
    return {
        TAU: of.sums(accepted, drafts),
        RATE: of.sums(accepted, np.diff(c.start)),
        **{name: of.sums(accepted >= at, depth >= at) for at, name in enumerate(rates, 1)},
        PER_STEP: of.sums(side.emitted, np.ones(len(side))),
        WHOLE_PATHS: of.sums(c.kind == BONUS, drafts),
        LOOPS: of.sums(side.looped, side.emitted),
        WITHOUT_LOOPS: of.sums(accepted, new_text),
        **{name: of.sums(c.accepted, drafted, c.step) for name, drafted in sources.items()},
        Q_ABOVE: of.sums(q - got, np.ones(len(q)), c.step[tried]),
        Q_ERROR: of.sums((q - got) ** 2, np.ones(len(q)), c.step[tried]),
    }


def _ratio(name: str, a: Sums, b: Sums, figure: str = "") -> Ratio:
    """`figure`: the one that it is of, where it is called otherwise."""
    figure = figure or name
    return Ratio(
        name, (a[0], b[0]), (a[1], b[1]), figure not in NUMBERS, float(figure in ONE_MORE), signed=figure == Q_ABOVE
    )


def believed(side: Side) -> NDArray[np.floating]:
    """[N] the drafter's probability of each node: q where it was sampled, else its own; NaN where neither is known."""
    return sound(np.where(side.columns.sampled, side.columns.q, side.columns.draft_prob))


def tried_first(side: Side) -> tuple[Bools, Doubles, Bools]:
    """[N] first siblings that were tried, whose q is as drawn; and of these q, and whether each was accepted."""
    c, q = side.columns, believed(side)
    known = c.tried & ~np.isnan(q) & (c.sibling == 0)
    return known, q[known], c.accepted[known]


def calibration(a: Side, b: Side) -> list[CalibrationBin]:
    """First siblings that were tried, by their q."""
    bins = []
    tried = [(q, got, np.minimum((q * BINS).astype(np.int64), BINS - 1)) for _, q, got in map(tried_first, (a, b))]
    for number in range(BINS):
        here = [(q[mine == number], got[mine == number]) for q, got, mine in tried]
        n, q, got = zip(*((len(q), _mean(q), _mean(got)) for q, got in here), strict=True)
        bins += [CalibrationBin(number / BINS, (number + 1) / BINS, n, q, got)] if any(n) else []
    return bins


def _mean(values: NDArray[Any]) -> float | None:
    return float(values.mean()) if len(values) else None


def groups(a: Counts, b: Counts, asked: Collection[str] = ()) -> dict[str, tuple[Estimate, ...]]:
    """The acceptance length by label and by what came before, and by what is asked for; one Holm's correction."""
    ratios: list[tuple[str, Ratio]] = []
    for title, (names, *of) in _groupings((a.side, b.side), asked).items():
        found = []
        for value, name in enumerate(names):
            sums = [
                each.sums(each.side.columns.depth_reached, each.side.drafts & (mine == value))
                for each, mine in zip((a, b), of, strict=True)
            ]
            if min(bottom.sum() for _, bottom in sums) >= FEWEST_DRAFTS:
                found.append((title, _ratio(name, sums[0], sums[1], TAU)))
        ratios += found if len(found) > 1 else []  # a single value repeats the overall figures
    by_title: dict[str, tuple[Estimate, ...]] = {}
    of_groups = marked(measured([ratio for _, ratio in ratios], a.clusters), ALPHA)
    for (title, _), estimate in zip(ratios, of_groups, strict=True):
        by_title[title] = (*by_title.get(title, ()), estimate)
    return by_title


Grouping = tuple[list[str], Longs, Longs]  # names of the values, and the value of each step of A and of B


def _groupings(sides: tuple[Side, Side], asked: Collection[str]) -> dict[str, Grouping]:
    """Each by its title."""
    infos = [[request.info for request in side.requests] for side in sides]
    groupings: dict[str, Grouping] = {}
    for label in sorted({name for side in infos for info in side if info is not None for name in info.labels}):
        told = [["" if info is None else str(info.labels.get(label, "")) for info in side] for side in infos]
        values = sorted(set(told[0]) & set(told[1]) - {""})
        if 0 < len(values) <= MOST_VALUES:
            number = {value: index for index, value in enumerate(values)}
            first, second = (np.array([number.get(value, -1) for value in each], np.int64) for each in told)
            groupings[f"{LABEL}{label}"] = values, first[sides[0].request], second[sides[1].request]
    for title, (name, edges) in RANGES.items():
        if title in asked:
            names = [
                f"{low:,}" if high == low + 1 else f"{low:,}+" if high is None else f"{low:,} to {high - 1:,}"
                for low, high in zip(edges, [*edges[1:], None], strict=True)
            ]
            first, second = (np.searchsorted(np.array(edges), getattr(side, name), "right") - 1 for side in sides)
            groupings[title] = names, first, second
    return {**groupings, "after": (list(map(str, PRECEDED)), sides[0].preceded, sides[1].preceded)}
