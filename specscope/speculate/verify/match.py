"""Token matching: one token is drawn from the target at each node, and the walk goes on while a child is that token.

Lossless whatever the drafts are, since every token is the target's own draw; q plays no part. A child x_i is the token
with p_i(x_i), the target's probability of it once its elder siblings are not: the same chance that the standard rule
gives deterministic siblings. A token that is no child is likewise a draw from what the children leave of p.

The children of a node have one coin, the first one's, which draws a recovered token too; a bonus token has the final
coin.
"""

from __future__ import annotations

from specscope.kernels.tree_batch import ACCEPTED, NOBODY, REJECTED, UNTRIED
from specscope.speculate.verify.batch import BatchEvidence, VerifyBatch, target_left
from specscope.speculate.verify.distribution import Left
from specscope.trace.record.records import Verdict
from specscope.trace.record.rules import MATCH


def verify(batch: VerifyBatch) -> tuple[list[Verdict], list[Left]]:
    """A verdict for each tree, and what its final token was drawn from: a pure function of the batch."""
    trees, evidence = batch.trees, BatchEvidence.empty(batch, MATCH)
    children, at_row = trees.children(), target_left(batch)
    drawn_from = []
    for tree, root in enumerate(trees.root[:-1].tolist()):
        row, left, least, final = root, at_row[root], 1.0, int(trees.final[tree])
        while children[row]:
            accepted, left, token, margin = _draw(batch, children[row], left, evidence)
            least = min(least, margin)
            if accepted is None:
                evidence.recovered[tree], evidence.coin[root] = True, trees.coin[children[row][0]]
                break
            row, left = accepted, at_row[accepted]
        else:
            token, _, margin = left.draw(float(trees.coin[root]))
            least = min(least, margin)
        token = token if final == NOBODY else final
        evidence.final(tree, token, left.prob(token), least)
        drawn_from.append(left)
    return evidence.verdicts(batch), drawn_from


def _draw(
    batch: VerifyBatch, children: list[int], p: Left, evidence: BatchEvidence
) -> tuple[int | None, Left, int, float]:
    """(The child that is the target's token, or None; what its elder siblings left of p; the token; the margin).

    p: the target's distribution at the parent.
    """
    trees, coin, left = batch.trees, float(batch.trees.coin[children[0]]), p
    token, _, margin = p.draw(coin)
    for child in children:
        child_token, forced, chance = int(trees.token[child]), trees.forced[child], left.prob(int(trees.token[child]))
        accepted = token == child_token if forced == UNTRIED else forced == ACCEPTED
        evidence.trial(child, ACCEPTED if accepted else REJECTED, chance, 1.0, chance)
        evidence.coin[child] = coin
        if accepted:
            return child, left, child_token, margin
        left, evidence.residual_mass[child] = left.reject(child_token, None)
        if token == child_token:  # it was forced rejected: another token is drawn with the same coin
            token, _, margin = left.draw(coin)
    return None, left, token, margin
