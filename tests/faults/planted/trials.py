"""Faults in how drafts are tried, in what the final token is drawn from, and in the coins of both."""

import dataclasses
from itertools import count

import numpy as np

from specscope.analyze.diagnose.causes import Cause
from specscope.kernels.tree_batch import ACCEPTED, DETERMINISTIC, REJECTED, WITHOUT_REPLACEMENT
from specscope.speculate.drafters import tree_builder
from specscope.speculate.sampling import all_probabilities
from specscope.speculate.verify import batch as inputs
from specscope.speculate.verify import distribution, host, verifier
from specscope.speculate.verify.batch import BatchEvidence
from specscope.speculate.verify.distribution import Draw
from specscope.trace.record.coins import Stream
from tests.faults.fault import Fault, finished, replaced


def tried(ratio=None, accept=None, order=None, reject=None, final=None):
    """host._try with a part of it replaced: the acceptance probability, the test, the order of siblings, what a
    rejection leaves, or what the final token is drawn from."""

    def attempt(right, batch, row, children, p, found, _):
        trees, whole, chosen = batch.trees, p, children if order is None else order(children)
        q = None if trees.drawn[children[0]] == DETERMINISTIC else batch.q[trees.q_row[row]]
        for child in chosen:
            token, coin = int(trees.token[child]), trees.coin[child]
            p_token, q_token = p.prob(token), 1.0 if q is None else float(q[token])
            a = min(1.0, p_token / q_token) if q_token > 0 else 0.0
            a = a if ratio is None else ratio(p_token)
            accepted = coin < a if accept is None else accept(coin, a, q_token)
            found.trial(child, ACCEPTED if accepted else REJECTED, p_token, q_token, a)
            if accepted:
                return child, p
            p, found.residual_mass[child] = (reject or type(p).reject)(p, token, q)
            if q is not None and trees.drawn[child] == WITHOUT_REPLACEMENT and child != chosen[-1]:
                q = distribution.without(q, token)
        return None, p if final is None else final(whole, p, q)

    return replaced(host, "_try")(attempt)


def as_it_is(p, token, q):
    """max(p - q, 0), and not divided by its mass."""
    left = (p.row - q).clamp_(min=0)
    mass = float(left.sum())
    return (host.Residual(left) if mass > 0 else p), mass


def only_zeroed(p, token, q):
    """p without the draft, as if that had not been drawn."""
    left = p.row.clone()
    left[token] = 0
    mass = float(left.sum())
    return (host.Residual(left / mass) if mass > 0 else p), mass


def unchanged(p, token, q):
    """p again: nothing is subtracted."""
    return p, 1.0


def noise(seed: int, position: int, node: int, size: int) -> np.ndarray:
    """Exponential noise of one node: the token of largest probability over noise is a fair draw."""
    generator = np.random.Philox(key=[seed, 47386], counter=[0, position, node + 1, 0])
    return np.random.Generator(generator).exponential(size=size)


def noise_again(patch, engine):
    """vLLM 47386: the draft is drawn with exponential noise, and after its rejection the residual with the same."""
    contexts: list = []

    def remember(step_batch, parts, *rest):
        contexts[:] = [context for context, _, _ in parts]
        return step_batch(parts, *rest)

    def draft(grow, level, growing):
        for tree, rows in growing:
            q, drawn = all_probabilities([tree.rows(level, rows)]), []
            for node, row in zip(tree.frontier, q, strict=True):
                own = noise(tree.context.params.seed, tree.context.position, node, len(row))
                token = int(np.argmax(row.numpy() / own))
                drawn.append([Draw(token, float(row[token]), 1.0, 0.0, 0.0)])
            tree.take(q.unbind(), drawn)

    def final(draw_final, self, batch, tree, left):
        draw_final(self, batch, tree, left)
        if self.recovered[tree]:
            root, end = batch.trees.root[tree : tree + 2]
            path = np.flatnonzero(self.outcome[root + 1 : end] == ACCEPTED).tolist()
            context, rest = contexts[tree], left.row.numpy()
            own = noise(context.params.seed, context.position, path[-1] if path else -1, len(rest))
            token = int(np.argmax(rest / own))
            self.final(tree, token, float(rest[token]), 1.0)

    replaced(verifier, "step_batch")(remember)(patch, engine)
    replaced(tree_builder, "grow_sampled")(draft)(patch, engine)
    replaced(BatchEvidence, "draw_final")(final)(patch, engine)


@replaced(host, "verify")
def coin_again(right, batch, own):
    """The coin that rejected a draft also draws the final token."""
    trees = batch.trees
    for tree, root in enumerate(trees.root[:-1].tolist()):
        if trees.root[tree + 1] > root + 1:
            trees.coin[root] = trees.coin[root + 1]
    return right(batch, own)


VERDICTS, DRAFTS = (replaced(user, "coins") for user in (inputs, tree_builder))  # whose coins are changed


def one_for_all_nodes(coins, seed, stream, position, count):
    """Every node gets the first node's coin."""
    own = coins(seed, stream, position, max(count, 2))[:count].copy()
    own[2:] = own[1:2]
    return own


def by_row(patch, engine):
    """The key of a coin is the request's row in the batch, not its seed."""
    row = [0]

    def begin(step_batch, *given):
        row[0] = 0
        return step_batch(*given)

    def keyed(coins, seed, stream, position, count):
        row[0] += 1
        return coins(row[0] - 1, stream, position, count)

    replaced(verifier, "step_batch")(begin)(patch, engine)
    replaced(inputs, "coins")(keyed)(patch, engine)


def of_no_step(coins, seed, stream, position, count):
    """All steps have the first one's coins."""
    return coins(seed, stream, 0, count)


def of_one_seed(coins, seed, stream, position, count):
    """All requests' coins are those of seed 0."""
    return coins(0, stream, position, count)


def one_for_all_draws(coins, seed, stream, position, count):
    """All draws of a step have one coin."""
    return np.full(count, coins(seed, stream, position, 1)[0])


def of_the_verdict(coins, seed, stream, position, count):
    """Drafts are drawn with the coins that judge them."""
    return coins(seed, Stream.VERIFY, position, count)


@replaced(verifier, "step_batch")
def next_row_of_q(step_batch, *parts):
    """Each node's drafts are judged with the q of the next row in the batch."""
    batch = step_batch(*parts)
    return dataclasses.replace(batch, q=[*batch.q[1:], *batch.q[:1]])


@replaced(distribution, "without")
def not_divided(without, q, token):
    """A sibling that was tried is zeroed in q, and the rest is left as it is."""
    row = q.clone()
    row[token] = 0
    return row


@replaced(BatchEvidence, "draw_final")
def bonus_of_the_root(draw_final, self, batch, tree, left):
    """The bonus token is drawn from the root's p, whatever was accepted."""
    root = int(batch.trees.root[tree])
    draw_final(self, batch, tree, left if self.recovered[tree] else host.target_left(batch)[root])


def now_and_then_another(patch, engine):
    """Every 13th final token is the next one in the vocabulary."""
    calls = count(1)

    def final(right, self, tree, token, prob, margin):
        right(self, tree, token + 1 if next(calls) % 13 == 0 else token, prob, margin)

    replaced(BatchEvidence, "final")(final)(patch, engine)


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
    return p if q is None else host.Residual(q)


@replaced(verifier, "step_batch")
def parents_of_parents(step_batch, *parts):
    """A node is judged by the row above its parent's."""
    batch = step_batch(*parts)
    trees = batch.trees
    row = np.where(trees.parent >= 0, trees.p_row[np.maximum(trees.parent, 0)], trees.p_row)
    return dataclasses.replace(batch, trees=dataclasses.replace(trees, p_row=row))


@replaced(host, "_try")
def decided_by_the_root(right, batch, row, children, p, found, _):
    """p and q are recorded right; the coin is held against the root's p of the same token."""
    trees, q = batch.trees, host.drafter_row(batch, row, children)
    root = next(root for root, end in zip(trees.root, trees.root[1:], strict=False) if root <= row < end)
    above = host.target_left(batch)[int(root)]
    for child in children:
        token = int(trees.token[child])
        p_token, q_token = p.prob(token), 1.0 if q is None else float(q[token])
        ratio = min(1.0, p_token / q_token) if q_token > 0 else 0.0
        other = min(1.0, above.prob(token) / q_token) if q_token > 0 else 0.0
        accepted = trees.coin[child] < other
        found.trial(child, ACCEPTED if accepted else REJECTED, p_token, q_token, ratio)
        if accepted:
            return child, p
        p, q, found.residual_mass[child] = host._reject(batch, child, p, q, last=child == children[-1])
    return None, p


@replaced(BatchEvidence, "draw_final")
def likeliest_left(draw_final, self, batch, tree, left):
    """After a rejection the final token is the residual's likeliest, whatever its coin."""
    draw_final(self, batch, tree, left)
    if self.recovered[tree]:
        token = int(left.row.argmax())
        self.final(tree, token, left.prob(token), 1.0)


p_again = tried(final=lambda whole, p, q: whole)
TREE, CHAIN, HOT = "early tree warm", "early chain warm", "early chain hot"
FAULTS = [
    Fault("residual only zeroed", Cause.RESIDUAL_NOT_RENORMALISED, tried(reject=only_zeroed), CHAIN, rare=60),
    Fault("residual as it is", Cause.RESIDUAL_NOT_RENORMALISED, tried(reject=as_it_is), TREE),
    Fault("nothing subtracted", Cause.RESIDUAL_NOT_RENORMALISED, tried(reject=unchanged), TREE),
    Fault("final from p", Cause.FINAL_NOT_RESIDUAL, p_again, TREE),
    Fault("final from p, lookup", Cause.FINAL_NOT_RESIDUAL, p_again, "ngram tree warm"),
    Fault("accepted by p", Cause.RATIO_TEST, tried(ratio=lambda p: p), CHAIN),
    Fault("noise again", Cause.COINS, noise_again, HOT, rare=0),
    Fault("final is the likeliest", Cause.FINAL_NOT_RESIDUAL, likeliest_left, TREE, rare=0),
    Fault("coin again", Cause.COINS, coin_again, HOT),
    Fault("one coin for all nodes", Cause.COINS, VERDICTS(one_for_all_nodes), TREE),
    Fault("one coin for all steps", Cause.COINS, VERDICTS(of_no_step), CHAIN),
    Fault("draft coins of no step", Cause.COINS, DRAFTS(of_no_step), TREE),
    Fault("draft coins of one seed", Cause.COINS, DRAFTS(of_one_seed), CHAIN),
    Fault("one coin for all draws", Cause.COINS, DRAFTS(one_for_all_draws), TREE),
    Fault("draft coins of the verdict", Cause.COINS, DRAFTS(of_the_verdict), CHAIN),
    Fault("coins by row", Cause.COINS, by_row, TREE, rare=10),
    Fault("q of the next row", Cause.Q_OTHER_ROW, next_row_of_q, "early chain warm"),
    Fault("q not divided", Cause.RESIDUAL_NOT_RENORMALISED, not_divided, TREE),
    Fault("coin against q", Cause.RATIO_TEST, tried(accept=lambda coin, ratio, q: coin <= q), TREE),
    Fault("accepted by majority", Cause.RATIO_TEST, tried(accept=lambda coin, ratio, q: ratio > 0.5), TREE),
    Fault("siblings backwards", Cause.TRIAL_ORDER, tried(order=lambda children: children[::-1]), TREE),
    Fault("first sibling only", Cause.TRIAL_ORDER, tried(order=lambda children: children[:1]), "model tree"),
    Fault("final from q", Cause.FINAL_NOT_RESIDUAL, tried(final=q_again), TREE),
    Fault("bonus of the root", Cause.FINAL_OTHER_NODE, bonus_of_the_root, "model chain"),
    Fault("bonus of the root, sampled", Cause.FINAL_OTHER_NODE, bonus_of_the_root, "model tree warm"),
    Fault("another token now and then", Cause.FINAL_OTHER_NODE, now_and_then_another, "model chain", rare=10),
    Fault("siblings swapped", Cause.SIBLINGS_CHANGED, finished(youngest_swapped), TREE),
    Fault("one seed for all", Cause.COINS, VERDICTS(of_one_seed), TREE),
    Fault("decided by the root", Cause.P_NOT_USED, decided_by_the_root, "model chain warm", rare=6),
    Fault("p of the grandparent", Cause.P_OTHER_ROW, parents_of_parents, "model chain warm"),
    Fault("p of the grandparent, greedy", Cause.P_OTHER_ROW, parents_of_parents, "model tree"),
]
