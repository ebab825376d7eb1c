"""Sums where there are no steps: Aggregate, of an interval; RequestFigures, of a request, on its own span; LeftOut, of
what trace sampling took out of a step, and Sampled, which says why a request's spans were kept.

An engine may tell counts alone. vLLM's and SGLang's metrics, vLLM's log lines and the figures of a response are such:
sums over drafts, without trees, tokens or coins. A count that the source does not tell is None, or empty; it is never
guessed. A fleet may send one span a request: then its figures are all that is known of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated, ClassVar

from msgspec import Meta

from specscope.trace.record.declared import (
    Count,
    Counted,
    Name,
    Share,
    Step,
    Sum,
    Summed,
    SumOrNone,
    Told,
    Value,
    Wire,
    WireForm,
    Words,
)

SYNTHETIC = "synthetic acceptance"  # in a source's name: verdicts were made up for a benchmark
LENGTH = "mean acceptance length"
# Of `averages`, those that are a length or a rate: the first that is there counts. history/interval.py has them
LENGTHS = (LENGTH, "sglang:spec_accept_length", "spec_accept_length", "avg_spec_accept_length", "accept_length")
RATES = ("sglang:spec_accept_rate", "spec_accept_rate")
RESTORED = "drafts judged again from a checkpoint"  # likewise: what is left of them counts as a whole draft
DEPTH = "current speculative depth"  # of `averages`: how deep drafts were at the interval's end

AtDepth = Annotated[tuple[Sum, ...], Meta(max_length=4096)]  # positions


@dataclass(frozen=True)
class Aggregate:
    """The counts of one interval, or of one request. Filled by watch/, and by plugins in engines that they do not know.

    Drafts are chains: `accepted_at[d-1]` of them accepted a token at depth d, `proposed_at[d-1]` were that long.
    """

    PREFIX: ClassVar = "specscope.aggregate."
    source: Annotated[str, Wire(Name)]  # where it comes from, in words: vLLM /metrics
    engine: Words = ""  # which engine, where the source names it
    request: Words = ""  # the id of its request; "" if it covers an interval
    drafts: SumOrNone = None  # steps of requests with at least one drafted token
    drafted: SumOrNone = None  # tokens
    accepted: SumOrNone = None  # tokens
    emitted: SumOrNone = None  # output tokens
    requests: SumOrNone = None  # that ended in the interval
    accepted_at: Annotated[tuple[int, ...], Wire(AtDepth)] = ()  # at d-1: drafts whose token at depth d was accepted
    proposed_at: Annotated[tuple[int, ...], Wire(AtDepth)] = ()  # at d-1: drafts that were that long
    running: SumOrNone = None  # requests, at the end of the interval
    waiting: SumOrNone = None  # requests, as above
    kv_usage: Annotated[float | None, Wire(Share | None)] = None  # share of the KV cache in use
    # averages without counts, by name
    averages: Annotated[Mapping[str, float], Wire(form=WireForm.BY_HAND)] = field(default_factory=dict)
    reset: Annotated[bool, Wire()] = False  # a counter went back: the engine was restarted, and this counts from there
    rounded: Annotated[bool, Wire()] = False  # counts were estimated from rounded figures and are the nearest that fit

    @property
    def is_request(self) -> bool:
        return bool(self.request) or self.source.endswith("response")

    @property
    def length(self) -> float | None:
        """Mean acceptance length: from the counts, else as the source tells it."""
        if self.drafts and self.accepted is not None:
            return 1 + self.accepted / self.drafts
        return self.averages.get(self.length_name) or None  # SGLang's gauge is 0 where nothing was drafted

    @property
    def length_name(self) -> str:
        """Which of the averages the length is; "" where it is worked out from counts, or not known."""
        return "" if self.drafts and self.accepted is not None else self._average(LENGTHS)

    @property
    def rate_name(self) -> str:
        return "" if self.drafted and self.accepted is not None else self._average(RATES)

    def _average(self, names: Sequence[str]) -> str:
        """The first of these averages. An idle engine still tells that of the time before."""
        idle = not self.drafts and not self.emitted and self.running == 0
        return "" if idle else next((name for name in names if name in self.averages), "")

    @property
    def tried_at(self) -> tuple[int, ...]:
        """[d-1]: drafts in which the token at depth d was tried; empty where drafts are not all of one length."""
        if self.drafts is None or not self.proposed_at or set(self.proposed_at) != {self.drafts}:
            return ()
        return (self.drafts, *self.accepted_at[:-1])


def full_chains(drafts: int | None, drafted: int | None, depth: int) -> tuple[int, ...]:
    """`proposed_at` of drafts of at most `depth` tokens, where their sum shows that all were that long; else empty."""
    return (drafts,) * depth if drafts is not None and drafted == drafts * depth else ()


DEPTHS = 8  # that are told: a request's span stays small
ByDepth = Annotated[tuple[Count, ...], Meta(max_length=DEPTHS, title="count")]
Seconds = Annotated[float, Meta(ge=0, le=1e12, title="seconds")]


@dataclass(frozen=True)
class RequestFigures:
    """A request in sums over its decode steps, on the branch on which it ended; history/stats.py defines them."""

    PREFIX: ClassVar = "specscope."
    steps: Counted  # decode steps, with drafts or without
    drafts: Counted  # those with at least one drafted token
    drafted: Summed  # nodes
    accepted: Summed  # nodes
    emitted: Summed  # output tokens; fewer than it had where steps are missing
    depth: Summed  # sum of the trees' depths
    bonus: Counted  # steps whose final token is the bonus token
    recovered: Counted  # and those in which it is a recovered one
    tau: Annotated[float | None, Wire(Value | None)] = None  # mean acceptance length; absent where nothing was drafted
    # accepted / drafted nodes; absent likewise
    rate: Annotated[float | None, Wire(Value | None, name="acceptance_rate")] = None
    # drafts that accepted a token at depth 1, 2, ...: at most 8 depths
    accepted_at: Annotated[tuple[int, ...], Wire(ByDepth, name="accepted_by_depth")] = ()
    # drafts whose tree reached that depth
    proposed_at: Annotated[tuple[int, ...], Wire(ByDepth, name="drafted_by_depth")] = ()
    # drafts in which a node at that depth was tried
    tried_at: Annotated[tuple[int, ...], Wire(ByDepth, name="tried_by_depth")] = ()
    # steps without a draft, by the reason (history/totals.py)
    undrafted: Annotated[Mapping[str, int], Wire(dict[str, Count], form=WireForm.JSON)] = field(default_factory=dict)
    # from its arrival to its admission; absent where it was not admitted
    queue_s: Annotated[float | None, Wire(Seconds | None, name="gen_ai.latency.time_in_queue")] = None
    # from its arrival to the end of the step with its first token; absent where it had none
    first_s: Annotated[float | None, Wire(Seconds | None, name="gen_ai.latency.time_to_first_token")] = None
    # from its arrival to its end
    total_s: Annotated[float | None, Wire(Seconds | None, name="gen_ai.latency.e2e")] = None


class Reason(StrEnum):
    RATIO = "ratio"  # by its trace's id: it stands for 1 / ratio requests
    PARENT = "parent"  # its caller's span is sampled: what share that is, only the caller knows
    # In captures of before, by a condition on what became of it: it stands for one
    OUTCOME = "outcome"  # that held when it ended
    OVERFLOW = "overflow"  # that held before its end, when a buffer was full


@dataclass(frozen=True)
class Sampled:
    """Why a request's spans are kept, and of how many requests it is one."""

    PREFIX: ClassVar = "specscope.sampling."
    reason: Annotated[Reason, Wire()]  # why
    ratio: Annotated[float, Wire(Share)] = 0.0  # the share of requests like it that are kept; 0 where it is not known
    # whether a condition was asked before its end, in captures of before
    early: Annotated[bool, Wire(told=Told.ALWAYS)] = False


@dataclass(frozen=True)
class LeftOut:
    """What sampling took out of an engine step, as counts: its times are of all requests, its spans of those kept."""

    PREFIX: ClassVar = "specscope.left_out."
    steps: Annotated[int, Wire(Step, told=Told.ALWAYS)] = 0  # whole engine steps between the step before and this one
    requests: Annotated[int, Wire(Count, told=Told.ALWAYS)] = 0  # requests that took part in it
    prefill_tokens: Annotated[int, Wire(Count, told=Told.ALWAYS)] = 0  # of theirs
    drafted: Annotated[int, Wire(Count, told=Told.ALWAYS)] = 0  # nodes, of theirs
    accepted: Annotated[int, Wire(Count, told=Told.ALWAYS)] = 0  # nodes, of theirs
    emitted: Annotated[int, Wire(Count, told=Told.ALWAYS)] = 0  # tokens, of theirs
