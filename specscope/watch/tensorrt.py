"""TensorRT-LLM's iteration statistics, and the figures of its responses, to aggregates.

Of `llm.get_stats()`, and of the JSON that trtllm-serve answers at /metrics, each object is one iteration of the engine,
with what was drafted and accepted in it. Read from its source (executor/types.h); no page of a running engine was at
hand.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any

from msgspec import Struct

from specscope.trace.record.aggregate import Aggregate
from specscope.watch.counts import MOST, Count, ToldInterval, UnreadableError, Value, declared

SOURCE, RESPONSE = "TensorRT-LLM iteration statistics", "TensorRT-LLM response"


class _Drafts(Struct, frozen=True):
    numDraftTokens: Count  # noqa: N815
    numAcceptedTokens: Count  # noqa: N815
    numRequestsWithDraftTokens: Count  # noqa: N815
    acceptanceLength: Value | None = None  # noqa: N815
    draftOverhead: Value | None = None  # noqa: N815


class _Iteration(Struct, frozen=True):
    specDecodingStats: _Drafts | None = None  # noqa: N815
    iterLatencyMS: Value = 0  # noqa: N815
    timestamp: str = ""
    numActiveRequests: Count | None = None  # noqa: N815
    numQueuedRequests: Count | None = None  # noqa: N815
    attentionDpRank: int = 0  # noqa: N815


def is_iteration(value: dict[str, Any]) -> bool:
    """Whether a JSON object is one of these."""
    return "iterLatencyMS" in value or "specDecodingStats" in value


def read_iteration(value: dict[str, Any], time_ns: int) -> list[ToldInterval]:
    """The interval of an iteration; none where nothing could be drafted in it. Raises UnreadableError."""
    iteration: _Iteration = declared(value, _Iteration)
    stats = iteration.specDecodingStats
    if stats is None or iteration.attentionDpRank:  # of the other ranks: the same figures again
        return []
    if stats.numAcceptedTokens > stats.numDraftTokens:
        raise UnreadableError("specDecodingStats with more accepted tokens than drafted ones")
    end = _time(iteration.timestamp, time_ns)
    averages = {"acceptanceLength": stats.acceptanceLength, "draftOverhead": stats.draftOverhead}
    aggregate = Aggregate(
        source=SOURCE,
        drafts=stats.numRequestsWithDraftTokens,
        drafted=stats.numDraftTokens,
        accepted=stats.numAcceptedTokens,
        running=iteration.numActiveRequests,
        waiting=iteration.numQueuedRequests,
        averages={name: number for name, number in averages.items() if number is not None},
    )
    return [ToldInterval("", max(end - int(iteration.iterLatencyMS * 1e6), 0), end, aggregate)]


def pooled(intervals: Sequence[ToldInterval]) -> list[ToldInterval]:
    """Iterations as one interval from the first to the last: their averages are left out."""
    if not intervals:
        return []
    aggregates = [interval.aggregate for interval in intervals]
    total = replace(
        aggregates[-1],
        averages={},
        **{name: sum(getattr(each, name) for each in aggregates) for name in ("drafts", "drafted", "accepted")},
    )
    start = min(interval.start_ns for interval in intervals)
    return [ToldInterval("", start, max(interval.end_ns for interval in intervals), total)]


def _time(text: str, otherwise: int) -> int:
    """Nanoseconds of a time as TensorRT-LLM writes it, `11-25-2026 10:11:12.345678`."""
    try:
        return int(datetime.strptime(text, "%m-%d-%Y %H:%M:%S.%f").timestamp() * 1e9)
    except (ValueError, OverflowError, OSError):
        return otherwise


class TensorrtDetail(Struct, frozen=True):
    """TensorRT-LLM's `speculative_decoding` of a request."""

    total_draft_tokens: Count
    total_accepted_draft_tokens: Count
    acceptance_rate: Value | None = None


def of_tensorrt(detail: TensorrtDetail, holder: Mapping[str, Any]) -> Aggregate:
    """The counts of a request of TensorRT-LLM, which has no number of drafts. Raises UnreadableError."""
    if detail.total_accepted_draft_tokens > detail.total_draft_tokens:
        raise UnreadableError("speculative_decoding with more accepted tokens than drafted ones")
    tokens = holder.get("avg_decoded_tokens_per_iter")
    known = isinstance(tokens, int | float) and 0 <= tokens < MOST
    return Aggregate(
        source=RESPONSE,
        drafted=detail.total_draft_tokens,
        accepted=detail.total_accepted_draft_tokens,
        averages={"avg_decoded_tokens_per_iter": float(tokens)} if known else {},  # type: ignore[arg-type]
    )
