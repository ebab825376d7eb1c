"""Traversal verification: from the leaves to the root, so that a later coin can accept past a failing one.

Weng et al. 2025 (arXiv 2505.12398), Algorithm 1, for trees; on a chain it is block verification (Sun et al. 2024, arXiv
2403.10444, Algorithm 2). Each node has the ratio r of its path; the root's is 1. With p_i and q_i what is left of p and
q at a parent when its child x_i comes up, and r_i what is left of the parent's ratio:

    r(x_i) = min(1, r_i p_i(x_i) / q_i(x_i))
    everything below x_i comes first; if nothing there is accepted, x_i is, when coin < what is then left of its ratio
    else S = sum(max(r_i p_i - q_i, 0)); p_{i+1} = max(r_i p_i - q_i, 0) / S; r_{i+1} = S / (S + 1 - r_i)

q_i changes as under the standard rule, and is a point mass at x_i where the draft is deterministic. A node that is
accepted takes its whole path along. The root always is; the final token is drawn from what is left of p at the node
that was accepted. A path of ratio 0 cannot be accepted: its end is rejected, and nothing below it is tried.
"""

from __future__ import annotations

from dataclasses import dataclass

from specscope.kernels.tree_batch import ACCEPTED, NOBODY, REJECTED, UNTRIED, WITHOUT_REPLACEMENT
from specscope.speculate.verify.batch import BatchEvidence, VerifyBatch, drafter_row, target_left
from specscope.speculate.verify.distribution import Left, rejected
from specscope.trace.record.records import Verdict
from specscope.trace.record.rules import TRAVERSAL


def verify(batch: VerifyBatch, rule: str = TRAVERSAL) -> tuple[list[Verdict], list[Left]]:
    """A verdict for each tree, and what its final token was drawn from: a pure function of the batch.

    `rule`: block, where all trees are chains, or traversal.
    """
    trees, evidence = batch.trees, BatchEvidence.empty(batch, rule)
    walk = _Walk(batch, evidence, trees.children(), target_left(batch))
    drawn_from = []
    for tree, root in enumerate(trees.root[:-1].tolist()):
        row, left = walk.below(root, 1.0, root=True) or (root, walk.at_row[root])
        evidence.recovered[tree] = bool(walk.children[row])
        while trees.parent[row] != NOBODY:  # the whole path
            evidence.outcome[row], row = ACCEPTED, int(trees.parent[row])
        evidence.draw_final(batch, tree, left)
        drawn_from.append(left)
    return evidence.verdicts(batch), drawn_from


@dataclass
class _Walk:
    """The walk through the trees of a batch."""

    batch: VerifyBatch
    found: BatchEvidence
    children: list[list[int]]
    at_row: list[Left]

    def below(self, row: int, ratio: float, *, root: bool = False) -> tuple[int, Left] | None:
        """(The row that is accepted here or below, what is left of p there); None where none is.

        `ratio`: of the path down to the row.
        """
        trees, evidence, left = self.batch.trees, self.found, self.at_row[row]
        children = self.children[row]
        q = drafter_row(self.batch, row, children) if children else None
        for child in children:
            token, forced = int(trees.token[child]), trees.forced[child]
            p_token, q_token = left.prob(token), 1.0 if q is None else float(q[token])
            own_ratio = min(1.0, ratio * p_token / q_token) if q_token > 0 else 0.0
            evidence.trial(child, REJECTED, p_token, q_token, own_ratio)
            if forced == ACCEPTED:  # as if it were the root
                return self.below(child, 1.0, root=True)
            if own_ratio > 0 and forced == UNTRIED and (accepted := self.below(child, own_ratio)) is not None:
                return accepted
            gone = trees.drawn[child] == WITHOUT_REPLACEMENT and child != children[-1]
            left, q, mass = rejected(left, q, token, gone=gone, scale=ratio)
            evidence.residual_mass[child] = mass
            ratio = mass / (mass + (1 - ratio)) if mass > 0 else float(ratio == 1)
        if root:
            return row, left
        evidence.accept_prob[row] = ratio
        return (row, left) if trees.coin[row] < ratio else None
