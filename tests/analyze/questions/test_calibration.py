"""The drafter's probability against acceptance."""

from __future__ import annotations

import pytest

from specscope.analyze.questions.evidence import Evidence
from specscope.analyze.questions.rates import Plotted, calibration

from .made import decode, run_of


def answered(history):
    return calibration(Evidence.of(history))


def test_bins_of_the_drafters_own_probability():
    parts = [
        decode([1, 2], path=[0], rejected=[1], own=[0.95, 0.91], p=[1, 0]),
        decode([1, 2], path=[0, 1], own=[1.0, 0.05], p=[1, 1]),
    ]
    (curve,) = answered(run_of(parts)).curves
    assert curve.plotted is Plotted.OWN
    low, high = curve.bins
    assert (low.low, low.accepted.count, low.accepted.total) == (0.0, 1, 1)
    assert (high.low, high.accepted.count, high.accepted.total) == (0.9, 2, 3)
    assert high.mean == pytest.approx((0.95 + 0.91 + 1) / 3)
    assert high.target_p == pytest.approx(2 / 3)
    assert str(high.examples.clearest) == "a@0/1"  # rejected
    assert curve.error == pytest.approx((abs(1 - 0.05) + abs(2 - 2.86)) / 4)


def test_sampled_nodes_are_plotted_over_q_beside_deterministic_ones():
    parts = [
        decode([1], path=[0], q=[0.5], p=[0.4]),
        decode([1], rejected=[0], own=[0.3]),
        decode([1], rejected=[0]),  # a drafter that tells no probability
    ]
    found = answered(run_of(parts))
    q, own = found.curves
    assert (q.plotted, q.bins[0].low, q.bins[0].mean) == (Plotted.Q, 0.5, pytest.approx(0.5))
    assert own.accepted.total == 1
    assert found.notes == ("left out: 1 deterministic node whose drafter gives no probability",)
