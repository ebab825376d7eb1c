"""Intervals of an engine that tells counts only: as records, and in words and cells for screens and reports."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from datetime import datetime

import specscope
from specscope.trace.history.stats import Acceptance, measure
from specscope.trace.record.aggregate import DEPTH, Aggregate
from specscope.trace.record.privacy import Privacy
from specscope.trace.record.records import COUNTS, Phase, RunInfo, StepRecord

NONE = "–"
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


def interval_record(step: int, start_ns: int, end_ns: int, told: Aggregate) -> StepRecord:
    """The engine step that stands for an interval: one phase, no requests."""
    return StepRecord(
        step=step,
        phases=(Phase("interval", start_ns, end_ns),),
        running=told.running or 0,
        waiting=told.waiting or 0,
        blocks_used=0,
        blocks_free=0,
        speculation=True,
        speculation_off="",
        admitted=(),
        requests=(),
        preempted=(),
        finished=(),
        aggregate=told,
    )


def counts_run(source: str, target: str) -> RunInfo:
    """A run of intervals: as much of it as is known."""
    return RunInfo(
        run_id=uuid.uuid4().hex,
        target=target,
        revision="",
        drafter="",
        draft_model="",
        tree="",
        device="",
        dtype="",
        backend=source,
        seed=0,
        eos_tokens=(),
        max_context=0,
        blocks=0,
        block_size=1,
        params={},
        versions={"specscope": specscope.__version__},
        evidence=COUNTS,
        privacy=Privacy.NO_TEXT,
    )


def counts(told: Aggregate) -> Acceptance:
    """The figures of one interval alone."""
    return measure([told])


def cells(record: StepRecord, told: Aggregate) -> dict[str, str]:
    """A cell for each of COLUMNS; a dash where the source does not tell it. `~`: worked out from rounded figures."""
    mark = "~" if told.rounded else ""
    seconds = (record.end_ns - record.start_ns) / 1e9
    values = {
        "time": clock(record.end_ns),
        "seconds": f"{seconds:.1f}" if seconds else NONE,
        "drafts": _count(told.drafts, mark),
        "length": NONE if told.length is None else f"{told.length:.2f}",
        "rate": _percent(rate(told)),
        "KV": _percent(told.kv_usage),
    }
    others = {name: _count(getattr(told, name)) for name in ("drafted", "accepted", "running", "waiting")}
    return {**values, **others, "tokens": _count(told.emitted)}


def rate(told: Aggregate) -> float | None:
    """Draft acceptance rate: from the counts, else as SGLang's gauge has it."""
    found = counts(told).rate
    return told.averages.get("sglang:spec_accept_rate") if found is None and not told.drafted else found


def clock(ns: int) -> str:
    """The local time of day."""
    try:
        return f"{datetime.fromtimestamp(ns // 10**9):%H:%M:%S}"
    except (OverflowError, OSError, ValueError):  # beyond the year 9999
        return NONE


def at_depth(told: Aggregate) -> list[str]:
    """The rate at each depth as vLLM has it: accepted there / drafts; a dash where nothing was drafted."""
    return [NONE if value is None else f"{value:.3f}" for value in counts(told).per_position]


def notes(told: Aggregate) -> list[str]:
    """What else is to be said of an interval, in words: how deep drafts are now, a restart."""
    depth = told.averages.get(DEPTH)
    return [*([] if depth is None else [f"depth {depth:g}"]), *(["restarted"] if told.reset else [])]


def missing(told: Aggregate) -> list[str]:
    """What the source does not report, in words."""
    lacks = {
        "the number of drafts": told.drafts is None,
        "accepted tokens": told.accepted is None,
        "rates by position": not told.accepted_at,
        "how long drafts were": bool(told.accepted_at) and not told.proposed_at,
        "output tokens": told.emitted is None,
        "the batch": told.running is None,
        "KV usage": told.kv_usage is None,
    }
    return ["trees, tokens, probabilities and coins", *(name for name, lacking in lacks.items() if lacking)]


def missing_text(told: Aggregate) -> str:
    """`vLLM /metrics reports counts per interval. Not available: trees, ..., output tokens`."""
    of = "request" if told.request or told.source.endswith("response") else "interval"
    what = "counts" if told.drafts is not None else "averages"
    return f"{told.source} reports {what} per {of}. Not available: {', '.join(missing(told))}"


def _count(value: int | None, mark: str = "") -> str:
    return NONE if value is None else f"{mark}{value:,}"


def _percent(value: float | None) -> str:
    return NONE if value is None else f"{100 * value:.1f}%"
