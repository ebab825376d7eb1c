"""Paged tree attention against a float64 reference: any tree, window, soft-cap, sinks, ragged batches."""

from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specscope.model import attention
from specscope.model import groups as groups_module
from specscope.model.attention import specscope_attention
from specscope.model.batch import Batch, Segment
from specscope.model.kv_cache import BlockTable, KVCache, LayerShape
from specscope.trace.record.tree import DraftTree
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
    st.sampled_from([0, 20, 1024]),
    st.sampled_from([0, 16]),
    st.sampled_from([1, 2, 3, 8]),
    st.sampled_from([SIZE, 6]),
    st.sampled_from([None, float("nan"), float("inf")]),
    st.integers(0, 99),
)
@settings(max_examples=200, deadline=None)
def test_equals_the_reference(parts, window, softcap, with_sinks, call, long, few, threads, value_size, wrong, seed):
    """Whatever is padded together (`call`), read in place (`long`), or split over threads.

    What a row does not see is `wrong` and does not reach it: other requests', left behind, or of a sibling.
    """
    generator = torch.Generator().manual_seed(seed)
    rand = lambda *shape: torch.randn(*shape, generator=generator)  # noqa: E731
    cache = KVCache([LayerShape(KV_HEADS, SIZE, value_size)], 96, torch.float32, torch.device("cpu"))
    for store in cache.stores if wrong is not None else ():
        store.fill_(wrong)
    anywhere, in_a_row = iter(np.random.default_rng(seed).permutation(48).tolist()), iter(range(48, 96))
    segments, histories = [], []
    for context, fed, tree, scattered in parts:
        table = BlockTable()
        length = context + fed + len(tree)
        blocks = -(-length // 16)
        table.blocks = [next(anywhere if scattered else in_a_row) for _ in range(blocks)]
        old_k, old_v = rand(KV_HEADS, context, SIZE), rand(KV_HEADS, context, value_size)
        cache.write(0, torch.from_numpy(table.slots(0, context)), old_k, old_v)
        segments.append(Segment.of_tree(table, context, list(range(fed)), tree, logits=True))
        histories.append((old_k.transpose(0, 1), old_v.transpose(0, 1)))
    with patch.multiple(groups_module, CALL=call, LONG=long, FEW=few, RUN=16):
        batch = Batch.build(segments, torch.device("cpu"))
    rows = batch.tokens.shape[1]
    query, key = rand(1, HEADS, rows, SIZE), rand(1, KV_HEADS, rows, SIZE)
    value = rand(1, KV_HEADS, rows, value_size)
    if wrong is not None:
        key[:, :, seed % rows] = value[:, :, seed % rows] = wrong
    sinks = rand(HEADS) if with_sinks else None
    with patch.object(torch, "get_num_threads", lambda: threads), patch.multiple(attention, SPLIT=0, IDLE=0.0):
        out, _ = specscope_attention(
            SimpleNamespace(layer_idx=0),
            *(batch.as_laid_out(x[0].transpose(0, 1)).transpose(0, 1)[None] for x in (query, key, value)),
            None,
            scaling=0.4,
            sliding_window=window,
            softcap=softcap,
            s_aux=sinks,
            batch=batch,
            pages=cache,
        )
    out = batch.as_given(out[0])[None]
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
            if wanted.isfinite().all():
                assert torch.allclose(out[0, at + row].double(), wanted, atol=2e-6)
            else:
                assert not out[0, at + row].isfinite().any()
        at += m


def test_a_batch_lies_as_its_sequences_do_in_the_cache():
    """Rows of a group are then side by side; who asks for them gets them in the order in which they were given."""
    tables = [BlockTable([8]), BlockTable([0]), BlockTable([4])]
    segments = [
        Segment.of_tree(table, 3, list(range(10 * i, 10 * i + 1 + i)), DraftTree.empty(), logits=True)
        for i, table in enumerate(tables)
    ]
    given = [token for segment in segments for token in segment.tokens]
    batch = Batch.build(segments, torch.device("cpu"))
    assert batch.tokens[0].tolist() == [10, 11, 20, 21, 22, 0]
    assert batch.as_given(batch.tokens[0]).tolist() == given
    assert torch.equal(batch.as_laid_out(torch.tensor(given)), batch.tokens[0])
    assert batch.tokens[0][batch.wanted].tolist() == [0, 11, 22]
    assert batch.slots.tolist() == [3, 4, 67, 68, 69, 131]
    same = Batch.build([alone(20, blocks=[2 * i, 2 * i + 1]) for i in (3, 1, 2)], torch.device("cpu"))
    (group,) = same.groups
    assert isinstance(group.rows, slice)
    assert group.start is not None


def alone(length, rows=1, blocks=None):
    """A segment of a chain, its KV side by side or in `blocks`."""
    table = BlockTable(list(range(-(-length // 16))) if blocks is None else blocks)
    return Segment.of_tree(table, length - rows, list(range(rows)), DraftTree.empty(), logits=True)


def scattered(length, rows=1):
    """A segment whose blocks all lie apart."""
    return alone(length, rows, list(range(0, 2 * -(-length // 16), 2)))


def groups_of(*segments):
    return Batch.build(segments, torch.device("cpu")).groups


def test_padding_stays_below_what_the_segments_are():
    """One long request and seven short ones: the short ones are not padded to the long one."""
    groups = groups_of(scattered(60), scattered(4000), *[scattered(64 + i) for i in range(6)])
    padded = sum(group.seen.size for group in groups)
    assert [group.size for group in groups] == [1, 7]
    assert padded < 1.1 * (4000 + 7 * 64)
    wide = groups_of(scattered(3000, rows=60), *[scattered(3000) for _ in range(7)])
    assert sum(group.seen.size for group in wide) < 1.1 * 67 * 3000
    for long in (500, 1000, 1400):  # one of them with the long one would take less than a call, all of them more
        groups = groups_of(alone(long), *[alone(128, blocks=range(8 * i, 8 * i + 8)) for i in range(20, 27)])
        assert [(group.size, group.width(None)) for group in groups] == [(1, long), (7, 128)]
    same = groups_of(*[scattered(1000 + i) for i in range(8)])
    assert [group.size for group in same] == [8]


def test_a_long_context_is_read_where_it_lies():
    """Each of its runs; only what is left of it, its last slots and blocks apart, is gathered with the short ones."""
    long = alone(4000, blocks=[*range(100, 200), 7, 9, *range(300, 448)])
    (group,) = groups_of(scattered(130), long)
    assert [(run.member, run.first, run.end - run.start) for run in group.runs] == [(1, 0, 1600), (1, 1632, 2352)]
    assert group.runs[0].start == 1600
    assert group.seen.shape == (2, 1, 144)
    assert group.seen[1].sum() == 4000 - 1600 - 2352
    assert group.column[1, :48].tolist() == [*range(1600, 1632), *range(3984, 4000)]
    (both,) = groups_of(alone(130), long)
    assert both.start is None  # a call for each of them would take longer
    in_place, gathered = groups_of(alone(900), scattered(900))
    assert (in_place.start, gathered.start) == (0, None)


def test_few_rows_read_all_that_lies_side_by_side_as_one():
    """The context and what they feed, with one mask; in a window no more than some row sees."""
    group, short = groups_of(alone(4000, rows=5), alone(60, blocks=[300, 301, 302, 303]))
    assert (group.start, group.size, group.runs) == (0, 1, [])
    assert group.bias(None, 3, torch.float32).shape == (1, 1, 15, 4000)
    assert (group.width(None), group.width(100), group.width(5000)) == (4000, 104, 4000)
    assert group.bias(100, 3, torch.float32).shape == (1, 1, 15, 104)
    seen = group.bias(100, 1, torch.float32)[0, 0] == 0
    assert seen.sum(1).tolist() == [100] * 5
    assert (group.can_be_cut, short.can_be_cut) == (True, True)
    (both,) = groups_of(alone(4000), alone(3990, blocks=range(300, 550)))
    assert (both.start, both.size, both.width(None), both.can_be_cut) == (0, 2, 4000, False)
    (chunk,) = groups_of(alone(4000, rows=33))
    assert len(chunk.runs) == 1


@pytest.mark.parametrize(
    ("units", "slots", "threads", "parts"),
    [(3, 7500, 2, 2), (3, 2047, 2, 1), (6, 7500, 2, 1), (3, 7500, 8, 8), (12, 7500, 8, 8), (15, 7500, 8, 1)],
)
def test_idle_threads_take_parts_of_the_keys(units, slots, threads, parts, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    assert attention.parts_of(units, 1, slots) == parts


def test_contexts_that_begin_equally_far_apart_are_read_in_place_together():
    at = lambda first, length: alone(length, blocks=[*range(first, first + -(-length // 16))])  # noqa: E731
    (group,) = groups_of(at(40, 100), at(0, 90), at(80, 130), at(120, 70))
    assert (group.start, group.stride, group.size) == (0, 640, 4)
    assert group.seen.shape == (4, 1, 130)
    parts = at(0, 600), at(40, 600), at(120, 600), at(161, 600), at(200, 600)
    groups = groups_of(*parts)
    assert [(group.start, group.stride, group.size) for group in groups] == [(0, 640, 2), (1920, 656, 2), (3200, 0, 1)]
    (few,) = groups_of(at(0, 100), at(40, 100), at(120, 100))
    assert few.start is None  # two calls would take longer than to gather them


@pytest.mark.parametrize("rows", [1, 4])
def test_many_gathered_contexts_in_bfloat16(rows, monkeypatch):
    """They are multiplied in bfloat16; as near to float64 as the fused attention, which rounds less."""
    monkeypatch.setattr(attention, "has_bfloat16", lambda: True)
    generator = torch.Generator().manual_seed(rows)
    rand = lambda *shape: torch.randn(*shape, generator=generator).bfloat16()  # noqa: E731
    cache = KVCache([LayerShape(KV_HEADS, SIZE, SIZE)], 160, torch.bfloat16, torch.device("cpu"))
    lengths = [100 + 9 * i for i in range(8)]
    segments = [
        alone(length, rows, blocks=[i + 8 * block for block in range(-(-length // 16))])
        for i, length in enumerate(lengths)
    ]
    for part in cache.parts[0]:
        part.copy_(rand(*part.shape))
    batch = Batch.build(segments, torch.device("cpu"))
    assert [(group.size, group.start) for group in batch.groups] == [(8, None)]
    query, key, value = rand(1, HEADS, 8 * rows, SIZE), *(rand(1, KV_HEADS, 8 * rows, SIZE) for _ in range(2))
    variant = {"scaling": 0.4, "batch": batch, "pages": cache}
    out, _ = specscope_attention(SimpleNamespace(layer_idx=0), query, key, value, None, **variant)
    for i, (segment, length) in enumerate(zip(segments, lengths, strict=True)):
        slots = torch.from_numpy(segment.table.slots(0, length))
        keys, values = (part[0][:, slots].transpose(0, 1) for part in (cache.key, cache.value))
        for row in range(rows):
            at, visible = i * rows + row, torch.arange(length) <= length - rows + row
            wanted = reference(query[0, :, at], keys, values, visible, 0.4, None, None)
            assert torch.allclose(out[0, at].double(), wanted, atol=0.03)


@pytest.mark.parametrize("window", [None, 700, 5000])
def test_the_masks_of_a_long_prompts_chunk_are_as_large_as_the_chunk(window):
    """512 rows at 8,000 tokens of context: not rows times context."""
    (group,) = groups_of(alone(8000 + 512, rows=512))
    masks = [group.bias(window, 3, torch.float32), *(p.bias for p in group.pieces(window, 3, torch.float32))]
    assert sum(mask.numel() for mask in masks if mask is not None) <= 2 * 3 * 512 * (512 + 16)
    read = sum(piece.end - piece.start for piece in group.pieces(window, 3, torch.float32))
    assert read == {None: 8000, 700: 699, 5000: 4999}[window]  # before its own position a row sees window - 1


def test_a_row_alone_needs_no_mask():
    for segment in (alone(100), alone(5000)):
        (group,) = groups_of(segment)
        assert group.bias(None, 3, torch.float32) is None
        assert [piece.bias for piece in group.pieces(None, 3, torch.float32)] == [None] * len(group.runs)
    (group,) = groups_of(*[scattered(96) for _ in range(8)])  # of one length and whole blocks: padded nowhere
    assert group.bias(None, 3, torch.float32) is None


def test_distances_are_not_looked_at_without_a_window(monkeypatch):
    monkeypatch.setattr(groups_module.AttentionGroup, "_within", None)
    (group,) = groups_of(scattered(60, rows=4), scattered(50, rows=2))
    assert group.bias(None, 2, torch.float32).shape == (1, 2, 8, 64)
    matrices = [x for x in vars(group).values() if isinstance(x, (torch.Tensor, np.ndarray)) and x.ndim > 2]
    assert [x.dtype for x in matrices] == [np.bool_]


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
