"""What follows from the Acceptance of some requests: figures pooled, by depth and per request."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from specscope.trace.history.loops import Loops
from specscope.trace.history.stats import Acceptance, mean_tau
from specscope.trace.record.records import FinalKind


@dataclass(frozen=True)
class Position:
    """One depth of the trees, the root's children at 1. vLLM's position of it is depth - 1."""

    depth: int
    drafts: int
    proposed: int | None  # drafts whose tree reached this depth; None where it is not recorded
    tried: int | None  # drafts in which a node at this depth was tried; None where it is not recorded
    accepted: int  # drafts that accepted a token here
    per_position: float | None  # as in vLLM: accepted / drafts; like the others, None where no draft proposed it
    corrected: float | None  # accepted / proposed
    conditional: float | None  # accepted / tried


def committed(a: Acceptance) -> int | None:
    """Tokens the verifier committed, before EOS, stop strings and the length limit cut the output."""
    return None if a.aggregates else a.accepted + a.steps


def final_shares(a: Acceptance) -> dict[FinalKind, float | None]:
    """Share of each kind among the final tokens."""
    return {kind: a.kinds[kind] / a.steps if a.steps else None for kind in FinalKind}


def by_position(a: Acceptance) -> list[Position]:
    """The figures by depth; empty where they are not recorded."""
    if not a.by_depth:
        return []
    proposed, tried = (
        getattr(a, name) if a.knows(name) else [None] * len(a.accepted_at) for name in ("proposed_at", "tried_at")
    )
    columns = (proposed, tried, a.accepted_at, a.per_position, a.per_position_corrected, a.conditional)
    return [Position(depth, a.drafts, *row) for depth, row in enumerate(zip(*columns, strict=True), start=1)]


def told(a: Acceptance) -> dict[str, Any]:
    """All counts and figures as plain values."""
    return a.to_dict() | {
        "tokens_per_step": a.tokens_per_step,
        "committed": committed(a),
        "final_shares": {kind.value: share for kind, share in final_shares(a).items()},
    }


@dataclass(frozen=True)
class Means:
    """Per-request means: each over the requests that have the figure."""

    tau: float | None
    rate: float | None
    depth_rate: float | None
    tokens_per_step: float | None
    looped: float | None = None  # share of the output in loops
    tau_without: float | None = None  # without the steps whose output lies in loops

    @staticmethod
    def over(parts: Sequence[Acceptance], loops: Sequence[Loops] = ()) -> Means:
        """The means over these requests. `loops`: those of each request, where they are wanted."""
        return Means(
            tau=mean_tau(parts),
            rate=_mean(part.rate for part in parts),
            depth_rate=_mean(part.depth_rate for part in parts),
            tokens_per_step=_mean(part.tokens_per_step for part in parts),
            looped=_mean(part.share for part in loops),
            tau_without=mean_tau([part.rest for part in loops]),
        )

    def to_dict(self) -> dict[str, Any]:
        """Under the names that Acceptance.to_dict has."""
        return {
            "mean_acceptance_length": self.tau,
            "draft_acceptance_rate": self.rate,
            "accepted_over_depth": self.depth_rate,
            "tokens_per_step": self.tokens_per_step,
        }


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None
