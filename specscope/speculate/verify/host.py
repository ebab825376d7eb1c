"""Verification on the host: the rule as it is written, one tree after another, on the batch's tensors.

The rule at a node with target distribution p and children x_1..x_k in draw order, p_1 = p and q_1 = q
(SpecInfer, Miao et al. 2023, and Recursive Rejection Sampling, Jeon et al. 2024; for one child it is speculative
sampling, Leviathan et al. 2022):

    accept x_i when coin < min(1, p_i(x_i) / q_i(x_i)); else
    sampled:        p_{i+1} = norm(max(p_i - q_i, 0)); q_{i+1} = q_i, or q_i with x_i zeroed and renormalised
    deterministic:  q_i is a point mass at x_i: accept with p_i(x_i), else p_{i+1} = norm(p_i with x_i zeroed)

When all children are rejected the final token is drawn from what is left of p; below an accepted leaf, from p.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from specscope.kernels.flat_trees import ACCEPTED, DETERMINISTIC, NOBODY, REJECTED, UNTRIED, WITHOUT_REPLACEMENT
from specscope.speculate.draws import draw
from specscope.speculate.verify.evidence import BatchEvidence
from specscope.speculate.verify.inputs import VerifyBatch
from specscope.trace.records import Verdict
from specscope.trace.tree import Doubles


class DrafterRow:
    """What is left of q at a node while its children are tried."""

    def __init__(self, row: Tensor) -> None:
        self.row = row

    def without(self, token: int) -> DrafterRow:
        """The token zeroed and the rest renormalised; unchanged where nothing else has mass."""
        row = self.row.clone()
        row[token] = 0
        mass = float(row.sum())
        return DrafterRow(row.div_(mass)) if mass > 0 else self


@dataclass(frozen=True)
class Chosen:
    """A greedy target: all of p is at one token, and stays there."""

    token: int

    def prob(self, token: int) -> float:
        """1 at the token, 0 elsewhere."""
        return 1.0 if token == self.token else 0.0

    def reject(self, token: int, q: DrafterRow | None) -> tuple[Chosen, float]:
        """What is left, and the mass that it had before it was renormalised."""
        taken = self.prob(token) if q is None else float(q.row[self.token])
        return self, max(1.0 - taken, 0.0)

    def draw(self, coin: float) -> tuple[int, float, float]:
        """The token, whatever the coin; its probability, and the draw's margin."""
        return self.token, 1.0, 1.0


class Residual:
    """What is left of p [V] at a node while its children are tried. Its row is never changed in place."""

    def __init__(self, row: Tensor) -> None:
        self.row = row

    def prob(self, token: int) -> float:
        """Of a token, after renormalising."""
        return float(self.row[token])

    def reject(self, token: int, q: DrafterRow | None) -> tuple[Residual, float]:
        """What is left, and the mass that it had before it was renormalised; all of it where that would be nothing."""
        if q is None:
            left = self.row.clone()
            left[token] = 0
        else:
            left = (self.row - q.row).clamp_(min=0)
        mass = float(left.sum())
        return (Residual(left.div_(mass)) if mass > 0 else self), mass

    def draw(self, coin: float) -> tuple[int, float, float]:
        """The token at which the cumulative sum passes the coin, its probability, and the draw's margin."""
        return draw(self.row, coin)


def verify(batch: VerifyBatch) -> list[Verdict]:
    """A verdict for each tree: a pure function of the batch."""
    trees, found = batch.trees, BatchEvidence.empty(batch)
    found.p[:] = _p_of_nodes(batch)
    children, at_row = trees.children(), _targets(batch)
    for tree, root in enumerate(trees.root[:-1].tolist()):
        row, left = root, at_row[root]
        while children[row] and not found.recovered[tree]:
            accepted, left = _try(batch, row, children[row], left, found)
            found.recovered[tree] = accepted is None
            if accepted is not None:
                row, left = accepted, at_row[accepted]
        final = int(trees.final[tree])
        if final == NOBODY:
            found.final(tree, *left.draw(float(trees.coin[root])))
        else:
            found.final(tree, final, left.prob(final), 1.0)
    return found.verdicts(batch)


def _targets(batch: VerifyBatch) -> list[Chosen | Residual]:
    """[R] the target's distribution at each row."""
    choices, p = batch.target.choices.tolist(), batch.target.p.unbind()
    greedy = batch.by_row(batch.trees.greedy).tolist()
    return [
        Chosen(choices[behind]) if one_hot else Residual(p[behind])
        for behind, one_hot in zip(batch.trees.p_row.tolist(), greedy, strict=True)
    ]


def _p_of_nodes(batch: VerifyBatch) -> Doubles:
    """[R] the target's probability of each node's token, as its parent's row has it; 0 at roots."""
    trees, target, greedy = batch.trees, batch.target, batch.by_row(batch.trees.greedy)
    behind = trees.p_row[np.maximum(trees.parent, 0)]
    out = np.zeros(len(greedy))
    out[greedy] = target.choices.numpy()[behind[greedy]] == trees.token[greedy]
    out[~greedy] = target.p.numpy()[behind[~greedy], trees.token[~greedy]]
    out[trees.parent == NOBODY] = 0
    return out


def _try(
    batch: VerifyBatch, row: int, children: list[int], p: Chosen | Residual, found: BatchEvidence
) -> tuple[int | None, Chosen | Residual]:
    """Try siblings in draw order: the accepted one, or None with what is left of p."""
    trees, q = batch.trees, _drafter_row(batch, row, children)
    for child in children:
        token, forced = int(trees.token[child]), trees.forced[child]
        p_token, q_token = p.prob(token), 1.0 if q is None else float(q.row[token])
        accept = min(1.0, p_token / q_token) if q_token > 0 else 0.0
        accepted = trees.coin[child] < accept if forced == UNTRIED else forced == ACCEPTED
        found.trial(child, ACCEPTED if accepted else REJECTED, p_token, q_token, accept)
        if accepted:
            return child, p
        p, q, found.residual_mass[child] = _reject(batch, child, p, q, last=child == children[-1])
    return None, p


def residual(batch: VerifyBatch, row: int) -> Tensor:
    """[V] what the final token of a sampled request was drawn from after all children of a row were rejected."""
    children = batch.trees.children()[row]
    left: Chosen | Residual = Residual(batch.target.p[int(batch.trees.p_row[row])])
    q = _drafter_row(batch, row, children)
    for child in children:
        left, q, _ = _reject(batch, child, left, q, last=child == children[-1])
    assert isinstance(left, Residual)
    return left.row


def _drafter_row(batch: VerifyBatch, row: int, children: Sequence[int]) -> DrafterRow | None:
    """What the children of a row were drawn from; None where they are deterministic."""
    trees = batch.trees
    return None if trees.drawn[children[0]] == DETERMINISTIC else DrafterRow(batch.q[trees.q_row[row]])


def _reject(
    batch: VerifyBatch, child: int, p: Chosen | Residual, q: DrafterRow | None, *, last: bool
) -> tuple[Chosen | Residual, DrafterRow | None, float]:
    """What is left of p and of q after a rejection, and the residual's mass before it was renormalised."""
    token = int(batch.trees.token[child])
    p, mass = p.reject(token, q)
    if q is not None and batch.trees.drawn[child] == WITHOUT_REPLACEMENT and not last:
        q = q.without(token)
    return p, q, mass
