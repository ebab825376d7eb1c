"""What a rule emits, by exact enumeration: over every draw of the drafts and every outcome of the coins.

And batches of trees as a rule takes them: by hand, and random ones.
"""

import itertools
from collections import defaultdict

import numpy as np
import torch

from specscope.kernels.flat_trees import FlatTrees
from specscope.speculate.sampling import TargetRows
from specscope.speculate.verify.inputs import VerifyBatch, judged_tree
from specscope.trace.record.tree import ROOT, DraftTree, Drawn

VOCAB = 11  # of random inputs
SHAPES = [
    ("1", 5),
    ("2x1", 5),
    ("3x1", 5),
    ("2", 4),
    ("[(0,), (1,), (0, 0), (1, 0)]", 3),
    ("[(0,), (0, 0), (0, 1)]", 3),
]


class Model:
    """A random conditional distribution over a small vocabulary: one row for each prefix of tokens."""

    def __init__(self, vocab: int, seed: int) -> None:
        self.vocab = vocab
        self.generator = np.random.default_rng(seed)
        self.rows: dict[tuple[int, ...], np.ndarray] = {}

    def __call__(self, prefix: tuple[int, ...]) -> np.ndarray:
        if prefix not in self.rows:
            self.rows[prefix] = self.generator.dirichlet(np.full(self.vocab, 0.5))
        return self.rows[prefix]


def dense(row):
    return torch.tensor(row, dtype=torch.float64)


def batch_of(*asked, where="cpu"):
    return batch_of_all([asked], where)


def batch_of_all(asked, where="cpu"):
    """Each: (tree, p, q by parent, coins[, forced, final]). p: rows [V] of the target, or a greedy one's choices."""
    trees, p, choices, q = [], [], [], []
    for tree, rows, own_q, coin, *given in asked:
        greedy = isinstance(rows[0], int)
        (choices if greedy else p).extend(rows)
        forced, final = [*given, None, None][:2]
        how = {"greedy": greedy, "forced": forced or {}, "final": final}
        trees.append(judged_tree(tree, own_q, np.asarray(coin, float), q, **how))
    rows = torch.stack(p) if p else torch.zeros(0, VOCAB)
    target = TargetRows(torch.tensor(choices, dtype=torch.int64).to(where), rows.to(where))
    return VerifyBatch(FlatTrees.build(trees), target, [row.to(where) for row in q])


def random_input(rng, drawn, greedy, forced):
    """What batch_of takes."""
    n = int(rng.integers(0, 7))
    parent = [int(rng.integers(-1, i)) if i else ROOT for i in range(n)]
    token, q = np.zeros(n, dtype=np.int64), {}
    for above in set(parent):
        row = rng.dirichlet(np.full(VOCAB, 0.7)) + 1e-6
        children = [i for i in range(n) if parent[i] == above]
        token[children] = rng.choice(VOCAB, len(children), p=row / row.sum(), replace=drawn == Drawn.WITH_REPLACEMENT)
        if drawn != Drawn.DETERMINISTIC:
            q[above] = torch.tensor(row / row.sum(), dtype=torch.float32)
    if greedy:
        p = [int(rng.choice([*token, *range(VOCAB)])) for _ in range(n + 1)]
    else:
        p = [torch.tensor(row, dtype=torch.float32) for row in rng.dirichlet(np.full(VOCAB, 0.5), n + 1)]
    given_nodes = {i: bool(rng.integers(2)) for i in range(n) if rng.random() < forced}
    final = int(rng.integers(VOCAB)) if rng.random() < forced else None
    return DraftTree.build(token, parent, drawn=drawn), p, q, rng.random(n + 1), given_nodes, final


def sampled_children(q: np.ndarray, count: int, drawn: Drawn):
    """Every way to draw `count` siblings from q in order: (tokens, probability)."""
    if drawn == Drawn.DETERMINISTIC:
        yield tuple(np.argsort(-q, kind="stable")[:count].tolist()), 1.0
        return
    for tokens in itertools.product(range(len(q)), repeat=count):
        left, weight = q.copy(), 1.0
        for token in tokens:
            weight *= left[token]
            if drawn == Drawn.WITHOUT_REPLACEMENT and weight:
                left[token] = 0
                left = left / left.sum() if left.sum() else left
        if weight:
            yield tokens, weight


def draws(shape, q: Model, drawn: Drawn):
    """Every token assignment of a tree with its probability: (tokens by node, weight)."""
    nodes = [ROOT, *range(len(shape))]
    inner = [node for node in nodes if shape.children(node)]

    def go(at: int, tokens: dict[int, int], weight: float):
        if at == len(inner):
            yield dict(tokens), weight
            return
        node, path = inner[at], []
        while node != ROOT:
            path.insert(0, tokens[node])
            node = shape.parent[node]
        children = shape.children(inner[at])
        for chosen, share in sampled_children(q(tuple(path)), len(children), drawn):
            yield from go(at + 1, tokens | dict(zip(children, chosen, strict=True)), weight * share)

    yield from go(0, {}, 1.0)


def trees(shape, q_model, drawn, rearrange):
    """Every tree of a shape with its q and its probability."""
    for tokens, weight in draws(shape, q_model, drawn):
        tree = DraftTree.build([tokens[i] for i in range(len(shape))], shape.parent, drawn=drawn)
        paths = {ROOT: ()} | {i: tuple(tokens[j] for j in tree.path_to(i)) for i in range(len(tree))}
        q = {n: dense(q_model(paths[n])) for n in paths if shape.children(n)}
        yield rearrange(tree, q), {} if drawn == Drawn.DETERMINISTIC else q, weight


def emitted(drafts, p_model, length, outcomes):
    """Joint distribution of the first `length` tokens. `drafts`: (tree, q by parent, probability).

    `outcomes(tree, p, q)` yields (probability, accepted path, [V] what the final token is drawn from) for all that a
    rule can decide. What a step does not emit is continued by the target itself.
    """
    joint: dict[tuple[int, ...], float] = defaultdict(float)

    def continue_by_target(prefix, weight):
        if len(prefix) == length:
            joint[prefix] += weight
            return
        for token, share in enumerate(p_model(prefix)):
            continue_by_target((*prefix, token), weight * share)

    for tree, q, weight in drafts:
        paths = {ROOT: ()} | {i: tuple(tree.token[tree.path_to(i)].tolist()) for i in range(len(tree))}
        p = [dense(p_model(paths[n])) for n in [ROOT, *range(len(tree))]]
        for share, path, last in outcomes(tree, p, q):
            prefix = tuple(tree.token[path].tolist())
            for token, final in enumerate(last / last.sum()):
                if final:
                    continue_by_target((*prefix, token), weight * share * final)
    return joint


def variation(joint, p_model, length):
    """Total variation of a joint distribution from the target's."""
    assert abs(sum(joint.values()) - 1) < 1e-9
    truth = 0.0
    for prefix in itertools.product(range(p_model.vocab), repeat=length):
        weight = np.prod([p_model(prefix[:i])[prefix[i]] for i in range(len(prefix))])
        truth += abs(joint[prefix] - weight)
    return truth / 2


def total_variation(shape, seed, vocab, drawn, outcomes, rearrange=lambda tree, q: tree):
    """Of what is emitted from the target, for random p and q."""
    p_model, q_model, length = Model(vocab, seed), Model(vocab, seed + 1000), shape.max_depth + 1
    return variation(emitted(trees(shape, q_model, drawn, rearrange), p_model, length, outcomes), p_model, length)
