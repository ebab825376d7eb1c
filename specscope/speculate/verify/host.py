"""Verification on the host: the rule as it is written, one tree after another, on the batch's tensors.

The rule at a node with target distribution p and children x_1..x_k in draw order, p_1 = p and q_1 = q
(SpecInfer, Miao et al. 2023, and Recursive Rejection Sampling, Jeon et al. 2024; for one child it is speculative
sampling, Leviathan et al. 2022):

    accept x_i when coin < min(1, p_i(x_i) / q_i(x_i)); else
    sampled:        p_{i+1} = norm(max(p_i - q_i, 0)); q_{i+1} = q_i, or q_i with x_i zeroed and renormalised
    deterministic:  q_i is a point mass at x_i: accept with p_i(x_i), else p_{i+1} = norm(p_i with x_i zeroed)

When all children are rejected the final token is drawn from what is left of p; below an accepted leaf, from p.
A rule of somebody's own gives another probability in place of min(1, p_i(x_i) / q_i(x_i)); all else is the same.
"""

from __future__ import annotations

from torch import Tensor

from specscope.kernels.tree_batch import ACCEPTED, REJECTED, UNTRIED, WITHOUT_REPLACEMENT
from specscope.speculate.verify.batch import BatchEvidence, VerifyBatch, drafter_row, target_left
from specscope.speculate.verify.distribution import Left, Residual, rejected
from specscope.trace.record.own_rule import OwnRule, Siblings
from specscope.trace.record.records import Verdict
from specscope.trace.record.rules import STANDARD


def verify(batch: VerifyBatch, own: OwnRule | None = None) -> tuple[list[Verdict], list[Left]]:
    """A verdict for each tree, and what its final token was drawn from: a pure function of the batch."""
    trees, evidence = batch.trees, BatchEvidence.empty(batch, STANDARD if own is None else own.name)
    children, at_row, drawn_from = trees.children(), target_left(batch), []
    for tree, root in enumerate(trees.root[:-1].tolist()):
        row, left, depth = root, at_row[root], 1
        while children[row] and not evidence.recovered[tree]:
            asked = None if own is None else Siblings(own, depth, *left.figures())
            accepted, left = _try(batch, row, children[row], left, evidence, asked)
            evidence.recovered[tree] = accepted is None
            if accepted is not None:
                row, left, depth = accepted, at_row[accepted], depth + 1
        evidence.draw_final(batch, tree, left)
        drawn_from.append(left)
    return evidence.verdicts(batch), drawn_from


def _try(
    batch: VerifyBatch, row: int, children: list[int], p: Left, evidence: BatchEvidence, asked: Siblings | None
) -> tuple[int | None, Left]:
    """Try siblings in draw order: the accepted one, or None with what is left of p. `asked`: of somebody's own rule."""
    trees, q = batch.trees, drafter_row(batch, row, children)
    for child in children:
        token, forced = int(trees.token[child]), trees.forced[child]
        p_token, q_token = p.prob(token), 1.0 if q is None else float(q[token])
        accept = min(1.0, p_token / q_token) if q_token > 0 else 0.0
        if asked is not None:
            accept = asked.accept(token, p_token, q_token, float(trees.coin[child]))
        accepted = trees.coin[child] < accept if forced == UNTRIED else forced == ACCEPTED
        evidence.trial(child, ACCEPTED if accepted else REJECTED, p_token, q_token, accept)
        if accepted:
            return child, p
        p, q, evidence.residual_mass[child] = _reject(batch, child, p, q, last=child == children[-1])
    return None, p


def residual(batch: VerifyBatch, row: int) -> Tensor:
    """[V] what the final token of a sampled request was drawn from after all children of a row were rejected."""
    children = batch.trees.children()[row]
    left: Left = Residual(batch.target.p[int(batch.trees.p_row[row])])
    q = drafter_row(batch, row, children)
    for child in children:
        left, q, _ = _reject(batch, child, left, q, last=child == children[-1])
    assert isinstance(left, Residual)
    return left.row


def _reject(
    batch: VerifyBatch, child: int, p: Left, q: Tensor | None, *, last: bool
) -> tuple[Left, Tensor | None, float]:
    """What is left of p and of q after a rejection, and the residual's mass before it was renormalised."""
    gone = batch.trees.drawn[child] == WITHOUT_REPLACEMENT and not last
    return rejected(p, q, int(batch.trees.token[child]), gone=gone)
