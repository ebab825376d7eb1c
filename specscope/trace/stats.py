"""Every acceptance figure, defined once.

drafts  steps with at least one drafted token
tau     mean acceptance length: 1 + accepted / drafts (the bonus or recovered token is the 1)
rate    draft acceptance rate: accepted / drafted nodes; for trees also accepted / depth
r_d     per-position rate as vLLM has it: accepted at depth d / drafts; corrected: / drafts that proposed depth >= d
c_d     conditional: r_d / r_(d-1), on the corrected counts accepted at d / (accepted at d-1 that proposed d)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from specscope.trace.records import FinalKind, RequestStep


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None


@dataclass
class Acceptance:
    """Counts over decode steps, and the figures that follow from them. A figure with nothing under it is None."""

    steps: int = 0  # decode steps, with drafts or without
    drafts: int = 0  # those with at least one drafted token
    drafted: int = 0  # nodes
    accepted: int = 0  # nodes
    emitted: int = 0  # output tokens, after truncation
    depth: int = 0  # sum of the trees' depths
    kinds: Counter[FinalKind] = field(default_factory=Counter)  # final tokens by kind
    accepted_at: list[int] = field(default_factory=list)  # [d-1]: drafts that accepted a token at depth d
    proposed_at: list[int] = field(default_factory=list)  # [d-1]: drafts whose tree reached depth d
    tried_at: list[int] = field(default_factory=list)  # [d-1]: drafts in which a node at depth d was tried

    def add(self, step: RequestStep) -> None:
        """Count one request's step; prefill chunks count nothing."""
        self._count(step, 1)

    def take_back(self, step: RequestStep) -> None:
        """Count one step less, which was added before."""
        self._count(step, -1)
        while self.proposed_at and not self.proposed_at[-1]:
            for counts in (self.accepted_at, self.proposed_at, self.tried_at):
                counts.pop()

    def _count(self, step: RequestStep, one: int) -> None:
        verdict = step.verdict
        if verdict is None:
            return
        self.steps += one
        self.emitted += one * step.emitted
        self.kinds[verdict.kind] += one
        if not len(step.tree):
            return
        accepted, depth = verdict.accepted, step.tree.max_depth
        self.drafts += one
        self.drafted += one * len(step.tree)
        self.accepted += one * accepted
        self.depth += one * depth
        self._widen(depth)
        tried = accepted + (1 if verdict.kind is FinalKind.RECOVERED else 0)
        for counts, reached in ((self.proposed_at, depth), (self.accepted_at, accepted), (self.tried_at, tried)):
            for d in range(min(reached, depth)):
                counts[d] += one

    def merge(self, other: Acceptance) -> None:
        """Add another count to this one."""
        for name in ("steps", "drafts", "drafted", "accepted", "emitted", "depth"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.kinds.update(other.kinds)
        self._widen(len(other.proposed_at))
        for mine, theirs in (
            (self.accepted_at, other.accepted_at),
            (self.proposed_at, other.proposed_at),
            (self.tried_at, other.tried_at),
        ):
            for d, count in enumerate(theirs):
                mine[d] += count

    def _widen(self, depth: int) -> None:
        for counts in (self.accepted_at, self.proposed_at, self.tried_at):
            counts.extend([0] * (depth - len(counts)))

    @property
    def tau(self) -> float | None:
        """Mean acceptance length, the bonus or recovered token included."""
        return None if not self.drafts else 1 + self.accepted / self.drafts

    @property
    def rate(self) -> float | None:
        """Draft acceptance rate: accepted / drafted nodes."""
        return _ratio(self.accepted, self.drafted)

    @property
    def depth_rate(self) -> float | None:
        """Accepted / depth: how much of the deepest path a tree could give was accepted."""
        return _ratio(self.accepted, self.depth)

    @property
    def per_position(self) -> list[float]:
        """r_d as vLLM reports it: accepted at depth d / drafts."""
        return [count / self.drafts for count in self.accepted_at]

    @property
    def per_position_corrected(self) -> list[float]:
        """Accepted at depth d / drafts that proposed depth d."""
        return [a / p if p else 0.0 for a, p in zip(self.accepted_at, self.proposed_at, strict=True)]

    @property
    def conditional(self) -> list[float | None]:
        """c_d: accepted at depth d / drafts that came to a trial at depth d. None where none came so far."""
        return [_ratio(a, t) for a, t in zip(self.accepted_at, self.tried_at, strict=True)]

    @property
    def counts(self) -> list[int]:
        """[drafts, accepted at 1, accepted at 2, ...]."""
        return [self.drafts, *self.accepted_at]

    def to_dict(self) -> dict[str, Any]:
        """All counts and figures as plain values."""
        return {
            "steps": self.steps,
            "drafts": self.drafts,
            "drafted": self.drafted,
            "accepted": self.accepted,
            "emitted": self.emitted,
            "mean_acceptance_length": self.tau,
            "draft_acceptance_rate": self.rate,
            "accepted_over_depth": self.depth_rate,
            "per_position": self.per_position,
            "per_position_corrected": self.per_position_corrected,
            "conditional": self.conditional,
            "counts": self.counts,
            "kinds": {kind.value: self.kinds[kind] for kind in FinalKind},
        }


def measure(steps: Iterable[RequestStep]) -> Acceptance:
    """Pooled counts over these steps."""
    total = Acceptance()
    for step in steps:
        total.add(step)
    return total


def mean_tau(parts: Sequence[Acceptance]) -> float | None:
    """Per-request mean of tau: every request counts alike, whatever its length."""
    taus = [part.tau for part in parts if part.tau is not None]
    return sum(taus) / len(taus) if taus else None
