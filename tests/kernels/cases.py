"""Random work for the kernels, and what must hold of each; the mutation tests use the same checks.

A check takes the kernel's module, so that a changed copy of it can be given.
"""

from dataclasses import replace

import numpy as np
import torch

from specscope.kernels.tree_batch import BLOCK_SIZE, LayerShape, TreeBatch
from specscope.model.attention import Variant, paged_attention
from specscope.model.batch import Batch, Segment
from specscope.model.kv_cache import BlockTable, KVCache
from specscope.speculate.verify import host
from specscope.speculate.verify.batch import BatchEvidence
from specscope.trace.record.tree import DraftTree
from tests.kernels import DEVICE
from tests.speculate.verify.enumeration import batch_of_all, random_input

# A sum of float32 products in another order, and the rounding of what comes out; half types round weights too.
BOUND = {torch.float32: 3e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def near(got, wanted, bound):
    """The largest difference stays within `bound` of the largest number, and nothing was left unwritten."""
    got, wanted = got.detach().cpu().double(), wanted.detach().cpu().double()
    assert not got.isnan().any(), "an element was not written"
    scale = max(float(wanted.abs().max()), 1e-3) if wanted.numel() else 1.0
    worst = float((got - wanted).abs().max()) if wanted.numel() else 0.0
    assert worst <= bound * scale, f"off by {worst / scale:.2g} of the largest number; {bound:.2g} is allowed"


def part(rng, context, pending, nodes, fed, blocks):
    """Causal rows and a tree behind them; of the window only the last `fed` rows are fed."""
    tree = DraftTree.build([0] * nodes, [int(rng.integers(-1, i)) if i else -1 for i in range(nodes)])
    own = [blocks.pop() for _ in range(-(-(context + pending + nodes) // BLOCK_SIZE))]
    whole = Segment.of_tree(BlockTable(own), context, [0] * pending, tree, logits=True).part
    return replace(whole, mask=whole.mask[-fed:])


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
    shape = LayerShape(int(rng.integers(1, 3)), size, int(how.pop("value_size", size)))
    fold = int(how.pop("fold", rng.integers(1, 5)))
    parts, slots = random_parts(rng, most_context, most_nodes, requests)
    batch = TreeBatch.build(parts, DEVICE)
    seed = torch.Generator().manual_seed(int(rng.integers(1 << 30)))
    make = lambda *shape: torch.randn(*shape, generator=seed).to(dtype).to(DEVICE)  # noqa: E731
    query = make(sum(len(p.mask) for p in parts), shape.heads * fold, size)
    rows = make(slots, shape.width)
    if wrong is not None:
        of = [np.array(p.blocks)[:, None] * BLOCK_SIZE + np.arange(BLOCK_SIZE) for p in parts]  # slots
        own = [each.ravel()[: p.context + p.mask.shape[1]] for p, each in zip(parts, of, strict=True)]
        rows[np.setdiff1d(np.arange(slots), np.concatenate(own))] = wrong
        rows[rng.choice(own[0][parts[0].context :])] = wrong
    named = {key: how[key] for key in ("window", "softcap") if how.get(key) is not None}
    if how.get("sinks"):
        named["sinks"] = make(shape.heads * fold)
    how = {"splits": 1, "keys": 32, **{key: how[key] for key in ("splits", "keys") if key in how}}
    got = module.tree_attention(query, rows, shape, batch, scale=size**-0.5, least=1, **named, **how)
    assert got.dtype is dtype
    wanted = on_host(query, rows, shape, parts, size**-0.5, **named)
    sees_it = wanted.isnan().flatten(1).any(1)
    assert not got[sees_it].isfinite().any()
    near(got[~sees_it], wanted[~sees_it], BOUND[dtype])


def on_host(query, rows, shape, parts, scale, window=None, softcap=None, sinks=None):
    """The same by the torch backend, in float64."""
    cpu = torch.device("cpu")
    cache = KVCache([shape], len(rows) // BLOCK_SIZE, torch.float64, cpu)
    cache.write_rows(0, torch.arange(len(rows)), rows.cpu().double())
    segments = [
        Segment(BlockTable(list(p.blocks)), [0] * len(p.mask), p.context, p.positions, p.mask, ()) for p in parts
    ]
    variant = Variant(scale, window, softcap, None if sinks is None else sinks.cpu())
    return paged_attention(query.cpu().double(), 0, cache, Batch.build(segments, cpu), variant)


def random_batch(rng, vocabulary, requests, most_nodes, drawn, *, greedy=0.0, forced=0.0):
    """A VerifyBatch of trees with tokens really drawn from a random q where they are sampled.

    `greedy` and `forced`: shares of the trees of which only choices are known, of the outcomes and final tokens given.
    """
    sizes = {"vocab": vocabulary, "most": most_nodes}
    asked = [random_input(rng, drawn, rng.random() < greedy, forced, **sizes) for _ in range(requests)]
    return batch_of_all(asked, DEVICE, vocabulary)


def work_of(batch):
    """What tree_verify takes: (trees, p, choices, q or None)."""
    q = torch.stack(list(batch.q)) if batch.q else None
    return batch.trees.on(DEVICE), batch.target.p, batch.target.choices, q


def check_verify(module, rng, drawn, *, vocabulary=37, requests=2, most_nodes=8, block=16, **how):
    """Random trees: every decision is the host's, unless its coin lay within rounding."""
    batch = random_batch(rng, vocabulary, requests, most_nodes, drawn, **how)
    kept = batch.target.p.clone()
    read = module.tree_verify(*work_of(batch), block=block).to_host()
    assert torch.equal(batch.target.p, kept)
    got, wanted = BatchEvidence(coin=batch.trees.coin, **read).verdicts(batch), host.verify(batch.on_host())[0]
    for a, b in zip(got, wanted, strict=True):
        assert (a.outcome.tolist(), a.token, a.kind) == (b.outcome.tolist(), b.token, b.kind)
        for name in ("p", "p_trial", "q_trial", "accept_prob", "residual_mass", "final_p", "final_margin"):
            near(*(torch.as_tensor(getattr(one, name)) for one in (a, b)), 2e-5)
