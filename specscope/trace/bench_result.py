"""Results of serving benches, of vLLM (`--save-result`) and SGLang (`--output-file`), as intervals.

A result holds sums over its requests. Its speculation figures become an Aggregate, and the run holds counts only.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from itertools import pairwise, takewhile
from typing import Annotated

from msgspec import Meta, Struct

from specscope.errors import UserError
from specscope.trace.checked import decoded
from specscope.trace.documents import documents
from specscope.trace.history.interval import counts_run, interval_record
from specscope.trace.record.aggregate import LENGTH, Aggregate, full_chains
from specscope.trace.record.declared import Share, Short, Sum
from specscope.trace.record.records import RunInfo, StepRecord
from specscope.trace.wire.codec import plain_error

SOURCE = "serving bench"
Length = Annotated[float, Meta(ge=0, lt=2**31)]
Seconds = Annotated[float, Meta(ge=0, lt=2**31)]


class _Result(Struct):
    """One run, under the names of vLLM's bench. SGLang's has an average alone."""

    model_id: Short = ""
    date: str = ""
    duration: Seconds = 0.0
    completed: Sum | None = None
    total_output_tokens: Sum | None = None
    spec_decode_acceptance_length: Length | None = None
    accept_length: Length | None = None  # SGLang's
    spec_decode_num_drafts: Sum | None = None
    spec_decode_draft_tokens: Sum | None = None
    spec_decode_accepted_tokens: Sum | None = None
    spec_decode_per_position_acceptance_rates: Annotated[list[Share | None], Meta(max_length=4096)] | None = None

    @property
    def speculates(self) -> bool:
        """Whether the result has any speculation figures."""
        return any(
            figure is not None
            for figure in (self.spec_decode_num_drafts, self.spec_decode_acceptance_length, self.accept_length)
        )


def read_bench(lines: Iterable[tuple[int, bytes]], name: str) -> tuple[RunInfo, list[StepRecord]]:
    """A run of counts, and an interval for each result. Raises UserError where no result has speculation figures."""
    try:
        results = [decoded(document, _Result) for _, document in documents(lines, name)]
    except ValueError as error:
        raise UserError(f"{name} is a result of a serving bench that cannot be read: {plain_error(error)}") from None
    speculating = [result for result in results if result.speculates]
    if not speculating:
        raise UserError(
            f"{name} is a result of a serving bench without figures of speculation (spec_decode_...): was it on in the "
            "server?"
        )
    records = [_interval(number, result) for number, result in enumerate(speculating)]
    return counts_run(SOURCE, speculating[0].model_id), records


def _interval(number: int, result: _Result) -> StepRecord:
    drafts, drafted = result.spec_decode_num_drafts, result.spec_decode_draft_tokens
    rates = takewhile(lambda rate: rate is not None, result.spec_decode_per_position_acceptance_rates or ())
    at_depth = tuple(round((rate or 0) * (drafts or 0)) for rate in rates)
    if drafts is None or any(after > before for before, after in pairwise((drafts, *at_depth))):
        at_depth = ()
    lengths = {LENGTH: result.spec_decode_acceptance_length, "avg_spec_accept_length": result.accept_length}
    end = _end(result.date)
    aggregate = Aggregate(
        source=SOURCE,
        drafts=drafts,
        drafted=drafted,
        accepted=result.spec_decode_accepted_tokens,
        emitted=result.total_output_tokens,
        requests=result.completed,
        accepted_at=at_depth,
        proposed_at=full_chains(drafts, drafted, len(at_depth)) if at_depth else (),
        averages={name: length for name, length in lengths.items() if length is not None},
    )
    return interval_record(number, max(end - int(result.duration * 1e9), 0), end, aggregate)


def _end(date: str) -> int:
    """When the result was written, in nanoseconds. Both benches write local time."""
    try:
        return int(datetime.strptime(date, "%Y%m%d-%H%M%S").timestamp() * 1e9)
    except (ValueError, OverflowError, OSError):
        return 0
