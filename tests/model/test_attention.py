"""Paged tree attention against a float64 reference: any tree, window, soft-cap, sinks, ragged batches."""

from types import SimpleNamespace

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specscope.model import batch as batch_module
from specscope.model.attention import specscope_attention
from specscope.model.batch import Batch, Segment
from specscope.model.kv_cache import BlockTable, KVCache, LayerShape
from specscope.trace.tree import DraftTree
from tests.trace.strategies import trees

HEADS, KV_HEADS, SIZE = 4, 2, 8


def reference(query, keys, values, visible, scale, softcap, sinks):
    """One row in float64. query [H, D], keys and values [n, Hkv, D], visible bool [n]."""
    out = []
    for head in range(HEADS):
        k, v = keys[visible, head // 2].double(), values[visible, head // 2].double()
        scores = k @ query[head].double() * scale
        if softcap:
            scores = torch.tanh(scores / softcap) * softcap
        if sinks is not None:
            weights = torch.cat([scores, sinks[head : head + 1].double()]).softmax(0)[:-1]
        else:
            weights = scores.softmax(0)
        out.append(weights @ v)
    return torch.stack(out)


requests = st.lists(
    st.tuples(st.integers(0, 40), st.integers(1, 20), trees(max_nodes=8), st.booleans()), min_size=1, max_size=4
)


@given(
    requests,
    st.none() | st.integers(1, 30),
    st.none() | st.just(3.0),
    st.booleans(),
    st.sampled_from([0, 200, 1024, 10**6]),
    st.integers(0, 99),
)
@settings(max_examples=80)
def test_equals_the_reference(parts, window, softcap, with_sinks, call, seed):
    generator = torch.Generator().manual_seed(seed)
    rand = lambda *shape: torch.randn(*shape, generator=generator)  # noqa: E731
    cache = KVCache([LayerShape(KV_HEADS, SIZE, SIZE)], 96, torch.float32, torch.device("cpu"))
    anywhere, in_a_row = iter(np.random.default_rng(seed).permutation(48).tolist()), iter(range(48, 96))
    segments, histories = [], []
    for context, fed, tree, scattered in parts:
        table = BlockTable()
        length = context + fed + len(tree)
        blocks = -(-length // 16)
        table.blocks = [next(anywhere if scattered else in_a_row) for _ in range(blocks)]
        old_k, old_v = rand(KV_HEADS, context, SIZE), rand(KV_HEADS, context, SIZE)
        cache.write(0, torch.from_numpy(table.slots(0, context)), old_k, old_v)
        segments.append(Segment.of_tree(table, context, list(range(fed)), tree, logits=True))
        histories.append((old_k.transpose(0, 1), old_v.transpose(0, 1)))
    original = batch_module.CALL
    batch_module.CALL = call
    try:
        batch = Batch.build(segments, torch.device("cpu"))
    finally:
        batch_module.CALL = original
    rows = batch.tokens.shape[1]
    query, key, value = rand(1, HEADS, rows, SIZE), rand(1, KV_HEADS, rows, SIZE), rand(1, KV_HEADS, rows, SIZE)
    sinks = rand(HEADS) if with_sinks else None
    out, _ = specscope_attention(
        SimpleNamespace(layer_idx=0),
        query,
        key,
        value,
        None,
        scaling=0.4,
        sliding_window=window,
        softcap=softcap,
        s_aux=sinks,
        batch=batch,
        cache=cache,
    )
    at = 0
    for segment, (old_k, old_v), (context, _, _, _) in zip(segments, histories, parts, strict=True):
        m = len(segment.tokens)
        keys = torch.cat([old_k, key[0, :, at : at + m].transpose(0, 1)])
        values = torch.cat([old_v, value[0, :, at : at + m].transpose(0, 1)])
        positions = np.concatenate([np.arange(context), segment.positions])
        for row in range(m):
            visible = np.concatenate([np.ones(context, bool), segment.mask[row]])
            if window is not None:
                visible &= segment.positions[row] - positions < window
            wanted = reference(query[0, :, at + row], keys, values, torch.from_numpy(visible), 0.4, softcap, sinks)
            assert torch.allclose(out[0, at + row].double(), wanted, atol=2e-6)
        at += m


def alone(length, rows=1):
    """A segment of a chain, its KV somewhere."""
    table = BlockTable(list(range(-(-length // 16))))
    return Segment.of_tree(table, length - rows, list(range(rows)), DraftTree.empty(), logits=True)


def test_padding_stays_below_what_the_segments_are():
    """One long request and seven short ones: the short ones are not padded to the long one."""
    batch = Batch.build([alone(60), alone(4000), *[alone(64 + i) for i in range(6)]], torch.device("cpu"))
    padded = sum(group.seen.numel() for group in batch.groups)
    assert [group.size for group in batch.groups] == [1, 7]
    assert padded < 1.1 * (4000 + 7 * 64)
    wide = Batch.build([alone(3000, rows=60), *[alone(3000) for _ in range(7)]], torch.device("cpu"))
    assert sum(group.seen.numel() for group in wide.groups) < 1.1 * 67 * 3000
    same = Batch.build([alone(1000 + i) for i in range(8)], torch.device("cpu"))
    assert [group.size for group in same.groups] == [8]


def test_distances_are_not_looked_at_without_a_window(monkeypatch):
    monkeypatch.setattr(batch_module.Group, "_within", None)
    (group,) = Batch.build([alone(60, rows=4), alone(50, rows=2)], torch.device("cpu")).groups
    assert group.bias(None, 2).shape == (2, 1, 8, 64)
    tensors = [x for x in vars(group).values() if isinstance(x, torch.Tensor) and x.dim() > 1]
    assert not any(x.dtype == torch.int64 for x in tensors)


def test_positions_and_slots_of_a_tree():
    tree = DraftTree.build([5, 6, 7], [-1, -1, 0])
    segment = Segment.of_tree(BlockTable([3, 1]), 14, [1, 2], tree, logits=True)
    batch = Batch.build([segment], torch.device("cpu"))
    assert batch.positions[0].tolist() == [14, 15, 16, 16, 17]
    assert batch.slots.tolist() == [3 * 16 + 14, 3 * 16 + 15, 16, 17, 18]
    assert batch.wanted.tolist() == [1, 2, 3, 4]
    assert segment.mask.astype(int).tolist() == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [1, 1, 1, 0, 0],
        [1, 1, 0, 1, 0],
        [1, 1, 1, 0, 1],
    ]
