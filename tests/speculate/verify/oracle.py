"""The oracle of verification: one tree, one distribution after another, with every operation by the book.

The rule is stated in specscope/speculate/verify/host.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specscope.trace.record.records import FinalKind, Outcome, Verdict
from specscope.trace.record.tree import ROOT, Doubles, DraftTree, Drawn
from tests.speculate.verify import book
from tests.speculate.verify.book import Dense, Distribution

NONE_FORCED: Mapping[int, bool] = {}


@dataclass
class Judgement:
    """A walk down the tree before the final token is drawn: what each node met, and what is left of p."""

    left: Distribution  # the final token is drawn from this
    kind: FinalKind
    path: list[int] = field(default_factory=list)
    outcome: dict[int, Outcome] = field(default_factory=dict)  # tried nodes only, as are the next four
    p_trial: dict[int, float] = field(default_factory=dict)
    q_trial: dict[int, float] = field(default_factory=dict)
    accept_prob: dict[int, float] = field(default_factory=dict)
    residual_mass: dict[int, float] = field(default_factory=dict)  # rejected nodes only


def judge(
    tree: DraftTree,
    p: Sequence[Distribution],
    q: Mapping[int, Dense],
    coin: Sequence[float],
    forced: Mapping[int, bool] = NONE_FORCED,
) -> Judgement:
    """Walk from the root down, trying children in draw order.

    p: [n + 1] the target's distribution at the root and at each node; q: the drafter's at each parent of sampled
    nodes (ROOT for the first level); coin: [n] one for each node; forced: nodes whose outcome is given, not judged.
    """
    judgement = Judgement(left=p[0], kind=FinalKind.TARGET)
    node = ROOT
    while children := tree.children(node):
        accepted = _try_children(tree, children, p[node + 1], q.get(node), coin, forced, judgement)
        if accepted is None:
            judgement.kind = FinalKind.RECOVERED
            return judgement
        node = accepted
        judgement.path.append(node)
        judgement.left = p[node + 1]
        judgement.kind = FinalKind.BONUS
    return judgement


def _try_children(
    tree: DraftTree,
    children: list[int],
    p_i: Distribution,
    q_i: Dense | None,
    coin: Sequence[float],
    forced: Mapping[int, bool],
    judgement: Judgement,
) -> int | None:
    """Try siblings in draw order; the accepted one, or None with what is left of p in the judgement."""
    for child in children:
        token, drawn = int(tree.token[child]), tree.drawn[child]
        p_token = p_i.prob(token)
        if drawn == Drawn.DETERMINISTIC:
            q_token = 1.0
        else:
            assert q_i is not None, "a sampled node needs its drafter's distribution"
            q_token = q_i.prob(token)
        accept = min(1.0, p_token / q_token) if q_token > 0 else 0.0
        judgement.p_trial[child], judgement.q_trial[child] = p_token, q_token
        judgement.accept_prob[child] = accept
        if forced.get(child, coin[child] < accept):
            judgement.outcome[child] = Outcome.ACCEPTED
            return child
        judgement.outcome[child] = Outcome.REJECTED
        if drawn == Drawn.DETERMINISTIC:
            p_i, mass = book.without(p_i, token)
        else:
            assert q_i is not None
            p_i, mass = book.residual(p_i, q_i)
            if drawn == Drawn.WITHOUT_REPLACEMENT:
                q_i, _ = book.without(q_i, token)
        judgement.residual_mass[child] = mass
        judgement.left = p_i
    return None


def verify(
    tree: DraftTree,
    p: Sequence[Distribution],
    q: Mapping[int, Dense],
    coin: Doubles,
    forced: Mapping[int, bool] = NONE_FORCED,
    final: int | None = None,
) -> Verdict:
    """Judge a tree and draw the final token.

    p, q and forced as in `judge`; final: the final token, where it is forced; coin float64 [n + 1]: coin[0] draws the
    final token, coin[i + 1] is node i's, so that a node's coin does not depend on how many nodes follow it.
    """
    judgement = judge(tree, p, q, coin[1:].tolist(), forced)
    n = len(tree)
    was_forced = [node for node in forced if node in judgement.outcome] + ([n] if final is not None else [])
    final, margin = book.draw(judgement.left, float(coin[0])) if final is None else (final, 1.0)

    def spread(values: Mapping[int, float], dtype: type) -> NDArray[Any]:
        out: NDArray[Any] = np.zeros(n, dtype=dtype)
        for node, value in values.items():
            out[node] = value
        return out

    parent_p = [
        p[above + 1].prob(token) for above, token in zip(tree.parent.tolist(), tree.token.tolist(), strict=True)
    ]
    return Verdict(
        outcome=spread(judgement.outcome, np.uint8),
        p=np.asarray(parent_p, dtype=np.float32),
        p_trial=spread(judgement.p_trial, np.float32),
        q_trial=spread(judgement.q_trial, np.float32),
        accept_prob=spread(judgement.accept_prob, np.float64),
        coin=np.array(coin[1 : n + 1]),
        residual_mass=spread(judgement.residual_mass, np.float64),
        path=np.asarray(judgement.path, dtype=np.int32),
        token=final,
        kind=judgement.kind,
        final_p=judgement.left.prob(final),
        final_coin=float(coin[0]),
        final_margin=margin,
        forced=np.asarray(was_forced, dtype=np.int32),
    )
