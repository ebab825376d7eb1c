"""Batches of trees as a rule takes them: by hand, and random ones. Rules are enumerated by specscope.testing."""

import numpy as np
import torch

from specscope.kernels.tree_batch import FlatTrees
from specscope.speculate.sampling import TargetRows
from specscope.speculate.verify.batch import VerifyBatch, judged_tree
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


def dense(row):
    """A row in float64."""
    return torch.tensor(row, dtype=torch.float64)


def batch_of(*asked, where="cpu"):
    return batch_of_all([asked], where)


def batch_of_all(asked, where="cpu", vocab=VOCAB):
    """Each: (tree, p, q by parent, coins[, forced, final]). p: rows [V] of the target, or a greedy one's choices."""
    trees, p, choices, q = [], [], [], []
    for tree, rows, own_q, coin, *given in asked:
        greedy = isinstance(rows[0], int)
        (choices if greedy else p).extend(rows)
        forced, final = [*given, None, None][:2]
        how = {"greedy": greedy, "forced": forced or {}, "final": final}
        trees.append(judged_tree(tree, own_q, np.asarray(coin, float), q, **how))
    rows = torch.stack(p) if p else torch.zeros(0, vocab)
    target = TargetRows(torch.tensor(choices, dtype=torch.int64).to(where), rows.to(where))
    return VerifyBatch(FlatTrees.build(trees), target, [row.to(where) for row in q])


def random_input(rng, drawn, greedy, forced, chain=False, vocab=VOCAB, most=6):
    """What batch_of takes."""
    n = int(rng.integers(0, most + 1))
    parent = [i - 1 if chain else int(rng.integers(-1, i)) if i else ROOT for i in range(n)]
    token, q = np.zeros(n, dtype=np.int64), {}
    for above in set(parent):
        row = rng.dirichlet(np.full(vocab, 0.7)) + 1e-6
        children = [i for i in range(n) if parent[i] == above]
        token[children] = rng.choice(vocab, len(children), p=row / row.sum(), replace=drawn == Drawn.WITH_REPLACEMENT)
        if drawn != Drawn.DETERMINISTIC:
            q[above] = torch.tensor(row / row.sum(), dtype=torch.float32)
    if greedy:
        p = [int(rng.choice([*token, *range(vocab)])) for _ in range(n + 1)]
    else:
        p = [torch.tensor(row, dtype=torch.float32) for row in rng.dirichlet(np.full(vocab, 0.5), n + 1)]
    given_nodes = {i: bool(rng.integers(2)) for i in range(n) if rng.random() < forced}
    final = int(rng.integers(vocab)) if rng.random() < forced else None
    return DraftTree.build(token, parent, drawn=drawn), p, q, rng.random(n + 1), given_nodes, final
