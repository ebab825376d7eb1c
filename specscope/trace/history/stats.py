"""Every acceptance figure, defined once.

drafts  steps with at least one drafted token
tau     mean acceptance length: 1 + accepted / drafts (the bonus or recovered token is the 1); steps without drafts
        do not count here, but in tokens per step
rate    draft acceptance rate: accepted / drafted nodes; for trees also accepted / depth
r_d     per-position rate as vLLM has it: accepted at depth d / drafts; corrected: / drafts that proposed depth >= d
c_d     conditional: r_d / r_(d-1), on the corrected counts accepted at d / (accepted at d-1 that proposed d)
        A depth that no draft proposed has none of the three.

Sums over an interval (Aggregate) are counted like steps as far as they go; a figure that needs a sum that one of them
does not report is None, or is left out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from operator import attrgetter
from typing import Any, NamedTuple

from specscope.trace.record.aggregate import Aggregate, RequestFigures
from specscope.trace.record.records import FinalKind, RequestStep

SUMS = ("drafts", "drafted", "accepted", "emitted")
AT_DEPTH = ("accepted_at", "proposed_at", "tried_at")
ROW, TOLD = ("steps", *SUMS, "depth", "aggregates"), (*SUMS, *AT_DEPTH)
KINDS, NONE_UNTOLD = tuple(FinalKind), (0,) * len(TOLD)
_row = attrgetter(*ROW)


class StepCounts(NamedTuple):
    kind: FinalKind  # of the final token
    emitted: int  # output tokens
    drafted: int  # nodes
    accepted: int  # nodes
    depth: int  # of the tree

    @staticmethod
    def of(step: RequestStep) -> StepCounts | None:
        """Of a request's step; None for a prefill chunk, which counts nothing."""
        if (packed := step.__dict__.get("packed")) is not None:
            columns, row = packed
            return columns.counts[row]  # type: ignore[no-any-return]
        verdict = step.verdict
        if verdict is None:
            return None
        drafted = len(step.tree)
        accepted, depth = (verdict.accepted, step.tree.max_depth) if drafted else (0, 0)
        return StepCounts(verdict.kind, step.emitted, drafted, accepted, depth)


Counted = RequestStep | StepCounts | Aggregate | RequestFigures


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
    aggregates: int = 0  # sums that were counted, not steps: of steps, kinds and depth they tell nothing
    untold: Counter[str] = field(default_factory=Counter)  # how many of them do not tell the count of that name

    def add(self, step: Counted) -> None:
        """Count one request's step, the sums of an interval, or a whole request; prefill chunks count nothing."""
        if isinstance(step, Aggregate | RequestFigures):
            self.merge(_sums(step))
        elif (counts := StepCounts.of(step) if isinstance(step, RequestStep) else step) is not None:
            self._add_step(counts)

    def _add_step(self, step: StepCounts) -> None:
        self.steps, self.emitted = self.steps + 1, self.emitted + step.emitted
        self.kinds[step.kind] += 1
        if not step.drafted:
            return
        self.drafts, self.drafted = self.drafts + 1, self.drafted + step.drafted
        self.accepted, self.depth = self.accepted + step.accepted, self.depth + step.depth
        self._widen(step.depth)
        tried = step.accepted + (1 if step.kind is FinalKind.RECOVERED else 0)
        by_depth = ((self.proposed_at, step.depth), (self.accepted_at, step.accepted), (self.tried_at, tried))
        for counts, deepest in by_depth:
            for d in range(min(deepest, step.depth)):
                counts[d] += 1

    def row(self) -> list[int]:
        by_depth = zip(self.accepted_at, self.proposed_at, self.tried_at, strict=True)
        return [
            *_row(self),
            *[self.kinds.get(kind, 0) for kind in KINDS],
            *([self.untold[name] for name in TOLD] if self.untold else NONE_UNTOLD),
            *chain.from_iterable(by_depth),
        ]

    @staticmethod
    def of(row: Sequence[int]) -> Acceptance:
        counts = iter(row)
        total = Acceptance()
        for name in ROW:
            setattr(total, name, next(counts))
        total.kinds.update({kind: next(counts) for kind in FinalKind})
        total.untold.update({name: next(counts) for name in TOLD})
        by_depth = list(counts)
        total.accepted_at, total.proposed_at, total.tried_at = (by_depth[place::3] for place in range(3))
        return total

    def merge(self, other: Acceptance) -> None:
        for name in ROW:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.kinds.update(other.kinds)
        self.untold.update(other.untold)
        self._widen(len(other.accepted_at))
        for name in AT_DEPTH:
            counts = getattr(self, name)
            for d, count in enumerate(getattr(other, name)):
                counts[d] += count

    def _widen(self, depth: int) -> None:
        for name in AT_DEPTH:
            counts = getattr(self, name)
            counts.extend([0] * (depth - len(counts)))

    def knows(self, *names: str) -> bool:
        """Whether every source that was added reports these counts: an aggregate may lack them."""
        return not any(self.untold[name] for name in names)

    def told(self, name: str) -> int | None:
        """A count; None where a source that was added does not report it."""
        known = self.knows(name) if name in SUMS else not self.aggregates
        value: int = getattr(self, name)
        return value if known else None

    @property
    def by_depth(self) -> bool:
        return bool(self.drafts) and self.knows("drafts", "accepted_at")

    @property
    def tau(self) -> float | None:
        return 1 + self.accepted / self.drafts if self.drafts and self.knows("drafts", "accepted") else None

    @property
    def tokens_per_step(self) -> float | None:
        return _ratio(self.emitted, self.steps) if not self.aggregates else None

    @property
    def rate(self) -> float | None:
        return _ratio(self.accepted, self.drafted) if self.knows("accepted", "drafted") else None

    @property
    def depth_rate(self) -> float | None:
        return None if self.aggregates else _ratio(self.accepted, self.depth)

    @property
    def per_position(self) -> list[float | None]:
        known = self.knows("proposed_at")
        return [None if known and not p else a / self.drafts for a, p in self._pairs("proposed_at")]

    @property
    def per_position_corrected(self) -> list[float | None]:
        known = self.knows("proposed_at")
        return [_ratio(a, p) if known else None for a, p in self._pairs("proposed_at")]

    @property
    def conditional(self) -> list[float | None]:
        known = self.knows("tried_at")
        return [_ratio(a, t) if known else None for a, t in self._pairs("tried_at")]

    def _pairs(self, name: str) -> Iterable[tuple[int, int]]:
        """At each depth, how many drafts accepted a token there, and the count of that name."""
        return zip(self.accepted_at, getattr(self, name), strict=True) if self.by_depth else ()

    @property
    def counts(self) -> list[int]:
        return [self.drafts, *(self.accepted_at if self.knows("accepted_at") else ())]

    def to_dict(self) -> dict[str, Any]:
        told = {name: getattr(self, name) if self.by_depth and self.knows(name) else None for name in AT_DEPTH[1:]}
        return {
            **{name: self.told(name) for name in ("steps", *SUMS)},
            **({"intervals": self.aggregates} if self.aggregates else {}),
            "mean_acceptance_length": self.tau,
            "draft_acceptance_rate": self.rate,
            "accepted_over_depth": self.depth_rate,
            "per_position": self.per_position,
            "per_position_corrected": self.per_position_corrected,
            "conditional": self.conditional,
            "counts": None if self.told("drafts") is None else self.counts,
            **told,
            "kinds": None if self.aggregates else {kind.value: self.kinds[kind] for kind in FinalKind},
        }


def _sums(given: Aggregate | RequestFigures) -> Acceptance:
    depths = max(len(given.accepted_at), len(given.proposed_at))
    at_depth: dict[str, Any] = {name: [*getattr(given, name), *[0] * depths][:depths] for name in AT_DEPTH}
    told: dict[str, Any] = {name: getattr(given, name) for name in SUMS}
    if isinstance(given, RequestFigures):
        target = given.steps - given.bonus - given.recovered
        kinds = {FinalKind.BONUS: given.bonus, FinalKind.RECOVERED: given.recovered, FinalKind.TARGET: target}
        return Acceptance(**told, **at_depth, steps=given.steps, depth=given.depth, kinds=Counter(kinds))
    untold = {name: int(value is None) for name, value in told.items()}
    untold |= {name: int(not getattr(given, name) and given.drafts != 0) for name in AT_DEPTH}
    counts: dict[str, Any] = {name: value or 0 for name, value in told.items()}
    return Acceptance(**counts, **at_depth, aggregates=1, untold=Counter(untold))


def measure(steps: Iterable[Counted]) -> Acceptance:
    total = Acceptance()
    for step in steps:
        total.add(step)
    return total


def mean_tau(parts: Sequence[Acceptance]) -> float | None:
    """Per-request mean of tau: every request counts alike, whatever its length."""
    taus = [part.tau for part in parts if part.tau is not None]
    return sum(taus) / len(taus) if taus else None
