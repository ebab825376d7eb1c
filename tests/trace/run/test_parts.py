"""What a run keeps of request steps in columns is forgotten chunk by chunk."""

import pytest

from specscope.trace.run import parts as module
from specscope.trace.run.packed import PackedParts
from specscope.trace.run.parts import PartStore
from tests.trace.samples import records


def test_what_is_forgotten_goes_chunk_by_chunk_and_rows_stay(monkeypatch):
    monkeypatch.setattr(module, "CHUNK", 2)
    steps = [part for record in records() for part in record.requests] * 4
    store = PartStore()
    rows = [store.append(part) for part in steps]
    before = store.nbytes
    store.forget(rows[5])
    assert store.nbytes < before
    assert store[rows[5]] == steps[5]
    with pytest.raises(LookupError, match="was forgotten"):
        store[rows[0]]
    assert PackedParts.of(steps).nbytes > 0
