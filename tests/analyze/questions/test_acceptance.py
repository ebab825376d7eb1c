"""Acceptance by condition: planted buckets, and totals that are those of trace/history/stats.py."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specscope.analyze.questions.answers import answer
from specscope.analyze.questions.evidence import Evidence
from specscope.analyze.questions.rates import by_condition
from specscope.trace.record.tree import Drawn
from tests.analyze.histories import demo, record
from tests.analyze.synthetic import Synthetic

from .made import decode, noted, run_of


def answered(history):
    return by_condition(Evidence.of(history))


def by(found, condition):
    return {row.value: row for row in found.buckets if row.by == condition}


def test_positions_contexts_entropies_and_batches():
    sure = noted([-1], 2, [[1]], [[0.95]], [0.9, 0], entropy=[0.05])
    unsure = noted([-1], 2, [[1]], [[0.2]], [0.9, 0], entropy=[3.0])
    history = run_of(
        [
            decode([1, 2], path=[0, 1], output=0, parents=sure),
            decode([1, 2], rejected=[0], output=3, parents=unsure),
            decode([1, 2], path=[0], rejected=[1], output=70, parents=sure),
        ]
    )
    batch = [decode([1, 2], path=[0], rejected=[1], request=name, output=5) for name in "bcd"]
    history.append(record(3, batch))
    found = answered(history)
    position = by(found, "position")
    assert (position["0–15"].drafts, position["0–15"].tau) == (2, 2.0)
    assert (position["64–127"].drafts, position["64–127"].tau, position["64–127"].rate) == (1, 2.0, 0.5)
    assert position["unknown"].drafts == 3  # their prompts are not known
    entropy, top = by(found, "entropy"), by(found, "top p")
    assert (entropy["0–0.1"].tau, entropy["2–4"].tau, entropy["unknown"].drafts) == (2.5, 1.0, 3)
    assert (top["0.9–0.99"].drafts, top["0–0.3"].drafts) == (2, 1)
    assert {value: row.drafts for value, row in by(found, "batch").items()} == {"1": 3, "3–4": 3}
    assert {value: row.drafts for value, row in by(found, "context").items()} == {"0–63": 5, "64–127": 1}
    assert str(position["0–15"].examples.first) == "a@0"
    assert str(position["0–15"].examples.clearest) == "a@1"  # it lost both tokens
    assert position["0–15"].interval is None  # of one request


def test_an_interval_over_requests_holds_the_mean_of_many():
    found = answered(Synthetic(1, "2x2", Drawn.WITHOUT_REPLACEMENT, p=(0.5, 0.3, 0.2), q=(0.3, 0.3, 0.4)).run(40, 30))
    truth = answered(Synthetic(2, "2x2", Drawn.WITHOUT_REPLACEMENT, p=(0.5, 0.3, 0.2), q=(0.3, 0.3, 0.4)).run(40, 200))
    (row,), (many,) = by(found, "batch").values(), by(truth, "batch").values()
    low, high = row.interval
    assert low < many.tau < high
    assert high - low < 0.2


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 6), st.integers(1, 12))
def test_totals_are_those_of_the_stats(seed, requests, steps):
    history = demo(requests, steps, seed)
    found, counted = answer(history), history.acceptance
    for condition in {row.by for row in found.conditions.buckets}:
        rows = by(found.conditions, condition).values()
        assert sum(row.drafts for row in rows) == counted.drafts
        assert sum(row.drafted for row in rows) == counted.drafted
        assert sum(row.accepted for row in rows) == counted.accepted
        tau = 1 + sum((row.tau - 1) * row.drafts for row in rows) / counted.drafts
        assert tau == pytest.approx(counted.tau)
    decisions = sum(one.decisions.count for one in found.missed.choices)
    assert decisions == (counted.accepted + counted.drafts)
    assert found.missed.drafts == counted.drafts
    assert sum(cell.accepted.total for cell in found.tree.cells) == counted.drafted
    assert sum(cell.accepted.count for cell in found.tree.cells) == counted.accepted
    assert all(one.decisions.total == decisions for one in found.missed.choices)
    assert found.rejections.rejected.total - found.rejections.rejected.count == counted.accepted
    for name in history.requests:
        alone, mine = answer(history, name), history.requests[name].acceptance
        assert sum(row.accepted for row in by(alone.conditions, "batch").values()) == mine.accepted


def test_forced_drafts_are_left_out_and_said():
    history = run_of([decode([1, 2], path=[0], rejected=[1]), decode([1, 2], path=[0, 1], forced=[1])])
    found = answered(history)
    (row,) = by(found, "batch").values()
    assert (row.drafts, row.accepted) == (1, 1)
    assert "left out: 1 draft with forced outcomes" in found.notes
    synthetic = run_of([dataclasses.replace(decode([1, 2], path=[0, 1], forced=[0, 1, 2]))])
    assert not answered(synthetic).buckets
    assert "forced" in answered(synthetic).notes[0]


def test_without_the_prompt_the_place_in_the_output_is_not_known():
    """With --no-text its tokens are left out, and a context's length says nothing of the output's."""
    history = run_of([decode([1, 2], path=[0, 1], output=3)])
    info = dataclasses.replace(history.requests["a"].info, prompt_tokens=np.zeros(0, np.int32))
    history.requests["a"].info = info
    assert np.isnan(Evidence.of(history).output).all()
    assert "position" not in {row.by for row in answered(history).buckets}
