"""Faults in how drafts are tried, and in what the final token is drawn from."""

from __future__ import annotations

import dataclasses
from itertools import count

import numpy as np

from specscope.analyze.diagnose.causes import Cause
from specscope.kernels.flat_trees import ACCEPTED, REJECTED
from specscope.speculate.verify import host, verifier
from tests.faults.fault import Fault, finished, replaced
from tests.faults.planted.sampler import VERDICTS, of_one_seed, tried


@replaced(verifier, "step_batch")
def next_row_of_q(step_batch, *parts):
    """Each node's drafts are judged with the q of the next row in the batch."""
    batch = step_batch(*parts)
    return dataclasses.replace(batch, q=[*batch.q[1:], *batch.q[:1]])


@replaced(host.DrafterRow, "without")
def not_divided(without, self, token):
    """A sibling that was tried is zeroed in q, and the rest is left as it is."""
    row = self.row.clone()
    row[token] = 0
    return host.DrafterRow(row)


def bonus_of_the_root(patch, engine):
    """The bonus token is drawn from the root's p, whatever was accepted."""
    rows, now = [], []

    def remembered(targets, batch):
        rows[:] = targets(batch)
        return rows

    def kept(verify, batch):
        now[:] = [batch]
        return verify(batch)

    def from_root(draw_final, self, tree, token, prob, margin):
        if not self.recovered[tree]:
            root = int(now[0].trees.root[tree])
            token, prob, margin = rows[root].draw(float(now[0].trees.coin[root]))
        draw_final(self, tree, token, prob, margin)

    replaced(host, "target_rows")(remembered)(patch, engine)
    replaced(host.BatchEvidence, "final")(from_root)(patch, engine)
    replaced(host, "verify")(kept)(patch, engine)


def now_and_then_another(patch, engine):
    """Every 13th final token is the next one in the vocabulary."""
    calls = count(1)

    def final(right, self, tree, token, prob, margin):
        right(self, tree, token + 1 if next(calls) % 13 == 0 else token, prob, margin)

    replaced(host.BatchEvidence, "final")(final)(patch, engine)


def youngest_swapped(draft, places):
    """The tokens of each parent's last two children change places; their q stay."""
    token = draft.tree.token.copy()
    for parent in range(-1, len(token)):
        children = draft.tree.children(parent)
        if len(children) > 1:
            token[children[-2:]] = token[children[-2:][::-1]]
    return dataclasses.replace(draft, tree=dataclasses.replace(draft.tree, token=token)), places


def q_again(whole, p, q):
    """The final token is drawn from what is left of q."""
    return p if q is None else host.Residual(q.row)


@replaced(verifier, "step_batch")
def parents_of_parents(step_batch, *parts):
    """A node is judged by the row above its parent's."""
    batch = step_batch(*parts)
    trees = batch.trees
    row = np.where(trees.parent >= 0, trees.p_row[np.maximum(trees.parent, 0)], trees.p_row)
    return dataclasses.replace(batch, trees=dataclasses.replace(trees, p_row=row))


@replaced(host, "_try")
def decided_by_the_root(right, batch, row, children, p, found):
    """p and q are recorded right; the coin is held against the root's p of the same token."""
    trees, q = batch.trees, host.drafter_row(batch, row, children)
    root = next(root for root, end in zip(trees.root, trees.root[1:], strict=False) if root <= row < end)
    above = host.target_rows(batch)[int(root)]
    for child in children:
        token = int(trees.token[child])
        p_token, q_token = p.prob(token), 1.0 if q is None else float(q.row[token])
        ratio = min(1.0, p_token / q_token) if q_token > 0 else 0.0
        other = min(1.0, above.prob(token) / q_token) if q_token > 0 else 0.0
        accepted = trees.coin[child] < other
        found.trial(child, ACCEPTED if accepted else REJECTED, p_token, q_token, ratio)
        if accepted:
            return child, p
        p, q, found.residual_mass[child] = host._reject(batch, child, p, q, last=child == children[-1])
    return None, p


WARM_TREE, CHAIN = "early tree warm", "model chain"
FAULTS = [
    Fault("q of the next row", Cause.Q_OTHER_ROW, next_row_of_q, "early chain warm"),
    Fault("q not divided", Cause.RESIDUAL, not_divided, WARM_TREE),
    Fault("coin against q", Cause.RATIO_TEST, tried(accept=lambda coin, ratio, q: coin <= q), WARM_TREE),
    Fault("accepted by majority", Cause.RATIO_TEST, tried(accept=lambda coin, ratio, q: ratio > 0.5), WARM_TREE),
    Fault("siblings backwards", Cause.TRIAL_ORDER, tried(order=lambda children: children[::-1]), WARM_TREE),
    Fault("first sibling only", Cause.TRIAL_ORDER, tried(order=lambda children: children[:1]), "model tree"),
    Fault("final from q", Cause.FINAL_NOT_RESIDUAL, tried(final=q_again), WARM_TREE),
    Fault("bonus of the root", Cause.FINAL_OTHER_NODE, bonus_of_the_root, CHAIN),
    Fault("bonus of the root, sampled", Cause.FINAL_OTHER_NODE, bonus_of_the_root, "model tree warm"),
    Fault("another token now and then", Cause.FINAL_OTHER_NODE, now_and_then_another, CHAIN, rare=10),
    Fault("siblings swapped", Cause.SIBLINGS_CHANGED, finished(youngest_swapped), WARM_TREE),
    Fault("one seed for all", Cause.COINS, VERDICTS(of_one_seed), WARM_TREE),
    Fault("decided by the root", Cause.P_NOT_USED, decided_by_the_root, "model chain warm", rare=6),
    Fault("p of the grandparent", Cause.P_OTHER_ROW, parents_of_parents, "model chain warm"),
    Fault("p of the grandparent, greedy", Cause.P_OTHER_ROW, parents_of_parents, "model tree"),
]
