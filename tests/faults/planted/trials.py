"""Faults in how drafts are tried, and in what the final token is drawn from."""

from __future__ import annotations

import dataclasses

import numpy as np

from specscope.analyze.diagnose.causes import Cause
from specscope.kernels.flat_trees import ACCEPTED, DETERMINISTIC, REJECTED, WITHOUT_REPLACEMENT
from specscope.speculate.drafters.tree_builder import StaticTreeBuilder
from specscope.speculate.verify import host, inputs, verifier
from specscope.trace.record.coins import coins
from tests.faults.fault import Fault


def tried(accept=None, order=None, final=None):
    """host._try with another test, another order of siblings, or another distribution of the final token."""

    def attempt(batch, row, children, p, found):
        trees = batch.trees
        q = None if trees.drawn[children[0]] == DETERMINISTIC else host.DrafterRow(batch.q[trees.q_row[row]])
        chosen = children if order is None else order(children)
        for child in chosen:
            token = int(trees.token[child])
            p_token, q_token = p.prob(token), 1.0 if q is None else float(q.row[token])
            ratio = min(1.0, p_token / q_token) if q_token > 0 else 0.0
            coin = trees.coin[child]
            accepted = coin < ratio if accept is None else accept(coin, ratio, q_token)
            found.trial(child, ACCEPTED if accepted else REJECTED, p_token, q_token, ratio)
            if accepted:
                return child, p
            p, found.residual_mass[child] = p.reject(token, q)
            if q is not None and trees.drawn[child] == WITHOUT_REPLACEMENT and child != chosen[-1]:
                q = q.without(token)
        return None, p if final is None or q is None else final(q)

    return lambda patch, engine: patch.setattr(host, "_try", attempt)


def next_row_of_q(patch, engine):
    """Each node's drafts are judged with the q of the next row in the batch."""
    step_batch = verifier.step_batch

    def shifted(*parts):
        batch = step_batch(*parts)
        return dataclasses.replace(batch, q=[*batch.q[1:], *batch.q[:1]])

    patch.setattr(verifier, "step_batch", shifted)


def not_divided(patch, engine):
    """A sibling that was tried is zeroed in q, and the rest is left as it is."""

    def without(self, token):
        row = self.row.clone()
        row[token] = 0
        return host.DrafterRow(row)

    patch.setattr(host.DrafterRow, "without", without)


def bonus_of_the_root(patch, engine):
    """The bonus token is drawn from the root's p, whatever was accepted."""
    targets, draw_final = host.target_rows, host.BatchEvidence.final
    rows = []

    def remembered(batch):
        rows[:] = targets(batch)
        return rows

    def from_root(self, tree, token, prob, margin):
        if not self.recovered[tree]:
            batch = now[0]
            root = int(batch.trees.root[tree])
            token, prob, margin = rows[root].draw(float(batch.trees.coin[root]))
        draw_final(self, tree, token, prob, margin)

    now, verify = [None], host.verify

    def kept(batch):
        now[0] = batch
        return verify(batch)

    patch.setattr(host, "target_rows", remembered)
    patch.setattr(host.BatchEvidence, "final", from_root)
    patch.setattr(host, "verify", kept)


def now_and_then_another(patch, engine):
    """Every 13th final token is the next one in the vocabulary."""
    right, count = host.BatchEvidence.final, [0]

    def final(self, tree, token, prob, margin):
        count[0] += 1
        right(self, tree, token + 1 if count[0] % 13 == 0 else token, prob, margin)

    patch.setattr(host.BatchEvidence, "final", final)


def youngest_swapped(patch, engine):
    """The tokens of each parent's last two children change places; their q stay."""
    finish = StaticTreeBuilder.finish

    def swapped(self):
        draft, places = finish(self)
        token = draft.tree.token.copy()
        for parent in range(-1, len(token)):
            children = draft.tree.children(parent)
            if len(children) > 1:
                token[children[-2:]] = token[children[-2:][::-1]]
        return dataclasses.replace(draft, tree=dataclasses.replace(draft.tree, token=token)), places

    patch.setattr(StaticTreeBuilder, "finish", swapped)


def one_seed(patch, engine):
    """All requests' coins are those of seed 0."""
    patch.setattr(inputs, "coins", lambda seed, stream, position, count: coins(0, stream, position, count))


def parents_of_parents(patch, engine):
    """A node is judged by the row above its parent's."""
    step_batch = verifier.step_batch

    def above(*parts):
        batch = step_batch(*parts)
        trees = batch.trees
        row = np.where(trees.parent >= 0, trees.p_row[np.maximum(trees.parent, 0)], trees.p_row)
        return dataclasses.replace(batch, trees=dataclasses.replace(trees, p_row=row))

    patch.setattr(verifier, "step_batch", above)


def decided_by_the_root(patch, engine):
    """p and q are recorded right; the coin is held against the root's p of the same token."""

    def attempt(batch, row, children, p, found):
        trees = batch.trees
        q = host.drafter_row(batch, row, children)
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

    patch.setattr(host, "_try", attempt)


WARM_TREE, CHAIN = "early tree warm", "model chain"
FAULTS = [
    Fault("q of the next row", Cause.Q_OTHER_ROW, next_row_of_q, "early chain warm", "the q of the batch's next row"),
    Fault("q not divided", Cause.RESIDUAL, not_divided, WARM_TREE, "what is left of q is not renormalised"),
    Fault(
        "coin against q",
        Cause.RATIO_TEST,
        tried(accept=lambda coin, ratio, q: coin <= q),
        WARM_TREE,
        "accepted where the coin is at most q",
    ),
    Fault(
        "accepted by majority",
        Cause.RATIO_TEST,
        tried(accept=lambda coin, ratio, q: ratio > 0.5),
        WARM_TREE,
        "accepted where p / q is above 1/2, whatever the coin",
    ),
    Fault(
        "siblings backwards",
        Cause.TRIAL_ORDER,
        tried(order=lambda children: children[::-1]),
        WARM_TREE,
        "the last sibling is tried first",
    ),
    Fault(
        "first sibling only",
        Cause.TRIAL_ORDER,
        tried(order=lambda children: children[:1]),
        "model tree",
        "younger siblings are never tried",
    ),
    Fault(
        "final from q",
        Cause.FINAL_NOT_RESIDUAL,
        tried(final=lambda q: host.Residual(q.row)),
        WARM_TREE,
        "after a rejection the final token is drawn from q",
    ),
    Fault("bonus of the root", Cause.FINAL_OTHER_NODE, bonus_of_the_root, CHAIN, "the bonus is drawn at the root"),
    Fault(
        "bonus of the root, sampled", Cause.FINAL_OTHER_NODE, bonus_of_the_root, "model tree warm", "the same, sampled"
    ),
    Fault(
        "another token now and then",
        Cause.FINAL_OTHER_NODE,
        now_and_then_another,
        CHAIN,
        "every 13th final token is another",
        rare=10,
    ),
    Fault(
        "siblings swapped", Cause.SIBLINGS_CHANGED, youngest_swapped, WARM_TREE, "two siblings' tokens change places"
    ),
    Fault("one seed for all", Cause.COINS, one_seed, WARM_TREE, "every request's coins are those of seed 0"),
    Fault(
        "decided by the root",
        Cause.P_NOT_USED,
        decided_by_the_root,
        "model chain warm",
        "p, q and coin are right, and the root's p decides",
        6,
    ),
    Fault(
        "p of the grandparent",
        Cause.P_OTHER_ROW,
        parents_of_parents,
        "model chain warm",
        "nodes are judged one row too high",
    ),
    Fault("p of the grandparent, greedy", Cause.P_OTHER_ROW, parents_of_parents, "model tree", "the same, greedy"),
]
