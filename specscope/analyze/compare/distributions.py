"""Both sides as distributions: acceptance, by depth and by group, and how well q predicts acceptance."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specscope.analyze.compare.bootstrap import Ratio, estimates, marked, measured
from specscope.analyze.compare.columns import Side
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
    PairedBy,
)
from specscope.analyze.evidence.columns import KINDS, PRECEDED
from specscope.trace.history.conditions import RATE, TAU, depth_rate
from specscope.trace.record.notes import SOURCES
from specscope.trace.record.records import FinalKind, Outcome
from specscope.trace.record.rules import sound
from specscope.trace.record.tree import Doubles, Drawn

FEWEST_DRAFTS = 30  # on each side: a figure by depth or group with fewer is left out
DEEPEST = 16
MOST_VALUES = 20  # a label with more is an identifier, not a group
BINS = 10
# tau is the primary figure: it is judged by the interval that is shown, which gives a false alarm in 1 of 20 runs. So
# that the others add little to that, all other figures together are allowed 1 in 100, and all groups together as well.
ALPHA = 0.01
POSITIONS = (0, 16, 64, 256, 1024, 4096)  # lower ends of ranges of output tokens
CONTEXTS = (0, 128, 512, 1024, 2048, 4096, 8192, 16384, 32768)  # of tokens in the cache
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128)  # of requests in the step


@dataclass(frozen=True)
class Counts:
    """What the figures of a side are made of, by step, and which cluster each step belongs to."""

    side: Side
    cluster: NDArray[np.int64]  # [S]
    clusters: int

    @property
    def drafts(self) -> NDArray[np.bool_]:
        """[S] steps that drafted."""
        return self.side.steps["judged"] & (self.side.steps["nodes"] > 0)

    def total(self, values: NDArray[Any], rows: NDArray[Any] | None = None) -> Doubles:
        """[clusters] the sum of a value by step, or of a value at these rows of `steps`."""
        cluster = self.cluster if rows is None else self.cluster[rows.astype(np.int64)]
        return np.bincount(cluster, values.astype(np.float64), self.clusters).astype(np.float64)


def clustered(a: Side, b: Side, pairs: Sequence[tuple[int, int, PairedBy]]) -> tuple[Counts, Counts]:
    """A cluster is a pair, or a request that has none."""
    counts = []
    cluster_of = [{pair[index]: number for number, pair in enumerate(pairs)} for index in (0, 1)]
    total = len(pairs)
    for side, mine in zip((a, b), cluster_of, strict=True):
        for request in range(len(side.requests)):
            if request not in mine:
                mine[request], total = total, total + 1
    for side, mine in zip((a, b), cluster_of, strict=True):
        of = np.array([mine[request] for request in range(len(side.requests))], np.int64)
        counts.append(Counts(side, of[side.steps["request"]], total))
    return counts[0], counts[1]


def figures(a: Counts, b: Counts) -> list[Estimate]:
    """Acceptance length, rate, by depth, tokens per step, and the calibration of q."""
    both = (a, b)
    drafts = [side.drafts for side in both]
    ratios = [
        _ratio(TAU, both, [c.side.steps["accepted"] for c in both], drafts, 1.0),
        _ratio(
            RATE, both, [c.side.steps["accepted"] for c in both], [c.side.steps["nodes"] for c in both], percent=True
        ),
    ]
    deepest = min(int(c.side.tree_depth.max(initial=0)) for c in both)
    for depth in range(1, min(deepest, DEEPEST) + 1):
        here = [c.drafts & (c.side.tree_depth >= depth) for c in both]
        if min(int(side.sum()) for side in here) < FEWEST_DRAFTS:
            break
        got = [c.side.steps["accepted"] >= depth for c in both]
        ratios.append(
            _ratio(depth_rate(depth), both, [x & y for x, y in zip(here, got, strict=True)], here, percent=True)
        )
    judged = [c.side.steps["judged"] for c in both]
    ratios.append(_ratio(PER_STEP, both, [c.side.steps["emitted"] for c in both], judged))
    bonus = [(c.side.steps["kind"] == KINDS.index(FinalKind.BONUS)) & c.drafts for c in both]
    ratios.append(_ratio(WHOLE_PATHS, both, bonus, drafts, percent=True))
    ratios += _looped(both)
    ratios += _by_source(both)
    ratios += _calibrated(both)
    known = measured([ratio for ratio in ratios if all(side.sum() for side in ratio.bottom)], a.clusters)
    tau = [replace(estimate, significant=estimate.nonzero) for estimate in known if estimate.name == TAU]
    unjudged = [estimate for estimate in known if estimate.name in (LOOPS, WITHOUT_LOOPS)]
    return [
        *tau,
        *unjudged,
        *marked([estimate for estimate in known if estimate.name not in (TAU, LOOPS, WITHOUT_LOOPS)], ALPHA),
    ]


def _looped(both: tuple[Counts, Counts]) -> list[Ratio]:
    """How much of the output lies in loops, and the acceptance length of the other steps; nothing without loops.

    They are named beside a difference in tau, and not judged: rounding alone can make a text loop.
    """
    emitted, looped = [c.side.steps["emitted"] for c in both], [c.side.looped for c in both]
    if not any(tokens.any() for tokens in looped) or not all(c.side.tells_tokens for c in both):
        return []
    left = [c.drafts & ~((inside == size) & (size > 0)) for c, inside, size in zip(both, looped, emitted, strict=True)]
    return [
        _ratio(LOOPS, both, looped, emitted, percent=True),
        _ratio(WITHOUT_LOOPS, both, [c.side.steps["accepted"] for c in both], left, 1.0),
    ]


def _by_source(both: tuple[Counts, Counts]) -> list[Ratio]:
    """Where text lookup drafts beside a model: the share of what each of them drafted that was accepted."""
    ratios = []
    for number, name in enumerate(SOURCES):
        drafted = [c.side.nodes["source"] == number for c in both]
        accepted = [d & (c.side.nodes["outcome"] == Outcome.ACCEPTED) for c, d in zip(both, drafted, strict=True)]
        a, b = (
            (c.total(top, c.side.node_step), c.total(bottom, c.side.node_step))
            for c, top, bottom in zip(both, accepted, drafted, strict=True)
        )
        ratios.append(Ratio(RATES_FROM[name], (a[0], b[0]), (a[1], b[1]), True, 0.0))
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


def believed(side: Side) -> NDArray[np.float32]:
    """[N] the drafter's probability of each node: q where it was sampled, else its own; NaN where neither is known."""
    sampled = side.nodes["drawn"] != Drawn.DETERMINISTIC
    return sound(np.where(sampled, side.nodes["q"], side.nodes["prob"]).astype(np.float32))


def _calibrated(both: tuple[Counts, Counts]) -> list[Ratio]:
    """How far q exceeds acceptance, and its squared error; over first siblings, whose q is as drawn when tried."""
    tops: list[list[Doubles]] = [[], []]
    belows: list[Doubles] = []
    for c in both:
        q = believed(c.side)
        known = c.side.tried & ~np.isnan(q) & (c.side.sibling == 0)
        rows = c.side.node_step[known]
        miss = (c.side.nodes["outcome"][known] == Outcome.ACCEPTED) - q[known].astype(np.float64)
        tops[0].append(c.total(-miss, rows))
        tops[1].append(c.total(miss**2, rows))
        belows.append(c.total(np.ones(len(rows)), rows))
    names = (Q_ABOVE, Q_ERROR)
    return [Ratio(name, (top[0], top[1]), (belows[0], belows[1])) for name, top in zip(names, tops, strict=True)]


def calibration(a: Side, b: Side) -> list[CalibrationBin]:
    """First siblings that were tried, by their q."""
    edges = np.linspace(0, 1, BINS + 1)
    columns = []
    for side in (a, b):
        q = believed(side)
        known = side.tried & ~np.isnan(q) & (side.sibling == 0)
        bins = np.minimum((q[known] * BINS).astype(np.int64), BINS - 1)
        count = np.bincount(bins, minlength=BINS)
        with np.errstate(invalid="ignore"):
            mean = np.bincount(bins, weights=q[known].astype(np.float64), minlength=BINS) / count
            accepted = side.nodes["outcome"][known] == Outcome.ACCEPTED
            got = np.bincount(bins, weights=accepted.astype(np.float64), minlength=BINS) / count
        columns.append((count, mean, got))
    (count_a, mean_a, got_a), (count_b, mean_b, got_b) = columns
    return [
        CalibrationBin(
            float(edges[index]),
            float(edges[index + 1]),
            (int(count_a[index]), int(count_b[index])),
            (_known(mean_a[index]), _known(mean_b[index])),
            (_known(got_a[index]), _known(got_b[index])),
        )
        for index in range(BINS)
        if count_a[index] or count_b[index]
    ]


def _known(value: float) -> float | None:
    return None if np.isnan(value) else float(value)


def groups(a: Counts, b: Counts) -> dict[str, tuple[Estimate, ...]]:
    """The acceptance length by group, one Holm's correction over all of them."""
    both = (a, b)
    ratios: list[tuple[str, Ratio]] = []
    for title, names, of in _groupings(both):
        rows = [[c.drafts & (mine == value) for c, mine in zip(both, of, strict=True)] for value in range(len(names))]
        enough = [value for value, here in enumerate(rows) if min(int(side.sum()) for side in here) >= FEWEST_DRAFTS]
        for value in enough if len(enough) > 1 else ():  # a single value repeats the overall figures
            accepted = [c.side.steps["accepted"] for c in both]
            ratios.append((title, _ratio(names[value], both, accepted, rows[value], 1.0)))
    group_estimates = estimates([ratio for _, ratio in ratios], a.clusters, ALPHA)
    by_title: dict[str, list[Estimate]] = {}
    for (title, _), estimate in zip(ratios, group_estimates, strict=True):
        by_title.setdefault(title, []).append(estimate)
    return {title: tuple(each) for title, each in by_title.items()}


Grouping = tuple[str, list[str], list[NDArray[np.int64]]]  # title, names of the values, the value of each step by side


def _groupings(both: tuple[Counts, Counts]) -> list[Grouping]:
    groupings = _labels(both)
    places = [c.side.place for c in both]
    groupings.append(_ranges("output position", POSITIONS, places))
    groupings.append(_ranges("context length", CONTEXTS, [c.side.steps["context"] for c in both]))
    groupings.append(_ranges("requests in the step", BATCHES, [c.side.steps["batch"] for c in both]))
    groupings.append(
        ("after", [str(preceded) for preceded in PRECEDED], [c.side.steps["preceded"].astype(np.int64) for c in both])
    )
    return groupings


def _ranges(title: str, edges: Sequence[int], values: Sequence[NDArray[np.integer]]) -> Grouping:
    names = [
        f"{low:,}"
        if high is not None and high == low + 1
        else f"{low:,}+"
        if high is None
        else f"{low:,} to {high - 1:,}"
        for low, high in zip(edges, [*edges[1:], None], strict=True)
    ]
    return title, names, [np.searchsorted(np.array(edges), side, "right") - 1 for side in values]


def _labels(both: tuple[Counts, Counts]) -> list[Grouping]:
    infos = [[request.info for request in c.side.requests] for c in both]
    names = sorted({name for side in infos for info in side if info is not None for name in info.labels})
    groupings: list[Grouping] = []
    for name in names:
        of = [["" if info is None else str(info.labels.get(name, "")) for info in side] for side in infos]
        values = sorted(set(of[0]) & set(of[1]) - {""})
        if 0 < len(values) <= MOST_VALUES:
            number = {value: index for index, value in enumerate(values)}
            by_request = [np.array([number.get(value, -1) for value in side], np.int64) for side in of]
            steps = [mine[c.side.steps["request"]] for mine, c in zip(by_request, both, strict=True)]
            groupings.append((f"{LABEL}{name}", values, steps))
    return groupings
