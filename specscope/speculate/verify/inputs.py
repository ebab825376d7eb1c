"""Question: what a verdict is asked about, and what a fork changes in it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from specscope.speculate.verify.distribution import Dense, Distribution
from specscope.trace.changes import Changes
from specscope.trace.tree import Doubles, DraftTree


@dataclass(frozen=True)
class Question:
    """What a verdict is asked about."""

    tree: DraftTree
    p: Sequence[Distribution]  # [n + 1] the target's distribution at the root and at each node
    q: Mapping[int, Dense]  # the drafter's at each parent of sampled nodes, ROOT for the first level
    coin: Doubles  # [n + 1]: coin[0] draws the final token, coin[i + 1] is node i's
    forced: Mapping[int, bool] = field(default_factory=dict)  # nodes that are decreed accepted (True) or rejected
    final: int | None = None  # the final token, where that is decreed


def changed_question(question: Question, changes: Changes, position: int) -> Question:
    """The question with what a fork decrees at this position of the request."""
    coin = question.coin.copy()
    for (at, node), value in changes.coins.items():
        if at == position and node < len(question.tree):
            coin[node + 1] = value
    here = {node: yes for (at, node), yes in changes.outcomes.items() if at == position and node < len(question.tree)}
    return dataclasses.replace(
        question, coin=coin, forced={**question.forced, **here}, final=changes.tokens.get(position)
    )
