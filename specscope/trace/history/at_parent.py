"""What target and drafter gave at one place of a tree, and of one token there: read from a step's evidence.

Every reader (trees, screens, the console, `why`, conditions) asks here, so that they all say the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from specscope.trace.record.notes import TEXT
from specscope.trace.record.privacy import NO_TOKEN
from specscope.trace.record.records import ParentNotes, RequestStep
from specscope.trace.record.tree import ROOT, Drawn

OUTSIDE = 0  # a rank: the drafter's vocabulary does not have the token


@dataclass(frozen=True)
class TopToken:
    """A token and its probability."""

    token: int
    prob: float


@dataclass(frozen=True)
class TokenThere:
    """One token at one place. What the evidence does not hold is None. Filled by AtParent.of_token and of_node."""

    token: int
    raw_p: float | None  # the target's probability, before temperature and rules
    raw_rank: int | None  # its rank there, from 1; None also where it is below the likeliest that are recorded
    p: float | None  # the target's, as sampled; 0 or 1 where the request is greedy
    draft_p: float | None  # the drafter's own probability
    draft_rank: int | None  # its rank there, from 1; OUTSIDE
    q: float | None = None  # with which it was drawn; None where it was not drawn


@dataclass(frozen=True)
class AtParent:
    """The place below one parent of a tree. It is known whole where the parent was tried and the evidence is full."""

    step: RequestStep
    parent: int  # ROOT, or a node

    @cached_property
    def notes(self) -> ParentNotes | None:
        """The step's notes, where they tell of this parent."""
        return None if self._row is None else self.step.parents

    @cached_property
    def _row(self) -> int | None:
        parents = self.step.parents
        rows = [] if parents is None else np.flatnonzero(parents.node == self.parent).tolist()
        return rows[0] if rows else None

    def number(self, name: str) -> float | None:
        """This parent's value in a per-parent field of ParentNotes; None where the notes do not have this parent."""
        return None if self.notes is None else float(getattr(self.notes, name)[self._row])

    def _shares(self, name: str) -> tuple[TopToken, ...]:
        if self.notes is None:
            return ()
        tokens, shares = getattr(self.notes, name)[self._row], getattr(self.notes, name + "_p")[self._row]
        pairs = zip(tokens.tolist(), shares.tolist(), strict=True)
        return tuple(TopToken(token, p) for token, p in pairs if p != 0 and token != NO_TOKEN)

    @cached_property
    def likeliest(self) -> tuple[TopToken, ...]:
        """The target's likeliest tokens, raw, likeliest first; none where they are not recorded."""
        return self._shares("top")

    @cached_property
    def drafters_likeliest(self) -> tuple[TopToken, ...]:
        """The drafter's own; none where it is no model, or they are not recorded."""
        return self._shares("draft_top")

    @property
    def outside(self) -> float | None:
        """The target's raw mass on tokens that the drafter does not know; None where that is not recorded."""
        return None if self.notes is None or not self.notes.draft_top_p[self._row].any() else self.number("outside")

    @property
    def choice(self) -> TopToken | None:
        """The target's likeliest token as sampled; None where it is not recorded."""
        if self.notes is None or self.notes.choice[self._row] == NO_TOKEN:
            return None
        return TopToken(int(self.notes.choice[self._row]), float(self.notes.choice_p[self._row]))

    @property
    def children(self) -> list[int]:
        """The nodes that were drafted here, in draw order."""
        return self.step.tree.children(self.parent)

    @property
    def tokens(self) -> list[int]:
        """The tokens of the children, in draw order."""
        return [int(self.step.tree.token[node]) for node in self.children]

    @property
    def dropped(self) -> list[int]:
        """Tokens that were drafted here and left out of the tree by re-ranking."""
        notes = self.step.notes
        return [] if notes is None else notes.dropped_token[notes.dropped_parent == self.parent].tolist()

    def raw_rank(self, token: int) -> int | None:
        """The target's rank of a token before temperature and rules; None where it is below the likeliest."""
        return _in(self.likeliest, token)[1]

    def of_token(self, token: int) -> TokenThere:
        """Any token here, drafted or not. Nothing is known where token ids were left out of the capture."""
        if token == NO_TOKEN:
            return TokenThere(token, None, None, None, None, None)
        drafted = [node for node in self.children if int(self.step.tree.token[node]) == token]
        if drafted:
            return self.of_node(drafted[0])
        choice = self.choice
        p = choice.prob if choice is not None and choice.token == token else None
        return TokenThere(token, *_in(self.likeliest, token), p, *self._drafters(token))

    def of_node(self, node: int) -> TokenThere:
        """A node that was drafted here."""
        step, token = self.step, int(self.step.tree.token[node])
        p = float(step.verdict.p[node]) if step.verdict is not None and step.verdict.tells_p else None
        (listed, draft_rank), noted = self._drafters(token), draft_ps(step)[node]
        draft_p = listed if noted is None else noted
        q = None if is_deterministic(step, node) else float(step.tree.q[node])
        return TokenThere(token, raw_ps(step)[node], self.raw_rank(token), p, draft_p, draft_rank, q)

    def _drafters(self, token: int) -> tuple[float | None, int | None]:
        """The drafter's probability of a token and its rank; the rank of the target's raw first choice is recorded."""
        p, rank = _in(self.drafters_likeliest, token)
        first = self.likeliest[0].token if self.likeliest else None
        if rank is not None or self.notes is None or not self.drafters_likeliest or token != first:
            return p, rank
        rank = int(self.notes.choice_rank[self._row])
        return (float(self.notes.choice_q[self._row]) if rank else None), rank


def _in(shares: tuple[TopToken, ...], token: int) -> tuple[float | None, int | None]:
    """The probability and the rank of a token among the likeliest; None where it is not among them."""
    for place, share in enumerate(shares):
        if share.token == token:
            return share.prob, place + 1
    return None, None


def above(step: RequestStep, node: int) -> AtParent:
    """The place at which a node was drafted; for the number of nodes, that of the final token."""
    if node < len(step.tree):
        return AtParent(step, int(step.tree.parent[node]))
    return end(step)


def end(step: RequestStep) -> AtParent:
    """The place at which the accepted path ended: there the final token was drawn."""
    path = [] if step.verdict is None else step.verdict.path.tolist()
    return AtParent(step, path[-1] if path else ROOT)


def raw_ps(step: RequestStep) -> list[float | None]:
    """[n] the target's raw probability of each node; None where its parent was not tried, or the evidence is lean."""
    notes = step.parents
    if notes is None:
        return [None] * len(step.tree)
    known = set(notes.node.tolist())
    pairs = zip(notes.raw_p.tolist(), step.tree.parent.tolist(), strict=True)
    return [p if parent in known else None for p, parent in pairs]


def draft_ps(step: RequestStep) -> list[float | None]:
    """[n] the drafter's own probability of each node, before sampling rules.

    None where it is no model, where a text alone has the node, and where the node was drawn: q tells of that.
    """
    if step.notes is None:
        return [None] * len(step.tree)
    probs: list[float | None] = step.notes.prob.tolist()
    sources = [] if step.method is None else step.method.source.tolist()
    if not sources and not step.tree.is_sampled:
        return probs
    untold = (step.tree.drawn != Drawn.DETERMINISTIC).tolist()
    by_text = [source == TEXT for source in sources] or [False] * len(probs)
    return [None if drawn or text else p for p, drawn, text in zip(probs, untold, by_text, strict=True)]


def is_deterministic(step: RequestStep, node: int) -> bool:
    """Whether the drafter proposed the node without drawing it: q is then 1."""
    return int(step.tree.drawn[node]) == Drawn.DETERMINISTIC
