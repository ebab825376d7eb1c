"""The kinds of rejection of a run, and what each of them cost.

A kind is where the token that the target wanted (its likeliest, as sampled) was for the drafter (ChoicePlace), the
depth of the rejection, and what came before the step. Its cost: a step that rejected at depth d accepted d - 1 tokens;
those of the run that got past depth d accepted a mean of m. With the token in the tree it would have accepted as many:
m - (d - 1) tokens were lost.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from specscope.analyze.evidence.arrays import Indices
from specscope.analyze.evidence.columns import KINDS
from specscope.analyze.findings import Reference
from specscope.analyze.questions.evidence import Evidence
from specscope.analyze.questions.groups import Share
from specscope.analyze.questions.missed import ABOUT, PLACES, ChoicePlace, Ends
from specscope.trace.record.records import FinalKind, Preceded
from specscope.trace.record.tree import Doubles

ALIKE = 2  # references of others like it
AFTER = {
    Preceded.PREFILL: "in the first step after the prefill",
    Preceded.PREEMPTION: "in the first step after a preemption",
    Preceded.FULL: "after a step that accepted down to a leaf",
    Preceded.PARTIAL: "after a step that accepted a part of a path",
    Preceded.NOTHING: "after a step that accepted nothing",
    Preceded.NO_DRAFT: "after a step without drafts",
}
PRECEDED = tuple(AFTER)


@dataclass(frozen=True)
class RejectionKind:
    """One kind, with all of its rejections."""

    place: ChoicePlace
    depth: int
    preceded: Preceded
    rejections: Share  # of all steps that ended in a rejection
    cost: float  # tokens lost in all: an estimate
    compared: int  # drafts that got past this depth, on which the estimate rests; without any it is a token each
    examples: tuple[Reference, ...]  # where the target was surest first

    @property
    def about(self) -> str:
        """In words."""
        known = self.place is not ChoicePlace.UNKNOWN
        wanted = f"a token {ABOUT[self.place]}" if known else "another token"
        return f"at depth {self.depth}, {AFTER[self.preceded]}, the target wanted {wanted}"


class RejectionKinds:
    """The kinds of rejection in the steps of a run; forced steps are left out."""

    def __init__(self, evidence: Evidence) -> None:
        self._evidence, c = evidence, evidence.columns
        recovered = c.kind == KINDS.index(FinalKind.RECOVERED)
        self._steps: Indices = np.flatnonzero(evidence.drafts & recovered)

    @cached_property
    def _keys(self) -> Indices:
        """[R, 3] the place, the depth and what came before, as numbers."""
        c = self._evidence.columns
        place = Ends(self._evidence, self._steps, self._wanted).place if len(self._steps) else self._steps
        before = [PRECEDED.index(c.visits[step].preceded) for step in self._steps.tolist()]
        return np.stack([place, c.depth_reached[self._steps] + 1, np.array(before, np.int64)], axis=1)

    @cached_property
    def _parent(self) -> Indices:
        """[R] the tried parent at which the path ended; -1 where it is not in the evidence."""
        c = self._evidence.columns
        return c.parents.at_row[c.final_row[self._steps]]

    @cached_property
    def _wanted(self) -> Indices:
        """[R] the target's likeliest token where the path ended; the one that it took where that is not recorded."""
        c, parent = self._evidence.columns, self._parent
        if not len(c.parents):
            return c.final[self._steps]
        return np.where(parent >= 0, c.parents.choice[parent], c.final[self._steps])

    @cached_property
    def _sure(self) -> Doubles:
        """[R] how sure the target was: its raw p of its likeliest token there, else the final token's p."""
        c, parent = self._evidence.columns, self._parent
        if not c.parents.top_p.size:
            return c.final_p[self._steps]
        return np.where(parent >= 0, c.parents.top_p[parent, 0], c.final_p[self._steps])

    def all(self) -> list[RejectionKind]:
        """All kinds, the costliest first."""
        if not len(self._steps):
            return []
        keys, group = np.unique(self._keys, axis=0, return_inverse=True)
        kinds = [
            self._kind(key, np.flatnonzero(group.reshape(-1) == number)) for number, key in enumerate(keys.tolist())
        ]
        return sorted(kinds, key=lambda kind: -kind.cost)

    def of(self, request: str, index: int) -> RejectionKind | None:
        """The kind of one step, with other steps as examples; None where it did not end in a rejection."""
        parts = [self._evidence.columns.visits[step].part for step in self._steps.tolist()]
        same = [row for row, part in enumerate(parts) if (part.request, part.index) == (request, index)]
        if not same:
            return None
        alike = np.flatnonzero((self._keys == self._keys[same[0]]).all(axis=1))
        return self._kind(self._keys[same[0]].tolist(), alike, without=same[0])

    def _kind(self, key: Sequence[int], members: Indices, without: int = -1) -> RejectionKind:
        place, depth, before = key
        reached = self._evidence.columns.depth_reached
        past = reached[self._evidence.drafts & (reached >= depth)]
        mean_accepted = float(past.mean()) if len(past) else float(depth)
        surest = members[np.argsort(-self._sure[members], kind="stable")]
        others = [int(self._steps[row]) for row in surest.tolist() if row != without][:ALIKE]
        return RejectionKind(
            PLACES[place],
            depth,
            PRECEDED[before],
            Share(len(members), len(self._steps)),
            len(members) * (mean_accepted - (depth - 1)),
            len(past),
            tuple(self._evidence.columns.at_step(step) for step in others),
        )

    def counts(self, token: int) -> tuple[int, int, int]:
        """How often a token was drafted over all steps, tried, and accepted."""
        c = self._evidence.columns
        same = c.token == token
        return int(same.sum()), int((same & c.tried).sum()), int((same & c.accepted).sum())
