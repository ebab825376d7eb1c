"""VerifyInput: what a verdict is asked about, and what a fork changes in it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from specscope.speculate.verify.distribution import Dense, Distribution
from specscope.trace.changes import Changes
from specscope.trace.tree import Doubles, DraftTree


@dataclass(frozen=True)
class VerifyInput:
    """What a verdict is asked about."""

    tree: DraftTree
    p: Sequence[Distribution]  # [n + 1] the target's distribution at the root and at each node
    q: Mapping[int, Dense]  # the drafter's at each parent of sampled nodes, ROOT for the first level
    coin: Doubles  # [n + 1]: coin[0] draws the final token, coin[i + 1] is node i's
    forced: Mapping[int, bool] = field(default_factory=dict)  # nodes that are forced accepted (True) or rejected
    final: int | None = None  # the final token, where that is forced


def changed_input(one: VerifyInput, changes: Changes, position: int) -> VerifyInput:
    """The one with what a fork decrees at this position of the request."""
    coin = one.coin.copy()
    for (at, node), value in changes.coins.items():
        if at == position and node < len(one.tree):
            coin[node + 1] = value
    here = {node: yes for (at, node), yes in changes.outcomes.items() if at == position and node < len(one.tree)}
    return dataclasses.replace(one, coin=coin, forced={**one.forced, **here}, final=changes.tokens.get(position))
