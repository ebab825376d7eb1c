"""Both sides as distributions: acceptance, by depth and by group, and how well q predicts acceptance."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specscope.analyze.compare.align import Matched
from specscope.analyze.compare.bootstrap import Ratio, estimates, marked, measured
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
from specscope.trace.record.notes import SOURCES
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
# Lower ends of ranges: groups that are made where a condition of --fail-if names them
RANGES = {
    "output position": ("place", (0, 16, 64, 256, 1024, 4096)),
    "context length": ("context", (0, 128, 512, 1024, 2048, 4096, 8192, 16384, 32768)),
    "requests in the step": ("batch", (1, 2, 4, 8, 16, 32, 64, 128)),
}


@dataclass(frozen=True)
class Counts:
    """What the figures of a side are made of, by step, and which cluster each step belongs to."""

    side: Side
    cluster: Longs  # [S]
    clusters: int

    def total(self, values: NDArray[Any], steps: NDArray[np.integer] | None = None) -> Doubles:
        """[clusters] the sum of a value by step, or of a value at these steps."""
        cluster = self.cluster if steps is None else self.cluster[steps]
        return np.bincount(cluster, values.astype(np.float64), self.clusters).astype(np.float64)


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
    """Acceptance length, rate, by depth, tokens per step, and the calibration of q."""
    both, sides = (a, b), (a.side, b.side)
    columns = [side.columns for side in sides]
    drafts, accepted = ([side.drafts for side in sides], [c.depth_reached for c in columns])
    ratios = [
        _ratio(TAU, both, accepted, drafts, 1.0),
        _ratio(RATE, both, accepted, [np.diff(c.start) for c in columns], percent=True),
    ]
    deepest = min(int(c.tree_depth.max(initial=0)) for c in columns)
    for depth in range(1, min(deepest, DEEPEST) + 1):
        here = [c.tree_depth >= depth for c in columns]
        if min(int(side.sum()) for side in here) < FEWEST_DRAFTS:
            break
        ratios.append(_ratio(depth_rate(depth), both, [got >= depth for got in accepted], here, percent=True))
    bonus = [(c.kind == KINDS.index(FinalKind.BONUS)) & side.drafts for c, side in zip(columns, sides, strict=True)]
    every = [np.ones(len(side), np.bool_) for side in sides]
    ratios += [
        _ratio(PER_STEP, both, [side.emitted for side in sides], every),
        _ratio(WHOLE_PATHS, both, bonus, drafts, percent=True),
        *_looped(both),
        *_by_source(both),
        *_calibrated(both),
    ]
    known = measured([ratio for ratio in ratios if all(side.sum() for side in ratio.bottom)], a.clusters)
    apart = (TAU, LOOPS, WITHOUT_LOOPS)
    tau = [replace(estimate, significant=estimate.nonzero) for estimate in known if estimate.name == TAU]
    unjudged = [estimate for estimate in known if estimate.name in (LOOPS, WITHOUT_LOOPS)]
    return [*tau, *unjudged, *marked([estimate for estimate in known if estimate.name not in apart], ALPHA)]


def _looped(both: tuple[Counts, Counts]) -> list[Ratio]:
    """How much of the output lies in loops, and the acceptance length of the other steps; nothing without loops.

    They are named beside a difference in tau, and not judged: rounding alone can make a text loop.
    """
    sides = [c.side for c in both]
    emitted, looped = [side.emitted for side in sides], [side.looped for side in sides]
    if not any(tokens.any() for tokens in looped) or not all(side.tells_tokens for side in sides):
        return []
    left = [side.drafts & ~((side.looped == side.emitted) & (side.emitted > 0)) for side in sides]
    return [
        _ratio(LOOPS, both, looped, emitted, percent=True),
        _ratio(WITHOUT_LOOPS, both, [side.columns.depth_reached for side in sides], left, 1.0),
    ]


def _by_source(both: tuple[Counts, Counts]) -> list[Ratio]:
    """Where text lookup drafts beside a model: the share of what each of them drafted that was accepted."""
    ratios = []
    for number, name in enumerate(SOURCES):
        sums = []
        for count in both:
            c = count.side.columns
            drafted = c.source == number
            sums.append((count.total(drafted & c.accepted, c.step), count.total(drafted, c.step)))
        (top_a, below_a), (top_b, below_b) = sums
        ratios.append(Ratio(RATES_FROM[name], (top_a, top_b), (below_a, below_b), percent=True))
    return ratios


def _ratio(
    name: str,
    both: tuple[Counts, Counts],
    top: Sequence[NDArray[Any]],
    bottom: Sequence[NDArray[Any]],
    offset: float = 0.0,
    *,
    percent: bool = False,
) -> Ratio:
    above = [c.total(np.where(bottom[index] > 0, top[index], 0)) for index, c in enumerate(both)]
    below = [c.total(bottom[index]) for index, c in enumerate(both)]
    return Ratio(name, (above[0], above[1]), (below[0], below[1]), percent, offset)


def believed(side: Side) -> NDArray[np.floating]:
    """[N] the drafter's probability of each node: q where it was sampled, else its own; NaN where neither is known."""
    return sound(np.where(side.columns.sampled, side.columns.q, side.columns.draft_prob))


def _tried(side: Side) -> tuple[Bools, Doubles, Bools]:
    """[N] first siblings that were tried, whose q is as drawn; and of these q, and whether each was accepted."""
    c, q = side.columns, believed(side)
    known = c.tried & ~np.isnan(q) & (c.sibling == 0)
    return known, q[known], c.accepted[known]


def _calibrated(both: tuple[Counts, Counts]) -> list[Ratio]:
    """How far q exceeds acceptance, and its squared error."""
    above, error, below = [], [], []
    for count in both:
        known, q, accepted = _tried(count.side)
        rows = count.side.columns.step[known]
        above.append(count.total(q - accepted, rows))
        error.append(count.total((q - accepted) ** 2, rows))
        below.append(count.total(np.ones(len(rows)), rows))
    bottom = below[0], below[1]
    return [Ratio(Q_ABOVE, (above[0], above[1]), bottom, signed=True), Ratio(Q_ERROR, (error[0], error[1]), bottom)]


def calibration(a: Side, b: Side) -> list[CalibrationBin]:
    """First siblings that were tried, by their q."""
    columns = []
    for side in (a, b):
        _, q, accepted = _tried(side)
        bins = np.minimum((q * BINS).astype(np.int64), BINS - 1)
        mine = [bins == number for number in range(BINS)]
        columns.append([(int(here.sum()), _mean(q[here]), _mean(accepted[here])) for here in mine])
    return [
        CalibrationBin(number / BINS, (number + 1) / BINS, (n, m), (q, r), (got, have))
        for number, ((n, q, got), (m, r, have)) in enumerate(zip(*columns, strict=True))
        if n or m
    ]


def _mean(values: NDArray[Any]) -> float | None:
    return float(values.mean()) if len(values) else None


def groups(a: Counts, b: Counts, asked: Collection[str] = ()) -> dict[str, tuple[Estimate, ...]]:
    """The acceptance length by label and by what came before, and by what is asked for; one Holm's correction."""
    both = (a, b)
    ratios: list[tuple[str, Ratio]] = []
    for title, names, of in _groupings((a.side, b.side), asked):
        rows = [
            [c.side.drafts & (mine == value) for c, mine in zip(both, of, strict=True)] for value in range(len(names))
        ]
        enough = [value for value, here in enumerate(rows) if min(int(side.sum()) for side in here) >= FEWEST_DRAFTS]
        for value in enough if len(enough) > 1 else ():  # a single value repeats the overall figures
            accepted = [c.side.columns.depth_reached for c in both]
            ratios.append((title, _ratio(names[value], both, accepted, rows[value], 1.0)))
    by_title: dict[str, tuple[Estimate, ...]] = {}
    of_groups = estimates([ratio for _, ratio in ratios], a.clusters, ALPHA)
    for (title, _), estimate in zip(ratios, of_groups, strict=True):
        by_title[title] = (*by_title.get(title, ()), estimate)
    return by_title


Grouping = tuple[str, list[str], list[Longs]]  # title, names of the values, the value of each step by side


def _groupings(sides: tuple[Side, Side], asked: Collection[str]) -> list[Grouping]:
    groupings = _labels(sides)
    for title, (name, edges) in RANGES.items():
        if title in asked:
            names = [
                f"{low:,}" if high == low + 1 else f"{low:,}+" if high is None else f"{low:,} to {high - 1:,}"
                for low, high in zip(edges, [*edges[1:], None], strict=True)
            ]
            of = [np.searchsorted(np.array(edges), getattr(side, name), "right") - 1 for side in sides]
            groupings.append((title, names, of))
    return [*groupings, ("after", list(map(str, PRECEDED)), [side.preceded for side in sides])]


def _labels(sides: tuple[Side, Side]) -> list[Grouping]:
    infos = [[request.info for request in side.requests] for side in sides]
    names = sorted({name for side in infos for info in side if info is not None for name in info.labels})
    groupings: list[Grouping] = []
    for name in names:
        of = [["" if info is None else str(info.labels.get(name, "")) for info in side] for side in infos]
        values = sorted(set(of[0]) & set(of[1]) - {""})
        if 0 < len(values) <= MOST_VALUES:
            number = {value: index for index, value in enumerate(values)}
            by_request = [np.array([number.get(value, -1) for value in side], np.int64) for side in of]
            steps = [mine[side.request] for mine, side in zip(by_request, sides, strict=True)]
            groupings.append((f"{LABEL}{name}", values, steps))
    return groupings
