"""Figures of some requests: their Acceptance and what follows from it, pooled, by depth and per request."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from specscope.trace.records import FinalKind
from specscope.trace.stats import Acceptance, mean_tau


@dataclass(frozen=True)
class Position:
    """One depth of the trees, the root's children at 1. vLLM's position of it is depth - 1."""

    depth: int
    proposed: int  # drafts whose tree reached this depth
    tried: int  # drafts in which a node at this depth was tried
    accepted: int  # drafts that accepted a token here
    rate: float  # as vLLM has it: accepted / drafts
    corrected: float | None  # accepted / proposed; None where it is not told how many drafts proposed it
    conditional: float | None  # accepted / tried


@dataclass(frozen=True)
class Figures:
    """An Acceptance and what a report shows of it beyond that."""

    acceptance: Acceptance

    @property
    def tokens_per_step(self) -> float | None:
        """Output tokens per decode step of a request."""
        return self.acceptance.emitted / self.acceptance.steps if self.acceptance.steps else None

    @property
    def committed(self) -> int | None:
        """Tokens the verifier committed, before EOS, stop strings and the length limit cut the output."""
        if self.acceptance.aggregates:
            return None
        return self.acceptance.accepted + self.acceptance.steps

    @property
    def final_shares(self) -> dict[FinalKind, float | None]:
        """Share of each kind among the final tokens."""
        total = self.acceptance.steps
        return {kind: self.acceptance.kinds[kind] / total if total else None for kind in FinalKind}

    @property
    def positions(self) -> list[Position]:
        """The figures by depth; none where they are not told."""
        a = self.acceptance
        if not a.by_depth:
            return []
        columns = (a.proposed_at, a.tried_at, a.accepted_at, a.per_position, a.per_position_corrected, a.conditional)
        return [Position(depth, *row) for depth, row in enumerate(zip(*columns, strict=True), start=1)]

    def to_dict(self) -> dict[str, Any]:
        """All counts and figures as plain values."""
        return self.acceptance.to_dict() | {
            "tokens_per_step": self.tokens_per_step,
            "committed": self.committed,
            "final_shares": {kind.value: share for kind, share in self.final_shares.items()},
        }


@dataclass(frozen=True)
class Means:
    """Per-request means: each over the requests that have the figure."""

    tau: float | None
    rate: float | None
    depth_rate: float | None
    tokens_per_step: float | None

    @staticmethod
    def over(parts: Sequence[Figures]) -> Means:
        """The means over these requests."""
        return Means(
            tau=mean_tau([part.acceptance for part in parts]),
            rate=_mean(part.acceptance.rate for part in parts),
            depth_rate=_mean(part.acceptance.depth_rate for part in parts),
            tokens_per_step=_mean(part.tokens_per_step for part in parts),
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
