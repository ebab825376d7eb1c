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
from typing import Annotated

from msgspec import Meta

from specscope.trace.record.declared import Count, Name, Share, Short, Step, Sum, Told, Value, Wire, WireForm

SYNTHETIC = "synthetic acceptance"  # in a source's name: verdicts were made up for a benchmark
LENGTH = "mean acceptance length"
# Of `averages`, those that are a length or a rate: the first that is there counts. history/interval.py has them
LENGTHS = (
    LENGTH,
    "sglang:spec_accept_length",
    "spec_accept_length",
    "avg_spec_accept_length",
    "accept_length",
)
RATES = ("sglang:spec_accept_rate", "spec_accept_rate")
RESTORED = "drafts judged again from a checkpoint"  # likewise: what is left of them counts as a whole draft
DEPTH = "current speculative depth"  # of `averages`: how deep drafts were at the interval's end

AtDepth = Annotated[tuple[Sum, ...], Meta(max_length=4096)]  # positions


@dataclass(frozen=True)
class Aggregate:
    """The counts of one interval, or of one request. Filled by watch/, and by plugins in engines that they do not know.

    Drafts are chains: `accepted_at[d-1]` of them accepted a token at depth d, `proposed_at[d-1]` were that long.
    """

    source: Annotated[str, Wire("specscope.aggregate.source", Name)]  # where it comes from, in words: vLLM /metrics
    engine: Annotated[str, Wire("specscope.aggregate.engine", Short)] = ""  # which engine, where the source names it
    # the id of its request; "" if it covers an interval
    request: Annotated[str, Wire("specscope.aggregate.request", Short)] = ""
    # steps of requests with at least one drafted token
    drafts: Annotated[int | None, Wire("specscope.aggregate.drafts", Sum | None)] = None
    drafted: Annotated[int | None, Wire("specscope.aggregate.drafted", Sum | None)] = None  # tokens
    accepted: Annotated[int | None, Wire("specscope.aggregate.accepted", Sum | None)] = None  # tokens
    emitted: Annotated[int | None, Wire("specscope.aggregate.emitted", Sum | None)] = None  # output tokens
    # that ended in the interval
    requests: Annotated[int | None, Wire("specscope.aggregate.requests", Sum | None)] = None
    # at d-1: drafts whose token at depth d was accepted
    accepted_at: Annotated[tuple[int, ...], Wire("specscope.aggregate.accepted_at", AtDepth)] = ()
    # at d-1: drafts that were that long
    proposed_at: Annotated[tuple[int, ...], Wire("specscope.aggregate.proposed_at", AtDepth)] = ()
    # requests, at the end of the interval
    running: Annotated[int | None, Wire("specscope.aggregate.running", Sum | None)] = None
    waiting: Annotated[int | None, Wire("specscope.aggregate.waiting", Sum | None)] = None  # requests, as above
    # share of the KV cache in use
    kv_usage: Annotated[float | None, Wire("specscope.aggregate.kv_usage", Share | None)] = None
    # averages without counts, by name
    averages: Annotated[Mapping[str, float], Wire("specscope.aggregate.averages", form=WireForm.BY_HAND)] = field(
        default_factory=dict
    )
    # a counter went back: the engine was restarted, and this counts from there
    reset: Annotated[bool, Wire("specscope.aggregate.reset")] = False
    # counts were estimated from rounded figures and are the nearest that fit
    rounded: Annotated[bool, Wire("specscope.aggregate.rounded")] = False

    @property
    def is_request(self) -> bool:
        """Whether it is about one request, and not about an interval."""
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
        """Likewise of the draft acceptance rate."""
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

    steps: Annotated[int, Wire("specscope.steps", Count)]  # decode steps, with drafts or without
    drafts: Annotated[int, Wire("specscope.drafts", Count)]  # those with at least one drafted token
    drafted: Annotated[int, Wire("specscope.drafted", Sum)]  # nodes
    accepted: Annotated[int, Wire("specscope.accepted", Sum)]  # nodes
    # output tokens; fewer than it had where steps are missing
    emitted: Annotated[int, Wire("specscope.emitted", Sum)]
    depth: Annotated[int, Wire("specscope.depth", Sum)]  # sum of the trees' depths
    bonus: Annotated[int, Wire("specscope.bonus", Count)]  # steps whose final token is the bonus token
    recovered: Annotated[int, Wire("specscope.recovered", Count)]  # and those in which it is a recovered one
    # mean acceptance length; absent where nothing was drafted
    tau: Annotated[float | None, Wire("specscope.tau", Value | None)] = None
    # accepted / drafted nodes; absent likewise
    rate: Annotated[float | None, Wire("specscope.acceptance_rate", Value | None)] = None
    # drafts that accepted a token at depth 1, 2, ...: at most 8 depths
    accepted_at: Annotated[tuple[int, ...], Wire("specscope.accepted_by_depth", ByDepth)] = ()
    # drafts whose tree reached that depth
    proposed_at: Annotated[tuple[int, ...], Wire("specscope.drafted_by_depth", ByDepth)] = ()
    # drafts in which a node at that depth was tried
    tried_at: Annotated[tuple[int, ...], Wire("specscope.tried_by_depth", ByDepth)] = ()
    # steps without a draft, by the reason (history/totals.py)
    undrafted: Annotated[Mapping[str, int], Wire("specscope.undrafted", dict[str, Count], form=WireForm.JSON)] = field(
        default_factory=dict
    )
    # from its arrival to its admission; absent where it was not admitted
    queue_s: Annotated[float | None, Wire("gen_ai.latency.time_in_queue", Seconds | None)] = None
    # from its arrival to the end of the step with its first token; absent where it had none
    first_s: Annotated[float | None, Wire("gen_ai.latency.time_to_first_token", Seconds | None)] = None
    # from its arrival to its end
    total_s: Annotated[float | None, Wire("gen_ai.latency.e2e", Seconds | None)] = None


class Reason(StrEnum):
    """Why the spans of a request are kept."""

    RATIO = "ratio"  # by its trace's id: it stands for 1 / ratio requests
    PARENT = "parent"  # its caller's span is sampled: what share that is, only the caller knows
    # In captures of before, by a condition on what became of it: it stands for one
    OUTCOME = "outcome"  # that held when it ended
    OVERFLOW = "overflow"  # that held before its end, when a buffer was full


@dataclass(frozen=True)
class Sampled:
    """Why a request's spans are kept, and of how many requests it is one."""

    reason: Annotated[Reason, Wire("specscope.sampling.reason")]  # why
    # the share of requests like it that are kept; 0 where it is not known
    ratio: Annotated[float, Wire("specscope.sampling.ratio", Share)] = 0.0
    # whether a condition was asked before its end, in captures of before
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
