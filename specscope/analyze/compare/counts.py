"""Captures that hold counts only, compared: their figures side by side, and nothing else."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from specscope.analyze.compare.bootstrap import interval
from specscope.analyze.compare.failif import counted, judge
from specscope.analyze.compare.figures import FEWEST_DRAFTS
from specscope.analyze.compare.result import Estimate, FailCondition
from specscope.analyze.levels import Levels, levels
from specscope.analyze.plain import plain
from specscope.analyze.table import NONE, Table, number, one_line, percent, share, told
from specscope.errors import UserError
from specscope.trace.history.conditions import COUNTED, RATE, TAU, Threshold, depth_rate
from specscope.trace.history.interval import IntervalMeans, definitions, made_up
from specscope.trace.history.stats import Acceptance
from specscope.trace.record.aggregate import Aggregate
from specscope.trace.record.records import StepRecord
from specscope.trace.record.vocabulary import printable
from specscope.trace.wire.reading import read_capture

NOTE = (
    "Counts only on one side or both: no requests are paired, and whether a difference is beyond chance is not judged."
)
INTERVALS = "Intervals take drafts for independent. Those of one request are not quite: true intervals are wider."
SIGMAS = 1.96  # of a 95 % interval
LONGEST = 200  # characters of a name


@dataclass(frozen=True)
class CountsSide:
    """The captures of one side, summed."""

    sources: tuple[str, ...]
    acceptance: Acceptance
    warnings: tuple[str, ...]
    counts_only: bool  # whether a capture among them holds no steps
    averages: Mapping[str, float]  # the last that it reports, where there are no counts for a length
    told: str = NONE  # its length in words
    mark: str = ""  # of a number of drafts that was worked out
    length: float | None = None  # from the counts, else the mean of what its intervals report
    rate: float | None = None  # likewise
    requests: int | None = None
    definitions: tuple[str, ...] = ()  # of its figures, where they are not as everywhere
    made_up: bool = False  # its verdicts, for a benchmark
    intervals: tuple[StepRecord, ...] = ()

    @property
    def counts(self) -> dict[str, int | None]:
        """By the names in conditions."""
        return {
            name: self.requests if name == "requests" else self.acceptance.told(key) for name, key in COUNTED.items()
        }


@dataclass(frozen=True)
class CountsComparison:
    """Both sides. Differences are B - A."""

    a: CountsSide
    b: CountsSide
    conditions: tuple[FailCondition, ...] = ()  # of --fail-if

    @cached_property
    def levels(self) -> Levels:
        """When the level of a side changed, and what tells the low intervals of both from the others."""
        return levels(self.a.intervals, self.b.intervals)

    def table(self) -> Table:
        """Figure, A, B and B - A."""
        a, b = self.a.acceptance, self.b.acceptance
        lengths, rates = (self.a.length, self.b.length), (self.a.rate, self.b.rate)
        rows = [
            ("mean acceptance length τ", self.a.told, self.b.told, _signed(*lengths)),
            ("draft acceptance rate", *map(percent, rates), _signed(*rates, share=True)),
        ]
        rates_a, rates_b = a.per_position, b.per_position
        for index in range(max(len(rates_a), len(rates_b))):
            rate_a, rate_b = (rates[index] if index < len(rates) else None for rates in (rates_a, rates_b))
            both = share(rate_a, a.drafts), share(rate_b, b.drafts)
            rows.append((f"accepted at depth {index + 1}, of the drafts", *both, _signed(rate_a, rate_b, share=True)))
        rows += [
            (name, *(_mark(side, name) + told(side.counts[name]) for side in (self.a, self.b)), "")
            for name, count in self.a.counts.items()
            if (count, self.b.counts[name]) != (None, None)
        ]
        for name in {**self.a.averages, **self.b.averages}:
            last_a, last_b = self.a.averages.get(name), self.b.averages.get(name)
            rows.append((f"{one_line(name, LONGEST)}, last", number(last_a), number(last_b), _signed(last_a, last_b)))
        return Table("Acceptance", ("", "A", "B", "B - A"), rows, NOTE)

    @property
    def warnings(self) -> list[str]:
        """What must be known before one side is compared with the other."""
        name, other = ("A", "B") if self.a.made_up else ("B", "A")
        made_up = f"{name} has made-up verdicts and {other} does not say so: their figures cannot be compared"
        return [made_up] if self.a.made_up != self.b.made_up else []

    def defined(self) -> list[tuple[str, list[str]]]:
        """How each side defines its figures, and what they have in common."""
        a, b = self.a.definitions, self.b.definitions
        both = [line for line in a if line in b]
        own = [(name, [line for line in lines if line not in both]) for name, lines in (("A", a), ("B", b))]
        return [*own, *([("A, B", both)] if both else [])]

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        sides = {
            name: {
                "source": list(side.sources),
                "acceptance": side.acceptance.to_dict(),
                "mean_acceptance_length": side.length,
                "draft_acceptance_rate": side.rate,
                "requests": side.requests,
                "definitions": list(side.definitions),
                "made_up": side.made_up,
            }
            for name, side in (("a", self.a), ("b", self.b))
        }
        met = (
            {"conditions": [dataclasses.asdict(condition) for condition in self.conditions]} if self.conditions else {}
        )
        return {"counts_only": True, "note": NOTE, **sides, "levels": plain(self.levels), **met}


def compare_counts(a: Sequence[str], b: Sequence[str], limits: Sequence[Threshold] = ()) -> CountsComparison | None:
    """Both sides; None where none of the captures holds counts only. Raises UserError."""
    sides = [_side(paths) for paths in (a, b)]
    if not any(side.counts_only for side in sides):
        return None
    first, second = sides
    return CountsComparison(
        first, second, tuple(judge(limits, [*figures(first, second), *counted(first.counts, second.counts)]))
    )


def figures(a: CountsSide, b: CountsSide) -> list[Estimate]:
    """What a --fail-if can ask for, with intervals as far as the counts of both sides have a spread."""
    spreads_a, spreads_b = spreads(a.acceptance), spreads(b.acceptance)
    for side, known in ((a, spreads_a), (b, spreads_b)):  # averages alone have none
        known[TAU], known[RATE] = (side.length, known[TAU][1]), (side.rate, known[RATE][1])
    nothing = None, None
    return [
        _estimate(
            name,
            spreads_a.get(name, nothing),
            spreads_b.get(name, nothing),
            min(a.acceptance.drafts, b.acceptance.drafts),
        )
        for name in {**spreads_a, **spreads_b}
    ]


def spreads(counts: Acceptance) -> dict[str, tuple[float | None, float | None]]:
    """(the figure, its standard error) by name.

    A draft accepts K tokens, and r_d is the share of drafts with K >= d: so E[K^2] is the sum of (2 d - 1) r_d.
    """
    rates, tau = [rate or 0.0 for rate in counts.per_position], counts.tau
    error = None
    if rates and tau is not None:
        square = sum((2 * depth - 1) * rate for depth, rate in enumerate(rates, 1))
        error = math.sqrt(max(square - (tau - 1) ** 2, 0) / counts.drafts)
    length = counts.drafted / counts.drafts if counts.drafts else 0.0  # of a draft
    known = {TAU: (tau, error), RATE: (counts.rate, error / length if error is not None and length else None)}
    for depth, share_here in enumerate(rates, 1):
        known[depth_rate(depth)] = share_here, math.sqrt(share_here * (1 - share_here) / counts.drafts)
    return known


def _estimate(
    name: str, first: tuple[float | None, float | None], second: tuple[float | None, float | None], drafts: int
) -> Estimate:
    (a, a_error), (b, b_error) = first, second
    difference = None if a is None or b is None else b - a
    estimate = Estimate(name, a, b, difference, clusters=drafts, unit="draft", significant=True, percent=name != TAU)
    if a_error is None or b_error is None:
        why = "a side reports no counts by position, from which an interval follows"
        return replace(estimate, without_interval=why)
    if a is None or b is None or drafts < FEWEST_DRAFTS:
        return estimate
    of_logs = a > 0 and b > 0  # error(log x) = error(x) / x
    change = math.log(b / a) if of_logs else b - a
    half = SIGMAS * (math.hypot(a_error / a, b_error / b) if of_logs else math.hypot(a_error, b_error))
    low, high = interval(a, b, change, half, of_logs=of_logs, percent=estimate.percent)
    return replace(estimate, low=low, high=high)


def _side(paths: Sequence[str]) -> CountsSide:
    total, warnings, counts_only = Acceptance(), [], False
    averages: dict[str, float] = {}
    intervals: list[Aggregate] = []
    steps: list[StepRecord] = []
    rules: set[str] = set()
    requests: list[int | None] = []
    for path in paths:
        reader = read_capture(path)
        if not reader.history.acceptance.drafts and not reader.history.acceptance.aggregates:
            raise UserError(f"{path} holds no decode steps and no counts: there is nothing to compare")
        total.merge(reader.history.acceptance)
        counts_only |= bool(reader.history.acceptance.aggregates) or reader.history.figures_only
        averages |= next((step.aggregate.averages for step in reader.history.steps[-1:] if step.aggregate), {})
        told = [step.aggregate for step in reader.history.steps if step.aggregate is not None]
        intervals += told
        steps += reader.history.steps
        requests += [_requests(each) for each in told] or [len(reader.history.requests)]
        rules |= {part.rule for step in reader.history.steps for part in step.requests}
        warnings += [*reader.warnings, *filter(None, [reader.history.figures_note])]
    known, over = [count for count in requests if count is not None], IntervalMeans(intervals)
    return CountsSide(
        tuple(map(printable, paths)),
        total,
        tuple(warnings),
        counts_only,
        averages if total.tau is None else {},
        told=over.told(total),
        mark=over.mark,
        length=over.length(total),
        rate=over.rate(total),
        requests=sum(known) if len(known) == len(requests) else None,
        definitions=tuple(dict.fromkeys(line for each in intervals for line in definitions(each))),
        made_up=made_up(intervals, rules),
        intervals=tuple(step for step in steps if step.aggregate is not None),
    )


def _requests(aggregate: Aggregate) -> int | None:
    return 1 if aggregate.is_request else aggregate.requests


def _mark(side: CountsSide, name: str) -> str:
    return side.mark if name == "drafts" else ""


def _signed(a: float | None, b: float | None, *, share: bool = False) -> str:
    if a is None or b is None:
        return NONE
    return f"{100 * (b - a):+.1f}%" if share else f"{b - a:+.2f}"
