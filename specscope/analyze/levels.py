"""The level of counts over time: when it changed, and what the low intervals have in common.

A level is weighted by how much counting, and what else differs between intervals, makes it vary. Load that comes and
goes makes levels alternate: then the load is told as a condition, with its times, and no changes.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specscope.analyze.change_points import CHANCE, DEGREES, LEAST, least_chance, noises, segments, steps, varies
from specscope.analyze.conditions import CERTAIN, Condition, find, log_fisher
from specscope.analyze.evidence.arrays import Indices
from specscope.analyze.significance import t_quantile, t_two_sided
from specscope.trace.history.stats import measure
from specscope.trace.record.aggregate import Aggregate
from specscope.trace.record.records import StepRecord
from specscope.trace.record.tree import Bools, Doubles

TOLD = 8  # changes of an engine that are told beside a load that explains them: more of them alternate with it
SHORT = 5  # intervals of a level, at most, of which the middle one counts: one that is odd makes no level
KNOWN = 0.9  # of the intervals, at least, tell a fact that is used
TELLS = 0.5  # a condition's least correlation with the low intervals
ELSEWHERE = "elsewhere"
SIDE, ENGINE, TIME = "side", "engine", "seconds since the start"


@dataclass(frozen=True)
class Level:
    where: str  # the engine, or the condition
    side: str  # of two runs, A or B
    start_ns: int
    end_ns: int
    length: float
    low: float  # of a 95 % interval of the mean
    high: float
    intervals: int
    drafts: int | None
    p_value: float | None = None  # of the change at its start


@dataclass(frozen=True)
class Levels:
    """The levels of engines where they changed, and what the low intervals have in common. Filled by `levels`."""

    changes: tuple[Level, ...] = ()
    condition: Condition | None = None
    groups: tuple[Level, ...] = ()  # where it holds and where not; of two sides, each of A and then of B
    stretches: tuple[tuple[int, int], ...] = ()  # (start_ns, end_ns) of those in which it holds
    unit: str = "interval"  # or request


@dataclass(frozen=True)
class _Items:
    """N intervals, one engine after the other, each in the order of time."""

    side: NDArray[Any]  # A or B
    steps: tuple[StepRecord, ...]
    told: tuple[Aggregate, ...]
    length: Doubles
    counting: Doubles  # the variance that counting alone gives a length
    weight: Doubles  # 1 over the variance of a length
    series: Mapping[tuple[str, str], Indices]  # the intervals of each side's engines
    two: bool  # sides

    @staticmethod
    def of(sides: Sequence[Sequence[StepRecord]]) -> _Items:
        """Those with a length; requests where there are hardly such intervals."""
        every = [
            (side, told.engine, step.end_ns, step, told)
            for side, steps in zip("AB", sides, strict=False)
            for step in steps
            if (told := step.aggregate) is not None and told.length is not None
        ]
        whole = [item for item in every if not item[4].is_request]
        rows = sorted(whole if len(whole) >= 2 * LEAST else every, key=lambda item: item[:3])
        aggregates = tuple(item[4] for item in rows)
        length, counting = np.array([each.length for each in aggregates], np.float64), _counting(aggregates)
        weight = 1 / counting  # and what lies between intervals (DerSimonian, Laird)
        beyond = (weight * (length - (weight * length).sum() / weight.sum()) ** 2).sum() - len(rows) + 1
        between = max(0.0, beyond / max(weight.sum() - (weight**2).sum() / weight.sum(), 1e-12))
        series: dict[tuple[str, str], list[int]] = defaultdict(list)
        for place, item in enumerate(rows):
            series[item[:2]].append(place)
        columns = np.array([item[0] for item in rows]), tuple(item[3] for item in rows), aggregates
        found = {name: np.array(chosen, np.int64) for name, chosen in series.items()}
        return _Items(*columns, length, counting, 1 / (counting + between), found, len(sides) > 1)

    def facts(self, *, timed: bool) -> dict[str, list[Any]]:
        """What is known of every interval: load first, then where and when it was."""
        start = np.array([step.start_ns for step in self.steps]) // 10**9
        first = {side: start[self.side == side].min() for side in set(self.side.tolist())}
        kv_use = [None if each.kv_usage is None else round(100 * each.kv_usage, 1) for each in self.told]
        columns: dict[str, list[Any]] = {
            "running requests": _filled([each.running for each in self.told]),
            "waiting requests": _filled([each.waiting for each in self.told]),
            "KV use in %": _filled(kv_use),
            ENGINE: [each.engine for each in self.told],
            SIDE: self.side.tolist(),
            TIME: [int(at - first[side]) for at, side in zip(start.tolist(), self.side.tolist(), strict=True)],
        }
        return {name: column for name, column in columns.items() if None not in column and (timed or name != TIME)}

    def level(self, where: str, chosen: Indices, noise: float, p: float | None = None) -> Level:
        total, spans = measure(self.told[index] for index in chosen), [self.steps[index] for index in chosen]
        mean = float(self.length[chosen].mean()) if total.tau is None else total.tau
        half = t_quantile(0.975, DEGREES) * math.sqrt(noise / float(self.weight[chosen].sum()))
        bounds = min(step.start_ns for step in spans), max(step.end_ns for step in spans)
        n = len(chosen), total.told("drafts")
        side = str(self.side[chosen[0]]) if self.two else ""
        return Level(where, side, *bounds, mean, max(mean - half, 1.0), mean + half, *n, p)


def levels(*sides: Sequence[StepRecord]) -> Levels:
    """The levels of a run of counts, or of two such runs, with what tells the low intervals of both from the others."""
    told = [step.aggregate for each in sides for step in each if step.aggregate is not None]
    if sum(aggregate.length is not None for aggregate in told) < 2 * LEAST:
        return Levels()
    items = _Items.of(sides)
    unit = "request" if items.told[0].is_request else "interval"
    changes = list(_changed(items, items.length))
    condition, holds = _condition(items, timed=bool(changes))
    if condition is None or _facts_of(condition) == {SIDE}:
        return Levels(tuple(changes), unit=unit)
    means, noise = _explained(items, holds)
    if _of_load(condition) and len(changes) > len(items.series) * (TOLD + 1):
        changes = list(_changed(items, items.length - means))
    rows = [
        items.level(name, chosen, noise)
        for name, held in ((condition.text, holds), (ELSEWHERE, ~holds))
        for side in np.unique(items.side)
        if len(chosen := np.flatnonzero(held & (items.side == side)))
    ]
    return Levels(tuple(changes), condition, tuple(rows), tuple(_stretches(items, holds)), unit)


def _filled(values: list[Any]) -> list[Any]:
    """With the middle one in the place of a few that are not told: a log may begin in the middle of an interval."""
    known = sorted(value for value in values if value is not None)
    few = len(known) >= KNOWN * len(values)
    return [known[len(known) // 2] if value is None else value for value in values] if few else values


def _counting(told: Sequence[Aggregate]) -> Doubles:
    """[N] the variance of K accepted tokens a draft, over the drafts; that of rounding where they are not counted."""
    total, drafts = measure(told), [each.drafts for each in told]
    if total.tau is None or not total.drafted or not all(drafts):
        return np.full(len(told), 0.01**2 / 12)
    mean, rates = total.tau - 1, [rate or 0.0 for rate in total.per_position]
    square = sum((2 * depth - 1) * rate for depth, rate in enumerate(rates, 1))  # the mean of K^2
    spread = square - mean**2 if rates else mean * (total.drafted / total.drafts - mean)
    return np.asarray(max(spread, 1e-3) / np.array(drafts, np.float64))


def _changed(items: _Items, length: Doubles) -> Iterator[Level]:
    for (_, where), chosen in items.series.items():
        y, w = length[chosen], items.weight[chosen]
        known = float((w * items.counting[chosen]).mean())
        bounds, chances = segments(y, w, known), [1.0]
        while bounds and max(chances) >= CHANCE:
            edges = [0, *bounds, len(y)]
            found, slopes = noises(y, w, steps(y, w, bounds), known)
            parts = [(y[first:last], w[first:last]) for first, last in pairwise(edges)]
            means = [np.median(a) if len(a) <= SHORT else np.average(a, weights=b) for a, b in parts]
            gains = np.diff(means) ** 2 / [sum(two) for two in pairwise(1 / b.sum() for _, b in parts)]
            tried = 1 if slopes else len(y)
            chances = [min(1.0, tried * least_chance(gain, found)) for gain in gains.tolist()]
            if max(chances) >= CHANCE:  # beside the others it is no change
                bounds.pop(int(np.argmax(chances)))
        for (first, last), chance in zip(pairwise(edges), [None, *chances], strict=True) if bounds else ():
            yield items.level(where, chosen[first:last], min(found)[0], chance)


def _explained(items: _Items, holds: Bools) -> tuple[Doubles, float]:
    """[N] the mean of those in which a condition holds, or of the others; and the variance that is left at weight 1."""
    y, w = items.length, items.weight
    of = [float(np.average(y[each], weights=w[each])) if each.any() else 0.0 for each in (~holds, holds)]
    means = np.array(of)[holds.astype(np.int64)]
    left = [varies((y - means)[chosen], w[chosen])[1] for chosen in items.series.values()]
    return means, max(float((w * items.counting).mean()), *left)


def _facts_of(condition: Condition) -> set[str]:
    return {test.fact for test in condition.tests}


def _of_load(condition: Condition) -> bool:
    return not _facts_of(condition) & {ENGINE, SIDE, TIME}


def _condition(items: _Items, *, timed: bool) -> tuple[Condition | None, Bools]:
    """The shortest condition that tells low intervals from the others, and where it holds; None where none does."""
    y, w = items.length, items.weight
    order = np.argsort(y, kind="stable")
    total, sums = np.cumsum(w[order]), np.cumsum(w[order] * (y[order] - np.average(y, weights=w)))
    apart = sums[:-1] ** 2 / (total[:-1] * (total[-1] - total[:-1]))  # of two levels, the split that leaves least
    low = y <= y[order[LEAST - 1 + int(apart[LEAST - 1 : len(y) - LEAST].argmax())]]
    facts = items.facts(timed=timed)
    condition = find(facts, low)
    if condition is None or not condition.tests or condition.p_value >= CHANCE or condition.correlation < TELLS:
        return None, low
    if len(condition.tests) > 2 and _facts_of(condition) == {TIME}:  # single moments, which tell nothing
        return None, low
    holds = condition.holds(facts)
    if _of_load(condition) and _coincide(low, holds) >= CERTAIN:
        return None, low
    means, noise = _explained(items, holds)
    error = math.sqrt(noise * (1 / w[holds].sum() + 1 / w[~holds].sum()))
    return (condition if t_two_sided(float(np.ptp(means)) / max(error, 1e-9), DEGREES) < CHANCE else None), holds


def _coincide(low: Bools, holds: Bools) -> float:
    """The chance that so many ends of low stretches are ends of stretches in which a condition holds, or beside them.

    Load comes and goes, and levels may too: two such series often agree in most intervals. But not in where they turn.
    """
    turns, others = (np.flatnonzero(np.diff(values.astype(np.int8))) for values in (low, holds))
    places, chances = len(low) - 1, []
    for reach in (0, 1):
        near = np.unique(np.clip([others + shift for shift in range(-reach, reach + 1)], 0, places - 1))
        both = len(np.intersect1d(turns, near))
        table = both, len(turns) - both, len(near) - both, places - len(turns) - len(near) + both
        chances.append(math.exp(min(0.0, log_fisher(*table))))
    return len(chances) * min(chances)


def _stretches(items: _Items, holds: Bools) -> Iterator[tuple[int, int]]:
    """Those in which a condition holds."""
    for chosen in items.series.values():
        edges = np.flatnonzero(np.diff(np.concatenate([[0], holds[chosen].astype(np.int8), [0]])))
        for first, last in edges.reshape(-1, 2).tolist():
            yield items.steps[chosen[first]].start_ns, items.steps[chosen[last - 1]].end_ns
