"""Random work for the kernels, and what must hold of each; the mutation tests use the same checks.

A check takes the kernel's module, so that a changed copy of it can be given.
"""

import numpy as np
import torch

from specscope.kernels.flat_trees import NOBODY, WITH_REPLACEMENT, FlatTrees, Tree
from specscope.kernels.tree_batch import Part, TreeBatch
from specscope.kernels.tree_verify import tree_verify_reference
from tests.kernels import DEVICE

BLOCK_SIZE = 16
# A sum of float32 products in another order, and the rounding of what comes out; half types round weights too.
BOUND = {torch.float32: 3e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def near(got, wanted, bound):
    """The largest difference stays within `bound` of the largest number, and nothing was left unwritten."""
    got, wanted = got.detach().cpu().double(), wanted.detach().cpu().double()
    assert not got.isnan().any(), "an element was not written"
    scale = max(float(wanted.abs().max()), 1e-3) if wanted.numel() else 1.0
    worst = float((got - wanted).abs().max()) if wanted.numel() else 0.0
    assert worst <= bound * scale, f"off by {worst / scale:.2g} of the largest number; {bound:.2g} is allowed"


def random_parents(rng, nodes):
    return np.array([rng.integers(-1, i) if i else -1 for i in range(nodes)], dtype=np.int32)


def ancestry(parent):
    """bool [n, n]: whether row i is, or descends from, column j."""
    mask = np.eye(len(parent), dtype=np.bool_)
    for i, above in enumerate(parent):
        if above >= 0:
            mask[i] |= mask[above]
    return mask


def part(rng, context, pending, nodes, fed, blocks):
    """Causal rows and a tree behind them; of the window only the last `fed` rows are fed."""
    parent = random_parents(rng, nodes)
    depth = np.zeros(nodes, dtype=np.int64)
    for i, above in enumerate(parent):
        depth[i] = 1 + (depth[above] if above >= 0 else 0)
    window = pending + nodes
    mask = np.zeros((window, window), dtype=np.bool_)
    mask[:pending, :pending] = np.tri(pending, dtype=np.bool_)
    mask[pending:, :pending] = True
    mask[pending:, pending:] = ancestry(parent)
    positions = np.concatenate([context + np.arange(pending), context + pending - 1 + depth]).astype(np.int64)
    own = [blocks.pop() for _ in range(-(-(context + window) // BLOCK_SIZE))]
    return Part(own, context, positions, mask[-fed:])


def random_parts(rng, most_context, most_nodes, requests):
    """Prefill chunks, single tokens and trees, mixed; block tables out of order; (parts, slots of the cache)."""
    shapes = []
    for _ in range(requests):
        context = int(rng.choice([0, 1, BLOCK_SIZE - 1, BLOCK_SIZE, int(rng.integers(0, most_context + 1))]))
        kind = rng.choice(["prefill", "decode", "tree", "level"])
        pending = int(rng.integers(1, 40)) if kind == "prefill" else 1
        nodes = int(rng.integers(1, most_nodes + 1)) if kind in ("tree", "level") else 0
        fed = int(rng.integers(1, nodes + 1)) if kind == "level" else pending + nodes
        shapes.append((context, pending, nodes, fed))
    used = sum(-(-(c + p + n) // BLOCK_SIZE) for c, p, n, _ in shapes)
    blocks = rng.permutation(used + 2).tolist()
    return [part(rng, *shape, blocks) for shape in shapes], (used + 2) * BLOCK_SIZE


def check_attention(
    module, rng, dtype=torch.float32, *, size=64, most_context=70, most_nodes=12, requests=3, wrong=None, **how
):
    """One random batch through tree_attention; `wrong`: what stands in slots of nobody and in one of a window."""
    heads = module.Heads(int(rng.integers(1, 3)), size, int(how.pop("value_size", size)))
    fold = int(how.pop("fold", rng.integers(1, 5)))
    parts, slots = random_parts(rng, most_context, most_nodes, requests)
    batch = TreeBatch.build(parts, DEVICE)
    seed = torch.Generator().manual_seed(int(rng.integers(1 << 30)))
    make = lambda *shape: torch.randn(*shape, generator=seed).to(dtype).to(DEVICE)  # noqa: E731
    query = make(sum(len(p.mask) for p in parts), heads.count * fold, size)
    rows = make(slots, heads.count * (heads.key_size + heads.value_size))
    if wrong is not None:
        of = [np.array(p.blocks)[:, None] * BLOCK_SIZE + np.arange(BLOCK_SIZE) for p in parts]  # slots
        own = [each.ravel()[: p.context + p.mask.shape[1]] for p, each in zip(parts, of, strict=True)]
        rows[np.setdiff1d(np.arange(slots), np.concatenate(own))] = wrong
        rows[rng.choice(own[0][parts[0].context :])] = wrong
    named = {key: how[key] for key in ("window", "softcap") if how.get(key) is not None}
    if how.get("sinks"):
        named["sinks"] = make(heads.count * fold)
    got = module.tree_attention(
        query,
        rows,
        heads,
        batch,
        scale=size**-0.5,
        splits=how.get("splits", 1),
        keys=how.get("keys", 32),
        least=1,
        **named,
    )
    assert got.dtype is dtype
    wanted = module.tree_attention_reference(query, rows, heads, batch, scale=size**-0.5, **named)
    sees_it = wanted.isnan().flatten(1).any(1)
    assert not got[sees_it].isfinite().any()
    near(got[~sees_it], wanted[~sees_it], BOUND[dtype])


def random_trees(rng, vocabulary, requests, most_nodes, drawn, *, greedy=0.0, forced=0.0):
    """Trees with tokens really drawn from a random q where they are sampled; (trees, p, choices, q or None).

    `greedy` and `forced`: shares of the trees of which only choices are known, of the outcomes and final tokens given.
    """
    trees, p, q, choices = [], [], [], []
    for _ in range(requests):
        nodes = int(rng.integers(0, most_nodes + 1))
        parent = random_parents(rng, nodes)
        token, q_row = np.zeros(nodes, dtype=np.int32), np.full(nodes + 1, NOBODY, dtype=np.int64)
        choice = rng.integers(0, vocabulary, nodes + 1)
        for above in range(-1, nodes):
            children = np.flatnonzero(parent == above)
            while len(children) > vocabulary // 2:  # no node has more children than there are tokens to draw
                parent[children[-1]], children = children[-2], children[:-1]
            if not len(children):
                continue
            own = rng.dirichlet(np.full(vocabulary, rng.choice([0.3, 1.0])))
            own = np.maximum(own, 1e-9) / np.maximum(own, 1e-9).sum()
            token[children] = rng.choice(vocabulary, len(children), replace=drawn == WITH_REPLACEMENT, p=own)
            choice[above + 1] = rng.choice([choice[above + 1], rng.choice(token[children])])
            if drawn:
                q_row[above + 1] = len(q)
                q.append(own)
        given = np.where(rng.random(nodes) < forced, rng.integers(1, 3, nodes), 0).astype(np.uint8)
        final = int(rng.integers(0, vocabulary)) if rng.random() < forced else NOBODY
        one_hot = bool(rng.random() < greedy)
        coin = rng.random(nodes + 1)
        trees.append(Tree(token, parent, np.full(nodes, drawn, np.uint8), coin, q_row, given, final, one_hot))
        if one_hot:
            choices.extend(choice)
        else:
            p.append(rng.dirichlet(np.full(vocabulary, rng.choice([0.2, 1.0])), nodes + 1))
    put = lambda rows: torch.tensor(np.array(rows), dtype=torch.float32, device=DEVICE)  # noqa: E731
    rows = put(np.concatenate(p)) if p else torch.zeros(0, vocabulary, device=DEVICE)
    chosen = torch.tensor(np.array(choices, dtype=np.int64), device=DEVICE)
    return FlatTrees.build(trees).on(DEVICE), rows, chosen, put(q) if q else None


def check_verify(
    module, rng, drawn, *, vocabulary=37, requests=2, most_nodes=8, block=16, shares=None, turns=None, **how
):
    """Random trees: every decision is the reference's, unless its coin lay within rounding."""
    work = random_trees(rng, vocabulary, requests, most_nodes, drawn, **how)
    kept = work[1].clone()
    got = module.tree_verify(*work, block=block, shares=shares, turns=turns)
    wanted = tree_verify_reference(*work)
    assert torch.equal(work[1], kept)
    for name in ("outcome", "token", "final_row", "recovered"):
        assert torch.equal(getattr(got, name), getattr(wanted, name)), name
    for name in ("p", "p_trial", "q_trial", "accept_prob", "residual_mass", "final_p", "final_margin"):
        near(getattr(got, name), getattr(wanted, name), 2e-5)
