"""The ledger's short cuts give what counting from the start gives."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest

from specscope.trace.history import stats
from specscope.trace.history.history import History
from specscope.trace.history.undrafted import count_undrafted
from specscope.trace.wire.reading import read_capture
from specscope.tui.widgets import ledger as ledger_module
from specscope.tui.widgets.ledger import Ledger

from .sample import START_NS, maker

CAPTURE = Path(__file__).parents[2] / "traces" / "ngram.jsonl"


@pytest.fixture
def history() -> History:
    return maker().run()


@pytest.fixture
def ledger(history, monkeypatch) -> Ledger:
    monkeypatch.setattr(ledger_module, "EVERY", 7)  # so that a short run has many checkpoints
    made = Ledger(history)
    made.update()
    return made


def test_counts_at_any_position(history, ledger):
    positions = list(range(-1, len(history.steps)))
    random.Random(0).shuffle(positions)
    for position in positions:
        parts = [part for record in history.steps[: position + 1] for part in record.requests]
        assert ledger.acceptance(position, None) == stats.measure(parts)
        for name in history.requests:
            own = [part for part in parts if part.request == name]
            assert ledger.acceptance(position, name) == stats.measure(own)
            assert ledger.place(name, position) == len(own)


def test_why_steps_drafted_nothing_at_any_position_also_after_going_back():
    history = read_capture(CAPTURE).history
    history.steps[5:8] = [replace(step, speculation=False) for step in history.steps[5:8]]
    history = replaced(history)
    ledger = Ledger(history)
    ledger.update()
    while history.steps:
        last = len(history.steps) - 1
        for position in (-1, last // 2, last):
            records = history.steps[: position + 1]
            assert +ledger.undrafted(position, None) == count_undrafted(history.run, records)
            for name in history.requests:
                own = [replace(r, requests=tuple(p for p in r.requests if p.request == name)) for r in records]
                assert +ledger.undrafted(position, name) == count_undrafted(history.run, own)
        history.truncate(max(len(history.steps) - 7, 0))
        ledger.update()


def replaced(history: History) -> History:
    whole = History(run=history.run)
    for step in history.steps:
        whole.append(step)
    return whole


def test_the_counts_it_gives_out_are_not_its_own_running_ones(history, ledger):
    before = ledger.acceptance(10, None).to_dict()
    ledger.acceptance(20, None)
    assert ledger.acceptance(10, None).to_dict() == before


def test_mean_over_requests(history, ledger):
    for position in (0, 5, 20, len(history.steps) - 1):
        parts = [
            stats.measure(part for r in history.steps[: position + 1] for part in r.requests if part.request == name)
            for name in history.requests
        ]
        mean, over = ledger.mean_tau(position)
        assert mean == pytest.approx(stats.mean_tau(parts)) if over else mean is None
        assert over == sum(part.tau is not None for part in parts)


def test_buckets_of_the_plot(history, ledger):
    last = len(history.steps) - 1
    values, size = ledger.lengths(last, None, 1000)
    assert size == 1
    assert len(values) == last + 1
    values, size = ledger.lengths(last, None, 10)
    assert size == 8
    assert len(values) == -(-(last + 1) // 8)
    parts = [part for record in history.steps[8:16] for part in record.requests]
    assert values[1] == pytest.approx(stats.measure(parts).tau)
    assert ledger.lengths(last, "r2", 10)[0].count(None) == len(ledger.lengths(last, "r2", 10)[0])  # never drafted
    assert ledger.lengths(-1, None, 10) == ([], 1)
    assert ledger.lengths(last, "no such", 10) == ([], 1)


def test_states_at_any_position(history, ledger):
    ended = ledger.requests["r3"].ended
    assert ended is not None
    assert ledger.state("r3", ended) == "eos"
    assert ledger.state("r3", ended - 1) == "running"
    assert ledger.state("r3", 0) == "prefill"
    assert ledger.state("r3", -1) == "later"
    assert ledger.state("no such", 3) == "later"


def test_speed_is_tokens_over_the_wall_clock_of_the_records(history, ledger):
    emitted = sum(part.emitted for record in history.steps[:11] for part in record.requests)
    elapsed = (history.steps[10].end_ns - START_NS) / 1e9
    assert ledger.speed(10) == pytest.approx(emitted / elapsed)
    assert ledger.elapsed(10) == pytest.approx(elapsed)
    assert ledger.speed(-1) is None


def test_it_takes_in_steps_as_they_come(history):
    drafting = History(vocabulary=history.vocabulary)
    ledger = Ledger(drafting)
    for record in history.steps:
        drafting.append(record)
        ledger.update()
    assert ledger.acceptance(len(history.steps) - 1, None) == history.acceptance
