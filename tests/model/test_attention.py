"""Paged tree attention against a float64 reference; its blocks: never leaked, never used twice, counted right."""

from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from specscope.model import attention
from specscope.model.attention import specscope_attention
from specscope.model.batch import Batch, Segment
from specscope.model.kv_cache import BlockTable, KVCache, LayerShape, OutOfBlocksError
from specscope.model.places import Backend
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
    parts=requests,
    window=st.none() | st.integers(1, 30),
    softcap=st.none() | st.just(3.0),
    with_sinks=st.booleans(),
    few=st.sampled_from([0, 100]),
    value_size=st.sampled_from([SIZE, 6]),
    wrong=st.sampled_from([None, float("nan"), float("inf")]),
    kind=st.sampled_from([torch.float32, torch.float32, torch.bfloat16]),
    seed=st.integers(0, 99),
)
@settings(max_examples=80, deadline=None)
def test_equals_the_reference(parts, window, softcap, with_sinks, few, value_size, wrong, kind, seed):
    """Whether contexts lie side by side or scattered, and up to how `few` rows heads are rows.

    What a row does not see is `wrong` and does not reach it: other requests', left behind, or of a sibling.
    """
    generator = torch.Generator().manual_seed(seed)
    rand = lambda *shape: torch.randn(*shape, generator=generator).to(kind)  # noqa: E731
    cache = KVCache([LayerShape(KV_HEADS, SIZE, value_size)], 96, kind, torch.device("cpu"))
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
    batch = Batch.build(segments, torch.device("cpu"))
    rows = batch.tokens.shape[1]
    query, key = rand(1, HEADS, rows, SIZE), rand(1, KV_HEADS, rows, SIZE)
    value = rand(1, KV_HEADS, rows, value_size)
    if wrong is not None:
        key[:, :, seed % rows] = value[:, :, seed % rows] = wrong
    sinks = rand(HEADS) if with_sinks else None
    variant = {"scaling": 0.4, "sliding_window": window, "softcap": softcap, "s_aux": sinks}
    with patch.object(attention, "FEW", few):
        out, _ = specscope_attention(
            SimpleNamespace(layer_idx=0), query, key, value, None, **variant, batch=batch, pages=cache
        )
    assert out.dtype is kind
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
                assert torch.allclose(out[0, at + row].double(), wanted, atol=2e-6 if kind is torch.float32 else 0.04)
            else:
                assert not out[0, at + row].isfinite().any()
        at += m


def test_a_context_is_read_where_it_lies_and_no_further_back_than_rows_look():
    tree = DraftTree.build([5, 6], [-1, -1])
    beside, apart = (
        Segment.of_tree(BlockTable(blocks), 60, [1], tree, logits=True) for blocks in (range(4, 8), [9, 1, 7, 3])
    )
    batch = Batch.build([apart, beside], torch.device("cpu"))
    gathered, in_place = batch.reaches(None)
    assert (in_place.slots, in_place.rows) == (slice(64, 64 + 63), slice(3, 6))
    assert gathered.slots.tolist() == apart.table.slots(0, 63).tolist()
    assert [reach.slots for reach in batch.reaches(20)][1] == slice(64 + 41, 64 + 63)
    assert [reach.seen.sum(1).tolist() for reach in batch.reaches(20)] == [[20, 20, 20]] * 2


LAYERS = [LayerShape(2, 4, 4), LayerShape(1, 4, 6)]


def cache(blocks=12, backend=Backend.TORCH):
    return KVCache(LAYERS, blocks, torch.float32, torch.device("cpu"), backend)


def write(store, slots, marks):
    """The same number in all of a slot."""
    for layer, shape in enumerate(LAYERS):
        sizes = shape.key_size, shape.value_size
        rows = (marks[None, :, None].expand(shape.heads, len(marks), size) for size in sizes)
        store.write(layer, torch.from_numpy(slots), *rows)


class Tables(RuleBasedStateMachine):
    """Random builder, truncation, forks and writes; each table's contents are tracked beside it."""

    def __init__(self):
        super().__init__()
        self.cache = cache()
        self.cache.pool.keep_apart(3)
        self.live: dict[int, tuple[BlockTable, list[float]]] = {}
        self.names = iter(range(10**6))
        self.marks = iter(range(1, 10**6))

    tables = Bundle("tables")

    @rule(target=tables)
    def new(self):
        name = next(self.names)
        self.live[name] = (BlockTable(), [])
        return name

    @rule(name=tables, more=st.integers(1, 40))
    def write(self, name, more):
        table, contents = self.live[name]
        start = len(contents)
        before, free = list(table.blocks), self.cache.pool.free
        try:
            self.cache.reserve(table, start + more, start)
        except OutOfBlocksError:
            assert table.blocks == before, "a failed reservation changed the table"
            assert self.cache.pool.free == free, "a failed reservation took blocks"
            return
        marks = [float(next(self.marks)) for _ in range(more)]
        write(self.cache, table.slots(start, start + more), torch.tensor(marks))
        contents += marks

    @rule(name=tables, keep=st.integers(0, 60))
    def shorten(self, name, keep):
        table, contents = self.live[name]
        del contents[keep:]
        self.cache.truncate(table, len(contents))

    @rule(target=tables, name=tables)
    def fork(self, name):
        table, contents = self.live[name]
        other = next(self.names)
        self.live[other] = (self.cache.fork(table), list(contents))
        return other

    @rule(name=consumes(tables))
    def end(self, name):
        self.cache.truncate(self.live.pop(name)[0], 0)

    @invariant()
    def counts_are_right(self):
        held = [block for table, _ in self.live.values() for block in table.blocks]
        for block in range(self.cache.pool.blocks):
            assert self.cache.pool.refs[block] == held.count(block)
        assert self.cache.pool.used == len(set(held))

    @invariant()
    def contents_are_untouched(self):
        for table, contents in self.live.values():
            slots = torch.from_numpy(table.slots(0, len(contents)))
            for layer in range(len(LAYERS)):
                assert self.cache.key[layer][0, slots, 0].tolist() == contents
                assert self.cache.value[layer][-1, slots, -1].tolist() == contents


TestTables = Tables.TestCase
TestTables.settings = settings(max_examples=25, stateful_step_count=25, deadline=None)


def test_sequences_that_grow_in_turn_stay_side_by_side():
    store = cache(32)
    store.pool.keep_apart(4)
    tables = [BlockTable() for _ in range(3)]
    for length in range(16, 129, 16):
        for table in tables:
            store.reserve(table, length, length - 16)
    assert [table.blocks for table in tables] == [[*range(0, 8)], [*range(8, 16)], [*range(16, 24)]]
    store.reserve(tables[0], 144, 128)  # its lane is full and the next one taken: any other block
    assert tables[0].blocks[8:] == [24]
    store.truncate(tables[1], 0)
    again = BlockTable()
    store.reserve(again, 20, 0)
    assert again.blocks == [8, 9]  # a lane that was given back is used again


@pytest.mark.parametrize("backend", Backend)
@given(path=st.lists(st.integers(0, 19), min_size=1, max_size=8, unique=True).map(sorted))
def test_an_accepted_path_moves_safely_onto_itself(backend, path):
    store = cache(4, backend)
    table = BlockTable(store.pool.take(4))
    slots, base = table.slots(0, 40), 10
    write(store, slots, torch.arange(40.0))
    store.move([(slots[base + np.array(path)], slots[base : base + len(path)])])
    for layer in range(len(LAYERS)):
        for part in (store.key[layer][0], store.value[layer][-1]):
            kept, before = part[slots[base : base + len(path)]], part[slots[:base]]
            assert kept[:, 0].tolist() == kept[:, -1].tolist() == [base + node for node in path]
            assert before[:, 0].tolist() == list(range(base))


def test_a_block_of_two_tables_is_copied_before_one_of_them_writes_to_it():
    store, first = cache(4), BlockTable()
    store.reserve(first, 20, 0)
    second = store.fork(first)
    store.reserve(second, 21, 20)
    assert second.blocks[0] == first.blocks[0]
    assert second.blocks[1] != first.blocks[1]
    assert [store.pool.refs[block] for block in (*first.blocks, second.blocks[1])] == [2, 1, 1]
