"""Which requests' spans are kept: a share of all traces, and those whose outcome is worth keeping.

The share is OpenTelemetry's ParentBased(TraceIdRatioBased(ratio)): a trace is kept where the low 64 bits of its id are
below ratio * 2^64, and a request with a caller's span follows the caller's `sampled` flag. So every service that
samples the same trace by the same ratio decides alike. We write no `ot=th:` into the trace state: that promises a
threshold over 56 other bits, which this decision (the SDK's own) does not use.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated

from specscope.trace.history.expressions import Expression
from specscope.trace.record.declared import Count, Share, Step, Told, Wire

BUFFER_MIB = 256  # of steps whose requests are not decided yet
ID_SPACE = 2**64  # the ids that the ratio is taken of
SAMPLED_FLAG = 1  # of W3C trace flags


class Reason(StrEnum):
    """Why the spans of a request are kept."""

    RATIO = "ratio"  # by its trace's id: it stands for 1 / ratio requests
    PARENT = "parent"  # its caller's span is sampled: what share that is, only the caller knows
    OUTCOME = "outcome"  # the condition held when it ended: every such request is kept, so it stands for one
    OVERFLOW = "overflow"  # the condition held when the buffer was full, before its end: it stands for one


@dataclass(frozen=True)
class Sampled:
    """Why a request's spans are kept, and of how many requests it is one."""

    reason: Annotated[Reason, Wire("specscope.sampling.reason")]  # why
    # the share of requests like it that are kept; 0 where it is not known
    ratio: Annotated[float, Wire("specscope.sampling.ratio", Share)] = 0.0
    # whether it was decided before its end: the buffer was full, or the run was over
    early: Annotated[bool, Wire("specscope.sampling.early", told=Told.ALWAYS)] = False


@dataclass(frozen=True)
class LeftOut:
    """What sampling took out of an engine step, as counts: its times are of all requests, its spans of those kept."""

    # whole engine steps between the step before and this one
    steps: Annotated[int, Wire("specscope.left_out.steps", Step, told=Told.ALWAYS)] = 0
    # requests that took part in it
    requests: Annotated[int, Wire("specscope.left_out.requests", Count, told=Told.ALWAYS)] = 0
    prefill_tokens: Annotated[int, Wire("specscope.left_out.prefill_tokens", Count, told=Told.ALWAYS)] = 0  # of theirs
    drafted: Annotated[int, Wire("specscope.left_out.drafted", Count, told=Told.ALWAYS)] = 0  # nodes, of theirs
    accepted: Annotated[int, Wire("specscope.left_out.accepted", Count, told=Told.ALWAYS)] = 0  # nodes, of theirs
    emitted: Annotated[int, Wire("specscope.left_out.emitted", Count, told=Told.ALWAYS)] = 0  # tokens, of theirs


def ratio_keeps(trace_id: int, traceparent: str, ratio: float) -> Reason | None:
    """Why this trace is in the sampled share; None where it is not. `traceparent`: the caller's span, "" for none.

    The decision of ParentBased(TraceIdRatioBased(ratio)) of the OpenTelemetry SDK (sdk/trace/sampling.py).
    """
    _, trace, span, flags = (int(part, 16) for part in (traceparent or "00-0-0-00").split("-"))
    if trace and span:
        return Reason.PARENT if flags & SAMPLED_FLAG else None
    return Reason.RATIO if trace_id % ID_SPACE < round(ratio * ID_SPACE) else None


@dataclass(frozen=True)
class TraceSampling:
    """What the flags or variables ask for. Without a ratio and a condition, everything is kept."""

    ratio: float | None = None  # --sample
    keep: Expression | None = None  # --keep: over the fields of request_words.py
    buffer: int = BUFFER_MIB * 2**20  # --keep-buffer, in bytes
    captures: bool = False  # --sample-capture: captures too; they are whole unless somebody asks

    @property
    def is_on(self) -> bool:
        """Whether anything may be left out."""
        return self.ratio is not None or self.keep is not None

    @property
    def text(self) -> str:
        """The sampling as flags write it; "" where everything is kept."""
        parts = [] if self.ratio is None else [f"ratio {self.ratio:g}"]
        return ", ".join(parts if self.keep is None else [*parts, f"keep {self.keep.text}"])
