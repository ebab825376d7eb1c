"""The short cuts to what a run had come to at any position give what counting from the start gives."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest

from specscope.trace.history import stats
from specscope.trace.history.history import History
from specscope.trace.history.totals import count_undrafted
from specscope.trace.wire.reading import read_capture
from tests.tui.sample import START_NS, maker

CAPTURE = Path(__file__).parents[3] / "traces" / "ngram.jsonl"


@pytest.fixture
def history() -> History:
    return maker().run()


def test_counts_at_any_position(history):
    positions = list(range(-1, len(history.steps)))
    random.Random(0).shuffle(positions)
    for position in positions:
        parts = [part for record in history.steps[: position + 1] for part in record.requests]
        assert history.acceptance_at(position, None) == stats.measure(parts)
        for name in history.requests:
            own = [part for part in parts if part.request == name]
            assert history.acceptance_at(position, name) == stats.measure(own)
            assert history.requests[name].count_at(position) == len(own)
        each = [stats.measure(part for part in parts if part.request == name) for name in history.requests]
        mean, over = history.mean_tau_at(position)
        assert mean == pytest.approx(stats.mean_tau(each)) if over else mean is None
        assert over == sum(one.tau is not None for one in each)


def test_why_steps_drafted_nothing_at_any_position_also_after_going_back():
    history = read_capture(CAPTURE).history
    history.steps[5:8] = [replace(step, speculation=False) for step in history.steps[5:8]]
    history = replaced(history)
    while history.steps:
        last = len(history.steps) - 1
        for position in (-1, last // 2, last):
            records = history.steps[: position + 1]
            assert +history.undrafted_at(position, None) == count_undrafted(history.run, records)
            for name in history.requests:
                own = [replace(r, requests=tuple(p for p in r.requests if p.request == name)) for r in records]
                assert +history.undrafted_at(position, name) == count_undrafted(history.run, own)
        history.truncate(max(len(history.steps) - 7, 0))


def replaced(history: History) -> History:
    whole = History(run=history.run)
    for step in history.steps:
        whole.append(step)
    return whole


def test_buckets_of_the_plot(history):
    last = len(history.steps) - 1
    values, size = history.lengths_at(last, None, 1000)
    assert size == 1
    assert len(values) == last + 1
    values, size = history.lengths_at(last, None, 10)
    assert size == 8
    assert len(values) == -(-(last + 1) // 8)
    parts = [part for record in history.steps[8:16] for part in record.requests]
    assert values[1] == pytest.approx(stats.measure(parts).tau)
    assert set(history.lengths_at(last, "r2", 10)[0]) == {None}  # never drafted
    assert history.lengths_at(-1, None, 10) == ([], 1)
    assert history.lengths_at(last, "no such", 10) == ([], 1)


def test_states_at_any_position(history):
    request = history.requests["r3"]
    ended = request.ended
    assert ended is not None
    assert request.state_at(ended) == "eos"
    assert request.state_at(ended - 1) == "running"
    assert request.state_at(0) == "prefill"
    assert request.state_at(-1) == "later"


def test_speed_is_tokens_over_the_wall_clock_of_the_records(history):
    emitted = sum(part.emitted for record in history.steps[:11] for part in record.requests)
    elapsed = (history.steps[10].end_ns - START_NS) / 1e9
    assert history.speed_at(10) == pytest.approx(emitted / elapsed)
    assert history.elapsed_at(10) == pytest.approx(elapsed)
    assert history.speed_at(-1) is None
