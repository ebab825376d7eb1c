"""RequestFigures: what a request came to, on its own span: for fleets that send one span a request."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated

from msgspec import Meta

from specscope.trace.record.declared import Count, Sum, Value, Wire, WireForm

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
    # steps without a draft, by the reason (history/undrafted.py)
    undrafted: Annotated[Mapping[str, int], Wire("specscope.undrafted", dict[str, Count], form=WireForm.JSON)] = field(
        default_factory=dict
    )
    # from its arrival to its admission; absent where it was not admitted
    queue_s: Annotated[float | None, Wire("gen_ai.latency.time_in_queue", Seconds | None)] = None
    # from its arrival to the end of the step with its first token; absent where it had none
    first_s: Annotated[float | None, Wire("gen_ai.latency.time_to_first_token", Seconds | None)] = None
    # from its arrival to its end
    total_s: Annotated[float | None, Wire("gen_ai.latency.e2e", Seconds | None)] = None
