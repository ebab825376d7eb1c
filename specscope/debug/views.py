"""The full distributions of target and drafter at one place: as values, in words, and as the console prints them.

The engine hands them over as arrays. No torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from specscope.trace.history.place import TopToken as TopToken
from specscope.trace.history.wording import plural, probability
from specscope.trace.record.vocabulary import Vocabulary

TOP = 12  # tokens of a column
SHOWN = 8  # of them, on the console
Probs = NDArray[np.float32]


@dataclass(frozen=True)
class DistributionView:
    """One distribution over the vocabulary, as far as people look at it."""

    top: tuple[TopToken, ...]  # the likeliest, at most TOP, likeliest first
    entropy: float  # in nats
    prob: float  # of the token that the view is about
    rank: int | None  # of that token, from 1: how many are likelier, and itself; None where its probability is 0
    outside: bool = False  # whether the token is outside the draft vocabulary, of which the drafter can say nothing

    @staticmethod
    def of(probs: Probs, token: int, *, outside: bool = False) -> DistributionView:
        """The view of [V] probabilities, about one token."""
        best = np.argsort(-probs, kind="stable")[:TOP].tolist()
        exact = probs[probs > 0].astype(np.float64)
        return DistributionView(
            top=tuple(TopToken(other, float(probs[other])) for other in best if probs[other] > 0),
            entropy=abs(float((exact * np.log(exact)).sum())),
            prob=float(probs[token]),
            rank=rank_of(probs, token),
            outside=outside,
        )

    @property
    def place(self) -> str:
        if self.outside:
            return "outside the draft vocabulary"
        return "0: excluded" if self.rank is None else f"{probability(self.prob)}, rank {self.rank:,}"


def rank_of(probs: Probs, token: int) -> int | None:
    """How many are likelier, and itself; None where its probability is 0."""
    return 1 + int((probs > probs[token]).sum()) if probs[token] > 0 else None


@dataclass(frozen=True)
class Removed:
    """What one sampling rule takes away."""

    rule: str  # temperature 0, top-k 20, structured output (json), ...
    tokens: int
    mass: float
    likeliest: tuple[TopToken, ...] = ()  # of them, where that is of interest: what a form removed

    def text(self, vocabulary: Vocabulary) -> str:
        """What was removed, and the likeliest of it where that is told."""
        best = ", ".join(f"{vocabulary.show(top.token)} {probability(top.prob)}" for top in self.likeliest)
        text = f"{self.rule} removes {plural(self.tokens, 'token')}, {probability(self.mass)} of the mass"
        return f"{text}: {best}" if best else text


@dataclass(frozen=True)
class NodeView:
    """What target and drafter thought where a node's token was drawn. Filled by live/inspect.py."""

    request: str
    step: int  # of the engine
    index: int  # the request's own step
    node: int | None  # None: where the final token was drawn
    token: int  # the node's, or the final one
    raw: DistributionView  # the target's, before temperature and rules
    p: DistributionView  # the target's, as it is sampled from at this place
    draft: DistributionView | None  # the drafter's own, as raw; None for no model, or not known
    q: DistributionView | None  # the drafter's, as it was sampled from; None for deterministic drafts
    removed: tuple[Removed, ...]  # by each rule that shapes p
    choice_rank: int | None  # of the target's likeliest token in the drafter's own distribution; None where not known
    kl: float | None  # KL(target || drafter), raw, in nats, over the draft vocabulary; None without a drafter's
    tv: float | None  # their total variation: 1 - tv is the best acceptance
    computed: bool = False  # False: the very tensors of the step; True: computed again in KV of its own
    notes: tuple[str, ...] = ()  # where what is shown contradicts what was judged, a line each

    @property
    def columns(self) -> Mapping[str, DistributionView | str]:
        """The distributions by name, the target's first; where one is missing, the reason as text."""
        return {
            "target, raw": self.raw,
            "target, as sampled": self.p,
            "drafter, raw": self.draft or "no draft model, or no longer available",
            "drafter, as sampled": self.q or "deterministic: nothing was sampled",
        }

    @property
    def distances(self) -> tuple[tuple[str, str], ...]:
        """How far target and drafter are apart; none where the drafter has no distribution."""
        if self.kl is None or self.tv is None:
            return ()
        kl = "∞" if math.isinf(self.kl) else f"{self.kl:.3f}"
        best = f"{1 - self.tv:.0%} accepted"
        return ("KL(target‖drafter)", f"{kl} nats"), ("TV", f"{self.tv:.3f}"), ("at best", best)

    @property
    def choice(self) -> str:
        """Where the target's likeliest token is for the drafter; "" where that is not known."""
        if self.choice_rank is None:
            return "" if self.kl is None else "the target's likeliest token is outside the draft vocabulary"
        return f"the target's likeliest token has rank {self.choice_rank:,} in the drafter"

    @property
    def source(self) -> str:
        return "recomputed in separate KV blocks" if self.computed else "the tensors that the step used"


def kl_of(p: Probs, q: Probs) -> float:
    """KL(p || q) in nats over the tokens that the drafter knows, p renormalised there."""
    known = (q > 0) & (p > 0)
    there = p[known] / p[q > 0].sum(dtype=np.float64)
    return max(float((there * np.log(there / q[known])).sum()), 0.0)


def view_text(view: NodeView, vocabulary: Vocabulary) -> str:
    """For the console: tokens side by side, what the rules removed, places and distances; contradictions last."""
    columns = view.columns
    there = {name: column for name, column in columns.items() if isinstance(column, DistributionView)}
    tables = [list(_cells(name, column, view.token, vocabulary)) for name, column in there.items()]
    lines = ["  ".join(cells).rstrip() for cells in zip(*tables, strict=True)]
    lines += [removed.text(vocabulary) for removed in view.removed]
    what = "the final token" if view.node is None else "the drafted token"
    for name, column in columns.items():
        text = column if isinstance(column, str) else f"{what} {column.place}; H {column.entropy:.2f} nats"
        lines.append(f"{name}: {text}")
    lines.append(" · ".join(map(" ".join, view.distances)))
    lines += [view.choice, view.source, *(f"CONTRADICTION: {note}" for note in view.notes)]
    return "\n".join(line for line in lines if line)


def _cells(name: str, column: DistributionView, token: int, vocabulary: Vocabulary) -> Iterator[str]:
    texts = [(f"{'▸' if top.token == token else ' '}{vocabulary.show(top.token)}", top.prob) for top in column.top]
    width = max([len(name) - 8, *(len(text) for text, _ in texts[:SHOWN])])
    yield f"{name:<{width + 8}}"
    for row in range(SHOWN):
        yield f"{texts[row][0]:<{width}}  {texts[row][1]:.4f}" if row < len(texts) else " " * (width + 8)
