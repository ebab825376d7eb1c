"""A token at a place of a tree: what target and drafter gave it there, and how it was decided, from a step's evidence.

Every reader (`why`, trees, screens, the console, conditions) asks here. What the evidence does not hold is None.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from specscope.trace.history.wording import probability
from specscope.trace.record.notes import TEXT, ParentNotes
from specscope.trace.record.privacy import NO_TOKEN
from specscope.trace.record.records import FinalKind, Outcome, RequestStep, Verdict
from specscope.trace.record.rules import MATCH
from specscope.trace.record.tree import ROOT, Doubles, DraftTree, Drawn

OUTSIDE = 0  # a rank: the drafter's vocabulary does not have the token
BELOW, DREW, DREW_ANOTHER, LESS, NOT_LESS = "↓", "=", "≠", "<", "≥"
TOSSED = (LESS, NOT_LESS)


class TopToken(NamedTuple):
    """A token and its probability."""

    token: int
    prob: float


class PlaceView:
    """One token below one parent of a tree: a node, the final token, or another. Made by `at`, `end` and `of`.

    The place is known whole where the parent was tried and the evidence is full.
    """

    def __init__(
        self,
        step: RequestStep,
        parent: int,
        token: int = NO_TOKEN,
        node: int | None = None,
        *,
        final: bool = False,
        drafts: Sequence[float | None] = (),  # draft_ps, where they are at hand
    ) -> None:
        self.step, self.parent = step, parent  # ROOT, or a node
        self.token, self.node, self.final = token, node, final  # node: None where the token was not drafted there
        self._drafts = drafts

    @cached_property
    def _noted(self) -> tuple[ParentNotes | None, int]:
        notes = self.step.parents
        rows = [] if notes is None else np.flatnonzero(notes.node == self.parent).tolist()
        return (notes, rows[0]) if rows else (None, 0)

    @property
    def notes(self) -> ParentNotes | None:
        """The step's notes, where they tell of this parent."""
        return self._noted[0]

    @property
    def _row(self) -> int:
        return self._noted[1]

    @cached_property
    def choice(self) -> TopToken | None:
        """The target's likeliest token as sampled."""
        if self.notes is None or self.notes.choice[self._row] == NO_TOKEN:
            return None
        return TopToken(int(self.notes.choice[self._row]), float(self.notes.choice_p[self._row]))

    @cached_property
    def p(self) -> float | None:
        """The token's p as sampled: 0 or 1 where the request is greedy."""
        if self.node is None:
            return self.choice.prob if self.choice is not None and self.choice.token == self.token else None
        verdict = self.step.verdict
        return float(verdict.p[self.node]) if verdict is not None and verdict.tells_p else None

    @cached_property
    def raw_p(self) -> float | None:
        """The target's probability before temperature and rules."""
        if self.node is None:
            return _in(self.likeliest, self.token)[0]
        return None if self.notes is None else float(self.notes.raw_p[self.node])

    @cached_property
    def raw_rank(self) -> int | None:
        """The token's rank there, from 1, where that is recorded."""
        return _in(self.likeliest, self.token)[1]

    @cached_property
    def draft_p(self) -> float | None:
        """The drafter's own probability."""
        noted = None if self.node is None else (self._drafts or draft_ps(self.step))[self.node]
        return self._drafters[0] if noted is None else noted

    @property
    def draft_rank(self) -> int | None:
        """The token's rank in the drafter, from 1, or OUTSIDE."""
        return self._drafters[1]

    @cached_property
    def q(self) -> float | None:
        """The probability that the node was drawn from; None where it was no draw."""
        tree = self.step.tree
        return None if self.node is None or tree.drawn[self.node] == Drawn.DETERMINISTIC else float(tree.q[self.node])

    def of(self, token: int, *, final: bool = False) -> PlaceView:
        """Any token here. Nothing is known where token ids were left out of the capture."""
        children = [] if token == NO_TOKEN else self.children
        node = next((node for node in children if self.step.tree.token[node] == token), None)
        return PlaceView(self.step, self.parent, token, node, final=final)

    @property
    def children(self) -> list[int]:
        """The nodes that were drafted here, in draw order."""
        return self.step.tree.children(self.parent)

    def number(self, name: str) -> float | None:
        """This parent's value in a per-parent field of ParentNotes; None where the notes do not have this parent."""
        return None if self.notes is None else float(getattr(self.notes, name)[self._row])

    def _likeliest(self, name: str) -> tuple[TopToken, ...]:
        if self.notes is None:
            return ()
        tokens, shares = getattr(self.notes, name)[self._row], getattr(self.notes, name + "_p")[self._row]
        pairs = zip(tokens.tolist(), shares.tolist(), strict=True)
        return tuple(TopToken(token, p) for token, p in pairs if p != 0 and token != NO_TOKEN)

    @cached_property
    def likeliest(self) -> tuple[TopToken, ...]:
        """The target's likeliest tokens, raw, likeliest first; none where they are not recorded."""
        return self._likeliest("top")

    @cached_property
    def drafters_likeliest(self) -> tuple[TopToken, ...]:
        """The drafter's own; none where it is no model, or they are not recorded."""
        return self._likeliest("draft_top")

    @cached_property
    def _drafters(self) -> tuple[float | None, int | None]:
        """The token's probability and rank in the drafter: that of the target's raw first choice is recorded."""
        p, rank = _in(self.drafters_likeliest, self.token)
        if rank is not None or self.notes is None or not self.drafters_likeliest or self.raw_rank != 1:
            return p, rank
        rank = int(self.notes.choice_rank[self._row])
        return (float(self.notes.choice_q[self._row]) if rank else None), rank

    @property
    def wanted(self) -> PlaceView | None:
        """The target's likeliest token as sampled; where that is not recorded, the one that was taken here.

        None where the path never came here, and where token ids were left out.
        """
        step, verdict, children = self.step, self.step.verdict, self.children
        if verdict is not None and verdict.token == NO_TOKEN:
            return None
        if self.choice is not None:
            return self.of(self.choice.token)
        if verdict is None or not verdict.is_greedy:
            return None  # what was drawn need not be the likeliest
        if not children or not {*children, len(step.tree)}.isdisjoint(verdict.forced.tolist()):
            return None  # after a leaf nothing is recorded but the token itself
        accepted = [node for node in children if node in verdict.path.tolist()]
        if accepted:
            return at(step, accepted[0])
        return end(step) if self.parent == last(verdict) else None

    @property
    def judged(self) -> tuple[Verdict, int]:
        """The verdict on the node, and the node."""
        assert self.step.verdict is not None
        assert self.node is not None
        return self.step.verdict, self.node

    @property
    def tried(self) -> dict[str, float]:
        """p_tried and q_tried, each where it prints differently from p or q as drawn. The rule `match` uses no q."""
        verdict, node = self.judged
        if verdict.outcome[node] == Outcome.UNTRIED:
            return {}
        pairs = {"p_tried": (verdict.p_trial, verdict.p)}
        pairs |= {} if verdict.rule == MATCH else {"q_tried": (verdict.q_trial, self.step.tree.q)}
        both = {name: (float(tried[node]), float(drawn[node])) for name, (tried, drawn) in pairs.items()}
        return {name: tried for name, (tried, drawn) in both.items() if probability(tried) != probability(drawn)}

    @property
    def numbers(self) -> dict[str, float]:
        """p and q of a node by the names of conditions: as drawn, and as tried where that is another number.

        The final token has p alone. A greedy step has p before temperature 0. Where q is a point mass, the drafter's
        own probability says more.
        """
        verdict = self.step.verdict
        assert verdict is not None
        raw = self.raw_p if verdict.is_greedy else None
        p = verdict.final_p if self.final else float(verdict.p[self.node])
        known = {"p": p} if raw is None else {"raw_p": raw}
        if self.final:
            return known
        drafter = {"draft_p": self.draft_p} if self.q is None else {"q": self.q}
        known |= {name: value for name, value in drafter.items() if value is not None}
        return known if verdict.is_greedy else known | self.tried


def _in(shares: tuple[TopToken, ...], token: int) -> tuple[float | None, int | None]:
    """The probability and the rank of a token among the likeliest; None where it is not among them."""
    return next(((share.prob, rank) for rank, share in enumerate(shares, 1) if share.token == token), (None, None))


def at(step: RequestStep, node: int) -> PlaceView:
    """A node where it was drafted; for the number of nodes, the final token."""
    if node < len(step.tree):
        return PlaceView(step, int(step.tree.parent[node]), int(step.tree.token[node]), node)
    return end(step)


def nodes(step: RequestStep) -> list[PlaceView]:
    """Every node where it was drafted."""
    drafts, rows = draft_ps(step), zip(step.tree.parent.tolist(), step.tree.token.tolist(), strict=True)
    return [PlaceView(step, *row, node, drafts=drafts) for node, row in enumerate(rows)]


def end(step: RequestStep) -> PlaceView:
    """The final token, where it was drawn: where the accepted path ended."""
    verdict = step.verdict
    place = PlaceView(step, ROOT if verdict is None else last(verdict), final=True)
    return place if verdict is None else place.of(verdict.token, final=True)


def last(verdict: Verdict) -> int:
    """The node at which the accepted path ended; ROOT where nothing was accepted."""
    return int(verdict.path[-1]) if len(verdict.path) else ROOT


def coin_sign(verdict: Verdict, node: int) -> str:
    """How a tried node's coin stands to its accept_prob.

    `<` or `≥`; `=` or `≠` where the coin drew this token or another (match); `↓` where a node below was accepted, and
    with it this one (block, traversal).
    """
    if verdict.rule == MATCH:
        return DREW if verdict.outcome[node] == Outcome.ACCEPTED else DREW_ANOTHER
    if not verdict.judged[node]:
        return BELOW
    return LESS if verdict.coin[node] < verdict.accept_prob[node] else NOT_LESS


def deciding(step: RequestStep) -> list[int]:
    """The nodes that ended the path: the children there that were all rejected, or the last one that was accepted."""
    verdict = step.verdict
    if verdict is None:
        return []
    ended = last(verdict)
    failed = [node for node in step.tree.children(ended) if verdict.outcome[node] != Outcome.UNTRIED]
    return failed or ([ended] if ended != ROOT else [])


def ended_by(step: RequestStep) -> int:
    """Where to look first for why the path ended: the first node that was rejected there, else the final token."""
    recovered = step.verdict is not None and step.verdict.kind is FinalKind.RECOVERED
    return next(iter(deciding(step)), len(step.tree)) if recovered else len(step.tree)


def draft_ps(step: RequestStep) -> list[float | None]:
    """[n] the drafter's own probability of each node, before sampling rules.

    None where it is no model, where a text alone has the node, and where the node was drawn: q tells of that.
    """
    if step.notes is None:
        return [None] * len(step.tree)
    untold = step.tree.drawn != Drawn.DETERMINISTIC
    if step.method is not None and len(step.method.source):
        untold = untold | (step.method.source == TEXT)
    return [None if other else p for p, other in zip(step.notes.prob.tolist(), untold.tolist(), strict=True)]


@dataclass(frozen=True)
class Ratios:
    """The ratios of the n nodes of a tree, which block verification and traversal go by; 0 at those not tried.

    They follow from p and q as tried and from the masses that rejected siblings left: speculate/verify/traversal.py.
    """

    parent: Doubles  # [n] what was left of the parent's ratio when the node came up
    own: Doubles  # [n] the node's own then
    left: Doubles  # [n] and what is left of it when all below was rejected: what its coin is held against


def ratios(tree: DraftTree, verdict: Verdict) -> Ratios:
    """The ratios of a step under a rule that looks ahead."""
    n = len(tree)
    parent, own_ratio, left = np.zeros((3, n + 1))  # the root comes last: its index is -1
    left[-1] = 1.0
    forced = set(verdict.forced.tolist())
    rows = zip(
        tree.parent.tolist(),
        verdict.outcome.tolist(),
        verdict.p_trial.tolist(),
        verdict.q_trial.tolist(),
        verdict.residual_mass.tolist(),
        strict=True,
    )
    for node, (above, outcome, p, q, mass) in enumerate(rows):
        if outcome == Outcome.UNTRIED:
            continue
        ratio = parent[node] = left[above]
        own_ratio[node] = left[node] = min(1.0, ratio * p / q) if q > 0 else 0.0
        if outcome == Outcome.REJECTED:
            left[above] = mass / (mass + (1 - ratio)) if mass > 0 else float(ratio == 1)
        elif node in forced:
            left[node] = 1.0
    return Ratios(parent[:n], own_ratio[:n], left[:n])
