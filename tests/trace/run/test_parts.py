"""Request steps in columns come out as they went in, and are forgotten chunk by chunk."""

import pickle

import pytest

from specscope.trace.record.declared import same
from specscope.trace.run import parts as module
from specscope.trace.run.packed import HELD, PackedParts
from specscope.trace.run.parts import PartStore, PartViews
from tests.trace.samples import records


def test_steps_come_out_as_they_went_in_and_what_is_forgotten_goes_chunk_by_chunk(monkeypatch):
    monkeypatch.setattr(module, "CHUNK", 2)
    steps = [part for record in records() for part in record.requests] * 4
    store = PartStore()
    rows = [store.append(part) for part in steps]
    views = PartViews(store, rows)
    assert views == steps
    assert views[1:] == steps[1:]
    assert pickle.loads(pickle.dumps(views)) == tuple(steps)
    for row, part in zip(rows, steps, strict=True):
        assert {name: getattr(store[row], name) for name in HELD} == {name: getattr(part, name) for name in HELD}
        assert store.field(row, "", "emitted") == part.emitted
        assert same(store.field(row, "verdict", "path"), None if part.verdict is None else part.verdict.path)
    before = store.nbytes
    store.forget(rows[5])
    assert store.nbytes < before
    assert store[rows[5]] == steps[5]
    with pytest.raises(LookupError, match="was forgotten"):
        store[rows[0]]
    assert PackedParts.of(steps).nbytes > 0
