"""Captures that hold counts only, compared: their figures side by side, and nothing else."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import numpy as np

from specscope.analyze.compare.bootstrap import FEWEST, Estimate, spanned
from specscope.analyze.compare.comparison import judge_alone
from specscope.analyze.compare.failif import FailCondition, counted, judge, parse
from specscope.analyze.compare.figures import FEWEST_DRAFTS
from specscope.analyze.compare.side import from_history, joined
from specscope.analyze.levels import Levels, levels
from specscope.analyze.plain import plain
from specscope.analyze.table import Table, percent, share, told
from specscope.errors import UserError
from specscope.trace.history.conditions import COUNTED, RATE, TAU, Threshold, depth_rate
from specscope.trace.history.interval import IntervalMeans, definitions, made_up
from specscope.trace.history.stats import Acceptance, measure
from specscope.trace.history.wording import plural
from specscope.trace.record.aggregate import Aggregate
from specscope.trace.record.records import StepRecord
from specscope.trace.wire.reading import CaptureReader, read_capture

UNPAIRED = "One side or both hold counts only, so no requests are paired. 95 %: interval of the difference."
ALIKE = "Intervals assume independent drafts. Drafts of one request are not, so true intervals are wider."
APART = "Intervals follow from how much the requests of a run, or the intervals of a log, differ."
DRAFT = "draft"
NO_SPREAD = "a side reports no counts by position, so there is no interval"


@dataclass(frozen=True)
class CountsSide:
    """The captures of one side, summed."""

    source: tuple[str, ...]
    acceptance: Acceptance
    warnings: tuple[str, ...]
    counts_only: bool  # whether a capture among them holds no steps
    requests: int | None
    made_up: bool  # its verdicts, for a benchmark
    intervals: tuple[StepRecord, ...]
    units: tuple[Acceptance, ...]  # of each request, or of each interval: drafts of one are alike
    unit: str  # what these are; draft, where there are too few intervals to see how they differ

    # What its intervals tell, and their means: where there are no counts they are its figures
    told = cached_property[list[Aggregate]](lambda side: [step.aggregate for step in side.intervals if step.aggregate])
    means = cached_property[IntervalMeans](lambda side: IntervalMeans(side.told))

    @property
    def definitions(self) -> list[str]:
        """Of its figures, where they are not as everywhere."""
        return list(dict.fromkeys(line for each in self.told for line in definitions(each)))

    @property
    def counts(self) -> dict[str, int | None]:
        """By the names in conditions."""
        told = {name: self.acceptance.told(key) for name, key in COUNTED.items() if name != "requests"}
        return told | {"requests": self.requests}

    @cached_property
    def figures(self) -> dict[str, tuple[float | None, float | None]]:
        """(the figure, its standard error) by name.

        A draft accepts K tokens, and r_d is the share of drafts with K >= d: so E[K^2] is the sum of (2 d - 1) r_d.
        """
        a, error, of_rate = self.acceptance, None, None
        rates = list(enumerate(a.per_position, 1))
        if rates and a.tau is not None:
            square = sum((2 * depth - 1) * (rate or 0.0) for depth, rate in rates)
            alone = math.sqrt(max(square - (a.tau - 1) ** 2, 0) / a.drafts)
            error = self._error(alone, lambda unit: (unit.accepted, unit.drafts))
            if a.drafted:
                of_rate = self._error(alone * a.drafts / a.drafted, lambda unit: (unit.accepted, unit.drafted))
        by_depth = {
            depth_rate(at): (r, r if r is None else self._error(math.sqrt(r * (1 - r) / a.drafts), partial(_at, at)))
            for at, r in rates
        }
        return {TAU: (self.means.length(a), error), RATE: (self.means.rate(a), of_rate), **by_depth}

    def _error(self, alone: float, parts: Callable[[Acceptance], tuple[int, int]]) -> float:
        """The standard error of a ratio of sums: as units differ, and at least that of independent drafts, `alone`."""
        top, bottom = np.array([parts(unit) for unit in self.units], np.float64).reshape(-1, 2).T
        if self.unit == DRAFT or len(top) < 2 or not bottom.any():
            return alone
        off = top - bottom * top.sum() / bottom.sum()
        return max(alone, math.sqrt(len(top) / (len(top) - 1) * float(off @ off)) / float(bottom.sum()))

    def to_dict(self) -> dict[str, Any]:
        return {
            "source": list(self.source),
            "acceptance": self.acceptance.to_dict(),
            "mean_acceptance_length": self.figures[TAU][0],
            "draft_acceptance_rate": self.figures[RATE][0],
            "requests": self.requests,
            "definitions": self.definitions,
            "made_up": self.made_up,
        }


@dataclass(frozen=True)
class CountsComparison:
    """Both sides. Differences are B - A."""

    a: CountsSide
    b: CountsSide
    conditions: tuple[FailCondition, ...] = ()  # of --fail-if

    # When the level of a side changed, and what tells the low intervals of both from the others
    levels = cached_property[Levels](lambda both: levels(both.a.intervals, both.b.intervals))

    @property
    def headline(self) -> str:
        tau = next(figure for figure in figures(self.a, self.b) if figure.name == TAU)
        if tau.difference is None:
            return "Whether the acceptance length changed is not known: a side does not report it."
        moved = "rose" if tau.difference > 0 else "fell" if tau.difference < 0 else "stayed the same"
        ends = "" if tau.low is None else f", 95 %: {tau.interval(2)}"
        change = f"The acceptance length {moved}: {tau.text(tau.a, 2)} → {tau.text(tau.b, 2)}"
        sure = "; this may be chance" if tau.difference and not tau.nonzero else ""
        if tau.low is None:
            few = f"; {plural(tau.clusters, tau.unit)} cannot show whether this is chance"
            sure = "" if tau.without_interval else few
        return f"{change} ({tau.text(tau.difference, 2, '+')}{ends}){sure}."

    @property
    def about_intervals(self) -> str:
        return ALIKE if DRAFT in (self.a.unit, self.b.unit) else APART

    def table(self) -> Table:
        sides, rows = (self.a, self.b), []
        for figure in figures(*sides):
            name, told_of_both = "draft acceptance rate", [percent(figure.a), percent(figure.b)]
            if figure.name == TAU:
                name, told_of_both = "mean acceptance length τ", [side.means.told(side.acceptance) for side in sides]
            elif figure.name != RATE:
                name = f"accepted at {figure.name.removesuffix(' rate')}, of the drafts"
                told_of_both = [share(figure.a, self.a.acceptance.drafts), share(figure.b, self.b.acceptance.drafts)]
            rows.append((name, *told_of_both, figure.points(figure.difference, 2, "+"), figure.interval(2)))
        for name in COUNTED:
            if any(side.counts[name] is not None for side in sides):
                marks = (side.means.mark if name == "drafts" else "" for side in sides)
                counts = (mark + told(side.counts[name]) for mark, side in zip(marks, sides, strict=True))
                rows.append((name, *counts, "", ""))
        return Table("Acceptance", ("", "A", "B", "B - A", "95 %"), rows, f"{UNPAIRED} {self.about_intervals}")

    @property
    def warnings(self) -> list[str]:
        """What must be known before one side is compared with the other."""
        name, other = ("A", "B") if self.a.made_up else ("B", "A")
        made_up = f"{name} has synthetic verdicts and {other} does not say so: their figures cannot be compared"
        return [made_up] if self.a.made_up != self.b.made_up else []

    def defined(self) -> list[tuple[str, list[str]]]:
        """How each side defines its figures, and what they have in common."""
        a, b = self.a.definitions, self.b.definitions
        both = [line for line in a if line in b]
        own = [(name, [line for line in lines if line not in both]) for name, lines in (("A", a), ("B", b))]
        return [*own, *([("A, B", both)] if both else [])]

    def to_dict(self) -> dict[str, Any]:
        met = {"conditions": plain(self.conditions)} if self.conditions else {}
        more = {"headline": self.headline, "note": f"{UNPAIRED} {self.about_intervals}"}
        return {"counts_only": True, **more, **plain({"a": self.a, "b": self.b, "levels": self.levels}), **met}


def compare_counts(a: Sequence[str], b: Sequence[str], limits: Sequence[Threshold] = ()) -> CountsComparison | None:
    """Both sides; None where none of the captures holds counts only. Raises UserError."""
    first, second = (_side(map(read_capture, paths)) for paths in (a, b))
    if not first.counts_only and not second.counts_only:
        return None
    known = [*figures(first, second), *counted(first.counts, second.counts)]
    return CountsComparison(first, second, tuple(judge(limits, known)))


def gate(readers: Sequence[CaptureReader], text: str) -> tuple[FailCondition, ...]:
    """The outcome of conditions on one side's figures as they are. Raises UserError for one on a change."""
    limits = parse(text)
    if any(limit.of_change for limit in limits):
        raise UserError(f"--fail-if {text}: one run shows no change: write FIGURE < X or FIGURE > X, or use compare")
    side = _side(readers)
    if side.counts_only:
        found = judge(limits, [*figures(side, side), *counted(side.counts, side.counts)])
    else:
        found = judge_alone(joined([from_history(reader.history, reader.name) for reader in readers]), limits)
    return tuple(replace(one, detail=one.detail.replace("B has", "it is")) for one in found)


def figures(a: CountsSide, b: CountsSide) -> list[Estimate]:
    """What a --fail-if can ask for, with intervals as far as the counts of both sides have a spread."""
    first, second, found = a.figures, b.figures, []
    count, unit = min((side.acceptance.drafts if side.unit == DRAFT else len(side.units), side.unit) for side in (a, b))
    drafts = min(a.acceptance.drafts, b.acceptance.drafts)
    for name in {**first, **second}:
        (x, x_error), (y, y_error) = (side.get(name, (None, None)) for side in (first, second))
        change = None if x is None or y is None else y - x
        figure = Estimate(name, x, y, change, significant=True, clusters=count, unit=unit, percent=name != TAU)
        if x_error is None or y_error is None:
            figure = replace(figure, without_interval=NO_SPREAD)
        elif x is not None and y is not None and drafts >= FEWEST_DRAFTS and count >= FEWEST:
            of_logs = x > 0 and y > 0  # error(log x) = error(x) / x
            error = math.hypot(x_error / x, y_error / y) if of_logs else math.hypot(x_error, y_error)
            figure = spanned(figure, error, of_logs=of_logs, least=float(name == TAU))
        found.append(figure)
    return found


def _at(depth: int, unit: Acceptance) -> tuple[int, int]:
    """Drafts that accepted a token at a depth, and all of them."""
    return sum(unit.accepted_at[depth - 1 : depth]), unit.drafts


def _side(readers: Iterable[CaptureReader]) -> CountsSide:
    names, total, warnings, steps = list[str](), Acceptance(), list[str](), list[StepRecord]()
    requests, counts_only, units = list[int | None](), False, list[Acceptance]()
    for reader in readers:
        names.append(reader.name)
        history = reader.history
        if not history.acceptance.drafts and not history.acceptance.aggregates:
            raise UserError(f"{reader.name} holds no decode steps and no counts: there is nothing to compare")
        total.merge(history.acceptance)
        counts_only |= bool(history.acceptance.aggregates) or history.figures_only
        told = [step.aggregate for step in history.steps if step.aggregate is not None]
        steps += history.steps
        units += [request.acceptance for request in history.requests.values()] or [measure([each]) for each in told]
        requests += [1 if each.is_request else each.requests for each in told] or [len(history.requests)]
        warnings += [*reader.warnings, *filter(None, [history.figures_note])]
    intervals = tuple(step for step in steps if step.aggregate is not None)
    rules = {part.rule for step in steps for part in step.requests}
    units = [unit for unit in units if unit.drafts and unit.knows("drafts", "drafted", "accepted", "accepted_at")]
    unit = "request" if not intervals else "interval" if len(units) >= FEWEST else DRAFT
    return CountsSide(
        tuple(names),
        total,
        tuple(warnings),
        counts_only,
        requests=None if None in requests else sum(filter(None, requests)),
        made_up=made_up((step.aggregate for step in intervals if step.aggregate is not None), rules),
        intervals=intervals,
        units=tuple(units),
        unit=unit,
    )
