"""Blocks: never leaked, never used twice, counted right; copy on write; moves that overlap."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from specscope.model.kv_cache import BlockTable, KVCache, LayerShape, OutOfBlocksError
from specscope.model.places import Backend

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
