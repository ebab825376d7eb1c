"""Kinds of rejection: where the token that the target wanted was, and what each kind cost.

child       it is a child of the last accepted node that was not accepted (rules other than the standard one; repeats)
dropped     it was drafted there, and left out of the tree when that was re-ranked
top         it was among the drafter's likeliest tokens there (four, or as many as the evidence has), but not drafted
ranked      it was lower, down to rank 32
lower       it was lower still, or lower than the likeliest by an unknown number of ranks
outside     it is not in the drafter's reduced vocabulary
unknown     the evidence has no distribution of the drafter there (it is lean, or the drafter is not a model), or no ids

Rank 5 and below is known where the token was the target's raw first choice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property

import numpy as np

from specscope.analyze.evidence.arrays import Indices, indices, joined, lengths
from specscope.analyze.evidence.columns import KINDS, Columns
from specscope.analyze.findings import Reference
from specscope.analyze.questions.evidence import Evidence
from specscope.trace.record.draft_vocabulary import NOT_TOLD, draft_tokens, lacks_draft_tokens
from specscope.trace.record.privacy import NO_TOKEN
from specscope.trace.record.records import FinalKind, Preceded
from specscope.trace.record.tree import Bools, Doubles


def among_children(c: Columns, steps: Indices, token: Indices) -> Bools:
    """[steps] whether a child of the last accepted node has this token."""
    span = _span(c)
    return np.isin(c.final_row[steps] * span + token, c.row * span + c.token)


def among_dropped(c: Columns, steps: Indices, token: Indices) -> Bools:
    """[steps] whether re-ranking dropped this token at the end of the path."""
    step = np.repeat(np.arange(len(c)), lengths(c.picked, "notes", "dropped_token"))
    dropped, parent = (joined(c.picked, "notes", name, np.int64) for name in ("dropped_token", "dropped_parent"))
    below = parent < np.diff(c.start)[step]  # a node, and not another dropped one
    rows, dropped = c.root_row[step[below]] + 1 + parent[below], dropped[below]
    span = max(_span(c), int(dropped.max(initial=0)) + 1)
    return np.isin(c.final_row[steps] * span + token, rows * span + dropped)


def _span(c: Columns) -> int:
    """A number above every token id."""
    choice = int(c.parents.choice.max(initial=0))
    return 1 + max(int(c.token.max(initial=0)), int(c.final.max(initial=0)), choice)


RANKED = 32


class ChoicePlace(StrEnum):
    CHILD = "child"
    DROPPED = "dropped"
    TOP = "top"
    RANKED = "ranked"
    LOWER = "lower"
    OUTSIDE = "outside"
    UNKNOWN = "unknown"


PLACES = tuple(ChoicePlace)
ABOUT = {
    ChoicePlace.CHILD: "drafted there, but not accepted",
    ChoicePlace.DROPPED: "drafted, but dropped by re-ranking",
    ChoicePlace.TOP: "in the drafter's top 4 but not in the tree",
    ChoicePlace.RANKED: f"ranked 5 to {RANKED} by the drafter",
    ChoicePlace.LOWER: f"ranked below {RANKED} by the drafter",
    ChoicePlace.OUTSIDE: "outside the drafter's vocabulary",
    ChoicePlace.UNKNOWN: "unknown: no drafter's distribution, draft vocabulary or token ids",
}


def places_of(evidence: Evidence, steps: Indices, token: Indices) -> Indices:
    """Where a token of each of these steps was, at the place where its path ended: [steps], of PLACES."""
    c, parents = evidence.columns, evidence.columns.parents
    row, named = c.final_row[steps], token != NO_TOKEN
    child, dropped = (named & find(c, steps, token) for find in (among_children, among_dropped))
    top_p = np.where(named, parents.drafters(parents.at_row[row], token), np.nan)
    likeliest = parents.top[:, :1].max(axis=1, initial=NO_TOKEN)  # the target's, raw
    has_drafter = np.any(parents.draft_top_p > 0, axis=1)
    of_rows = [
        parents.of_rows(values.astype(np.float64), row) for values in (likeliest, has_drafter, parents.choice_rank)
    ]
    known = named & (of_rows[1] == 1)
    rank = np.where(known & (of_rows[0] == token), of_rows[2], np.nan)  # for the drafter, where it is recorded
    drafters = draft_tokens(evidence.run)
    outside = (rank == 0) | (False if drafters is None else ~np.isin(token, drafters))
    lower = known & ((rank > RANKED) | (not lacks_draft_tokens(evidence.run)))  # or outside, else
    order = (
        (child, ChoicePlace.CHILD),
        (dropped, ChoicePlace.DROPPED),
        (top_p > 0, ChoicePlace.TOP),
        (outside, ChoicePlace.OUTSIDE),
        ((rank > 0) & (rank <= RANKED), ChoicePlace.RANKED),
        (lower, ChoicePlace.LOWER),
    )
    places = [PLACES.index(place) for _, place in order]
    return np.select([where for where, _ in order], places, PLACES.index(ChoicePlace.UNKNOWN))


# The kinds of rejection of a run, and what each of them cost.
#
# A kind is where the token that the target wanted (its likeliest, as sampled) was for the drafter (ChoicePlace), the
# depth of the rejection, and what came before the step. Its cost: a step that rejected at depth d accepted d - 1
# tokens; those of the run that got past depth d accepted a mean of m. With the token in the tree it would have accepted
# as many: m - (d - 1) tokens were lost.


ALIKE = 2  # references of others like it
LEAN = "raw p, ranks, entropies and the drafter's likeliest tokens need full evidence: some steps lack it"
AFTER = {
    Preceded.PREFILL: "in the first step after the prefill",
    Preceded.PREEMPTION: "in the first step after a preemption",
    Preceded.FULL: "after a step that accepted down to a leaf",
    Preceded.PARTIAL: "after a partly accepted step",
    Preceded.NOTHING: "after a step that accepted nothing",
    Preceded.NO_DRAFT: "after a step without drafts",
}
PRECEDED = tuple(AFTER)


@dataclass(frozen=True)
class RejectionKind:
    place: ChoicePlace
    depth: int
    preceded: Preceded
    rejections: int
    of_rejections: int  # of all steps that ended in one
    tokens_lost: float  # in all: an estimate
    compared_drafts: int  # that got past this depth, on which the estimate rests; without any it is a token each
    examples: tuple[Reference, ...]  # where the target was surest first
    sentence: str = ""  # the headline of the first of them

    @property
    def about(self) -> str:
        known = self.place is not ChoicePlace.UNKNOWN
        wanted = f"the target wanted {f'a token {ABOUT[self.place]}' if known else 'another token'}"
        if self.place is ChoicePlace.DROPPED:
            wanted = "the drafter proposed the target's token, but re-ranking dropped it"
        return f"at depth {self.depth}, {AFTER[self.preceded]}, {wanted}"


class RejectionKinds:
    """The kinds of rejection in the steps of a run; forced steps are left out."""

    def __init__(self, evidence: Evidence) -> None:
        self._evidence, self.columns = evidence, evidence.columns
        c = self.columns
        recovered = c.kind == KINDS.index(FinalKind.RECOVERED)
        self.steps: Indices = np.flatnonzero(evidence.drafts & recovered)

    @cached_property
    def _keys(self) -> Indices:
        """[R, 3] the place, the depth and what came before, as numbers."""
        c = self.columns
        place = places_of(self._evidence, self.steps, self._wanted) if len(self.steps) else self.steps
        before = [PRECEDED.index(c.visits[step].preceded) for step in self.steps.tolist()]
        return np.stack([place, c.depth_reached[self.steps] + 1, np.array(before, np.int64)], axis=1)

    # [R] the tried parent at which the path ended; -1 where it is not in the evidence
    _parent = indices(lambda k: k.columns.parents.at_row[k.columns.final_row[k.steps]])

    @cached_property
    def _wanted(self) -> Indices:
        """[R] the target's likeliest token where the path ended; the one that it took where that is not recorded."""
        c, taken = self.columns, self.columns.final[self.steps]
        return np.where(self._parent >= 0, c.parents.choice[self._parent], taken) if len(c.parents) else taken

    @cached_property
    def _sure(self) -> Doubles:
        """[R] how sure the target was: its raw p of its likeliest token there, else the final token's p."""
        c, p = self.columns, self.columns.final_p[self.steps]
        return np.where(self._parent >= 0, c.parents.top_p[self._parent, 0], p) if c.parents.top_p.size else p

    def all(self) -> list[RejectionKind]:
        """All kinds, the costliest first."""
        if not len(self.steps):
            return []
        keys, group = np.unique(self._keys, axis=0, return_inverse=True)
        kinds = [
            self._kind(key, np.flatnonzero(group.reshape(-1) == number)) for number, key in enumerate(keys.tolist())
        ]
        return sorted(kinds, key=lambda kind: -kind.tokens_lost)

    def of(self, request: str, index: int) -> RejectionKind | None:
        """The kind of one step, with other steps as examples; None where it did not end in a rejection."""
        parts = [self.columns.visits[step].part for step in self.steps.tolist()]
        same = [row for row, part in enumerate(parts) if (part.request, part.index) == (request, index)]
        if not same:
            return None
        alike = np.flatnonzero((self._keys == self._keys[same[0]]).all(axis=1))
        return self._kind(self._keys[same[0]].tolist(), alike, without=same[0])

    def _kind(self, key: Sequence[int], members: Indices, without: int = -1) -> RejectionKind:
        place, depth, before = key
        reached = self.columns.depth_reached
        past = reached[self._evidence.drafts & (reached >= depth)]
        mean_accepted = float(past.mean()) if len(past) else float(depth)
        surest = members[np.argsort(-self._sure[members], kind="stable")]
        others = [int(self.steps[row]) for row in surest.tolist() if row != without][:ALIKE]
        return RejectionKind(
            PLACES[place],
            depth,
            PRECEDED[before],
            len(members),
            len(self.steps),
            len(members) * (mean_accepted - (depth - 1)),
            len(past),
            tuple(self.columns.at_step(step) for step in others),
        )

    @property
    def notes(self) -> tuple[str, ...]:
        untold = lacks_draft_tokens(self._evidence.run)
        full = self.columns.parents.there[self._evidence.drafts].all()
        return (
            *self._evidence.notes,
            *([f"{NOT_TOLD}: only ranks show which tokens are outside it"] if untold else []),
            *([] if full else [LEAN]),
        )

    def counts(self, token: int) -> tuple[int, int, int]:
        """How often a token was drafted over all steps, tried, and accepted."""
        c = self.columns
        same = c.token == token
        return int(same.sum()), int((same & c.tried).sum()), int((same & c.accepted).sum())
