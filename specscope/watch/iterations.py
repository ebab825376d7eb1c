"""TensorRT-LLM's iteration statistics: `llm.get_stats()`, and the JSON that trtllm-serve answers at /metrics.

Each object is one iteration of the engine, with what was drafted and accepted in it. Read from its source
(executor/types.h); no page of a running engine was at hand.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from specscope.trace.record.aggregate import Aggregate
from specscope.trace.wire.codec import plain_error
from specscope.watch.told import MOST, ToldInterval, UnreadableError

SOURCE = "TensorRT-LLM iteration statistics"

_Count = Annotated[int, Meta(ge=0, lt=MOST)]
_Value = Annotated[float, Meta(ge=0, lt=MOST)]


class _Drafts(Struct, frozen=True):
    numDraftTokens: _Count  # noqa: N815
    numAcceptedTokens: _Count  # noqa: N815
    numRequestsWithDraftTokens: _Count  # noqa: N815
    acceptanceLength: _Value | None = None  # noqa: N815
    draftOverhead: _Value | None = None  # noqa: N815


class _Iteration(Struct, frozen=True):
    specDecodingStats: _Drafts | None = None  # noqa: N815
    iterLatencyMS: _Value = 0  # noqa: N815
    timestamp: str = ""
    numActiveRequests: _Count | None = None  # noqa: N815
    numQueuedRequests: _Count | None = None  # noqa: N815
    attentionDpRank: int = 0  # noqa: N815


def is_iteration(value: dict[str, Any]) -> bool:
    """Whether a JSON object is one of these."""
    return "iterLatencyMS" in value or "specDecodingStats" in value


def read_iteration(value: dict[str, Any], time_ns: int) -> list[ToldInterval]:
    """The interval of an iteration; none where nothing could be drafted in it. Raises UnreadableError."""
    try:
        iteration = msgspec.convert(value, _Iteration, strict=True)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise UnreadableError(plain_error(error)) from None
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
