"""Request steps in columns come out as they went in, whole, field by field, and gathered over many steps."""

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specscope.trace.record.declared import same
from specscope.trace.run import parts as module
from specscope.trace.run.packed import HELD, PackedParts, Picked
from specscope.trace.run.parts import PartStore, PartViews
from tests.trace.samples import records
from tests.trace.strategies import runs


def parts_of(run):
    return [part for record in run for part in record.requests]


def stored(steps, chunk):
    store = PartStore()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "CHUNK", chunk)
        return store, [store.append(part) for part in steps]


@given(runs(), st.integers(1, 5))
def test_steps_come_out_as_they_went_in(run, chunk):
    steps = parts_of(run)
    store, rows = stored(steps, chunk)
    views = PartViews(store, rows)
    assert views == steps
    assert list(views) == steps
    assert views[1:] == steps[1:]
    assert pickle.loads(pickle.dumps(views)) == tuple(steps)
    for row, part in zip(rows, steps, strict=True):
        for name in HELD:
            assert getattr(store[row], name) == getattr(part, name)
        verdict = part.verdict
        assert same(store.field(row, "verdict", "path"), None if verdict is None else verdict.path)
        assert store.field(row, "", "emitted") == part.emitted


@given(runs(), st.integers(1, 5), st.randoms())
def test_a_field_of_many_steps_is_theirs_end_to_end(run, chunk, chance):
    steps = parts_of(run)
    store, rows = stored(steps, chunk)
    chosen = [place for place in range(len(steps)) if chance.random() < 0.7]
    picked = Picked.of([store[rows[place]] for place in chosen])
    mine = [steps[place] for place in chosen]
    tokens = [token for each in picked for token in each.values("tree", "token").tolist()]
    assert tokens == [token for part in mine for token in part.tree.token.tolist()]
    counts = [each.counts("verdict", "path").tolist() for each in picked]
    known = [0 if part.verdict is None else len(part.verdict.path) for part in mine]
    assert [count for each in counts for count in each] == known


def test_what_is_forgotten_goes_chunk_by_chunk_and_rows_stay(monkeypatch):
    monkeypatch.setattr(module, "CHUNK", 2)
    steps = parts_of(records()) * 4
    store = PartStore()
    rows = [store.append(part) for part in steps]
    before = store.nbytes
    store.forget(rows[5])
    assert store.nbytes < before
    assert store[rows[5]] == steps[5]
    with pytest.raises(LookupError, match="was forgotten"):
        store[rows[0]]
    assert PackedParts.of(steps).nbytes > 0
