"""Intervals of an engine that tells counts only: as records, in words and cells; what a source's figures are."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from itertools import groupby
from typing import Any, TypeVar

import specscope
from specscope.trace.history.stats import Acceptance, measure
from specscope.trace.record.aggregate import DEPTH, RESTORED, SYNTHETIC, Aggregate
from specscope.trace.record.privacy import Privacy
from specscope.trace.record.records import COUNTS, Phase, RunInfo, StepRecord
from specscope.trace.record.rules import MADE_UP

NONE, NO_N = "–", " (n not given)"
T = TypeVar("T")
LONG = 16  # positions that are shown one by one
FEW = 0.9  # of the output tokens
# Widths of the columns, which are those that `cells` gives
COLUMNS: Mapping[str, int] = {
    "time": 8,
    "seconds": 7,
    "drafts": 7,
    "drafted": 8,
    "accepted": 8,
    "length": 6,
    "rate": 6,
    "tokens": 7,
    "running": 7,
    "waiting": 7,
    "KV": 6,
}
# What figures mean where that is not as in stats.py, as read in their sources: SGLang 0.5.23 (metrics_reporter.py,
# tokenizer_manager.py, internal_state.py), llama.cpp b11434, and what tools document.
# Of averages, by their names in an Aggregate
_AVERAGES: Mapping[str, str] = {
    "sglang:spec_accept_length": "the length is SGLang's average over its interval: accepted + 1 per verification",
    "spec_accept_length": "the length is SGLang's: output tokens per verification, with the prompt's first token",
    "accept_length": "the length is SpecForge's benchmark average: output tokens per SGLang verification",
    "avg_spec_accept_length": "the length is SGLang's average since the server started, not over one benchmark",
    "sglang:spec_accept_rate": "the rate is SGLang's: accepted / configured tokens, however many were drafted",
    "spec_accept_rate": "the rate is SGLang's: accepted / configured tokens, however many were drafted",
}
_OURS = "1 + accepted / drafts, the same as here"
# Of counts: (how the source's name begins, the count, what it is)
_COUNTS: Sequence[tuple[str, str, str]] = (
    ("SGLang /metrics", "drafts", "drafts are SGLang's verifications, which it adds when a request ends"),
    ("SGLang response", "drafts", "drafts are SGLang's verifications"),
    ("SGLang response", "drafted", "drafted tokens are verifications × configured tokens, however many were drafted"),
    ("llama.cpp /metrics", "drafts", "counts are added when a request ends"),
    ("vLLM example", "drafts", f"vLLM's mean acceptance length is {_OURS}"),
    ("vLLM example", "accepted_at", "counts by position are estimated from rates printed with two digits"),
    ("serving bench", "drafts", f"the bench's acceptance length is {_OURS}"),
    ("serving bench", "accepted_at", "counts by position are worked out from its rates"),
    ("AIPerf", "drafts", f"AIPerf's mean_acceptance_length is that of each request: {_OURS}"),
    (
        "Spec-Bench",
        "drafts",
        "Spec-Bench's mean accepted tokens are tokens per decoding step, the final token included: the same as here",
    ),
    (
        "EAGLE",
        "drafts",
        "EAGLE's acceptance length is new tokens / decoding steps: the same as here if every step drafted",
    ),
    ("specdec_bench", "drafts", f"specdec_bench's Average_AL is the mean over requests; here it is pooled, {_OURS}"),
    ("result of means", "averages", "the length is the mean in the file"),
    ("list of lengths", "drafts", "each length is a step's, with its bonus or recovered token, so never 0"),
    ("list of accepted tokens", "drafts", "each length is a step's, without its bonus or recovered token"),
)
_MADE_UP = "verdicts are synthetic (a benchmark): acceptance measures nothing"

# What a step has in which nothing happens
NOTHING: Mapping[str, Any] = {
    **dict.fromkeys(("running", "waiting", "blocks_used", "blocks_free"), 0),
    **{"speculation": True, "speculation_off": ""},
    **dict.fromkeys(("admitted", "requests", "preempted", "finished"), ()),
}


def interval_record(step: int, start_ns: int, end_ns: int, aggregate: Aggregate) -> StepRecord:
    """The engine step that stands for an interval: one phase, no requests."""
    load = {"running": aggregate.running or 0, "waiting": aggregate.waiting or 0}
    return StepRecord(step, (Phase("interval", start_ns, end_ns),), aggregate=aggregate, **{**NOTHING, **load})


def counts_run(source: str, target: str) -> RunInfo:
    unknown: dict[str, Any] = dict.fromkeys(("revision", "drafter", "draft_model", "tree", "device", "dtype"), "")
    unknown |= dict.fromkeys(("seed", "max_context", "blocks"), 0) | {"eos_tokens": (), "block_size": 1, "params": {}}
    versions = {"specscope": specscope.__version__}
    known: dict[str, Any] = {"run_id": uuid.uuid4().hex, "target": target, "backend": source, "versions": versions}
    return RunInfo(**unknown, **known, evidence=COUNTS, privacy=Privacy.NO_TEXT)


def counts(aggregate: Aggregate) -> Acceptance:
    return measure([aggregate])


def cells(record: StepRecord, aggregate: Aggregate) -> dict[str, str]:
    """A cell for each of COLUMNS; a dash where the source does not report it. `~`: derived from rounded figures."""
    mark = "~" if aggregate.rounded else ""
    values = {
        "time": clock(record.end_ns),
        "seconds": _seconds(record.end_ns - record.start_ns),
        "drafts": _count(aggregate.drafts, mark),
        "length": NONE if aggregate.length is None else f"{aggregate.length:.2f}",
        "rate": _percent(rate(aggregate)),
        "KV": _percent(aggregate.kv_usage),
    }
    others = {name: _count(getattr(aggregate, name)) for name in ("drafted", "accepted", "running", "waiting")}
    return {**values, **others, "tokens": _count(aggregate.emitted)}


def rate(aggregate: Aggregate) -> float | None:
    """Draft acceptance rate: from the counts, else as SGLang reports it."""
    known = aggregate.rate_name and aggregate.length is not None  # SGLang's are 0 where nothing was drafted
    return aggregate.averages.get(aggregate.rate_name) if known else counts(aggregate).rate


class IntervalMeans:
    """Means over intervals, each counting alike: for what has averages and no counts."""

    def __init__(self, aggregates: Iterable[Aggregate] = ()) -> None:
        self._lengths, self._rates = [0.0, 0], [0.0, 0]  # sum, how many
        self._marks: set[str | None] = set()  # of the numbers of drafts; None for one that is not known
        for aggregate in aggregates:
            self.add(aggregate)

    def add(self, aggregate: Aggregate) -> None:
        self._marks.add(None if aggregate.drafts is None else "~" * aggregate.rounded)
        for sums, value in ((self._lengths, aggregate.length), (self._rates, rate(aggregate))):
            if value is not None:
                sums[:] = sums[0] + value, sums[1] + 1

    @property
    def mark(self) -> str:
        """Before their number of drafts: ~ where one was worked out, and all are known."""
        return "~" if "~" in self._marks and None not in self._marks else ""

    def length(self, sums: Acceptance) -> float | None:
        """Mean acceptance length, from the counts where there are any."""
        return sums.tau if sums.tau is not None else _mean(self._lengths)

    def told(self, sums: Acceptance) -> str:
        """That length in words, and whether it is an average alone."""
        length = self.length(sums)
        return NONE if length is None else f"{length:,.2f}{'' if sums.tau is not None else NO_N}"

    def rate(self, sums: Acceptance) -> float | None:
        return sums.rate if sums.rate is not None else _mean(self._rates)


def _mean(sums: Sequence[float]) -> float | None:
    return sums[0] / sums[1] if sums[1] else None


def covered(spans: Iterable[tuple[int, int]]) -> float:
    """The seconds that any of these was under way: what lies between requests is not theirs."""
    total = until = 0
    for start, end in sorted(spans):
        total, until = total + max(end - max(start, until), 0), max(until, end)
    return total / 1e9


def clock(ns: int) -> str:
    try:
        return f"{datetime.fromtimestamp(ns // 10**9):%H:%M:%S}"
    except (OverflowError, OSError, ValueError):  # beyond the year 9999
        return NONE


def notes(aggregate: Aggregate) -> list[str]:
    """Further remarks on an interval, in words: the current draft depth, a restart, how few steps drafted."""
    told, few = aggregate.averages, few_drafted(aggregate.drafts, aggregate.accepted, aggregate.emitted)
    remarks = {
        f"depth {told.get(DEPTH, 0):g}": DEPTH in told,
        "restarted": aggregate.reset,
        f"{told.get(RESTORED, 0):g} {RESTORED}": RESTORED in told,
        f"steps with a draft gave {few} tokens": few and aggregate.request,
    }
    return [words for words, holds in remarks.items() if holds]


def few_drafted(drafts: int | None, accepted: int | None, emitted: int | None) -> str:
    """`92 of 120`: output tokens of steps with a draft, where the other steps gave a tenth or more."""
    if drafts is None or accepted is None or not emitted or drafts + accepted > FEW * emitted:
        return ""
    return f"{drafts + accepted:,} of {emitted:,}"


def runs(values: Sequence[T]) -> list[tuple[str, T]]:
    """(`5`, its value) by position; of long drafts, equal neighbours are one: (`5 to 48`, their value)."""
    if len(values) <= LONG:
        return [(str(position), value) for position, value in enumerate(values, 1)]
    grouped, first = [], 1
    for value, group in groupby(values):
        last = first + len(list(group)) - 1
        grouped.append((f"{first} to {last}" if last > first else str(first), value))
        first = last + 1
    return grouped


def by_position(aggregate: Aggregate) -> str:
    """The rates of an interval in a line, as vLLM has them; those of long drafts with their positions."""
    rates = [NONE if value is None else f"{value:.3f}" for value in counts(aggregate).per_position]
    if len(rates) <= LONG:
        return " ".join(rates)
    return ", ".join(f"{rate} at {positions}" for positions, rate in runs(rates))


def _count(value: int | None, mark: str = "") -> str:
    return NONE if value is None else f"{mark}{value:,}"


def _seconds(ns: int) -> str:
    """A page may be of months: its column has room for 7 characters."""
    seconds = ns / 1e9
    digits = ".1f" if seconds < 1e5 else ".0f" if seconds < 1e7 else ".2g"
    return f"{seconds:{digits}}" if ns else NONE


def _percent(value: float | None) -> str:
    return NONE if value is None else f"{100 * value:.1f}%"


def definitions(aggregate: Aggregate) -> list[str]:
    """What its figures are, in words, where they are not as everywhere."""
    lines = [_AVERAGES[name] for name in (aggregate.length_name, aggregate.rate_name) if name in _AVERAGES]
    lines += [
        text
        for source, count, text in _COUNTS
        if aggregate.source.startswith(source) and getattr(aggregate, count) not in (None, ())
    ]
    return [*lines, *([_MADE_UP] if SYNTHETIC in aggregate.source else [])]


def made_up(aggregates: Iterable[Aggregate], rules: Iterable[str] = ()) -> bool:
    """Whether these say that verdicts were made up, by their source or by the rules of steps."""
    return any(SYNTHETIC in aggregate.source for aggregate in aggregates) or any(rule in MADE_UP for rule in rules)


def missing(aggregate: Aggregate) -> list[str]:
    lacks = {
        "the number of drafts": aggregate.drafts is None,
        "accepted tokens": aggregate.accepted is None,
        "rates by position": not aggregate.accepted_at,
        "how long drafts were": bool(aggregate.accepted_at) and not aggregate.proposed_at,
        "output tokens": aggregate.emitted is None,
        "the batch": aggregate.running is None,
        "KV usage": aggregate.kv_usage is None,
    }
    return ["trees, tokens, probabilities and coins", *(name for name, lacking in lacks.items() if lacking)]


def missing_text(aggregate: Aggregate) -> str:
    """`vLLM /metrics reports counts per interval. Not available: trees, ..., output tokens`."""
    of = "request" if aggregate.is_request else "interval"
    what = "averages" if aggregate.drafts is None and aggregate.drafted is None else "counts"
    return f"{aggregate.source} reports {what} per {of}. Not available: {', '.join(missing(aggregate))}"
