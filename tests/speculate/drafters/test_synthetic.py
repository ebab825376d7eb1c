"""Synthetic drafts are accepted at the rates that were asked for, and every record says that they were forced."""

import numpy as np
import pytest

from specscope import Engine, SamplingParams
from specscope.engine.config import EngineConfig
from specscope.errors import UserError
from specscope.trace.record.records import Outcome


def test_the_rates_are_those_asked_for(tiny):
    rates = (0.8, 0.5, 0.2)
    engine = Engine(target=str(tiny), dtype="float32", kv_memory=0.05, drafter="synthetic:0.8,0.5,0.2", tree="2x3")
    results = engine.generate(["abc"] * 8, [SamplingParams(max_tokens=200, ignore_eos=True, seed=i) for i in range(8)])
    accepted = [step.verdict.accepted for result in results for step in result.steps if len(step.tree)]
    assert len(accepted) > 400
    for depth, rate in enumerate(rates, 1):
        assert np.mean(np.array(accepted) >= depth) == pytest.approx(rate, abs=0.06)
    assert engine.run_info.drafter == "synthetic:0.8,0.5,0.2"


def test_every_verdict_says_that_it_was_decreed(tiny):
    engine = Engine(target=str(tiny), dtype="float32", kv_memory=0.05, drafter="synthetic:0.9,0.4")
    (result,) = engine.generate("abc", SamplingParams(max_tokens=30, ignore_eos=True))
    drafted = [step for step in result.steps if len(step.tree)]
    assert drafted
    for step in drafted:
        assert step.drafter == "synthetic"
        assert set(step.verdict.forced) == set(np.flatnonzero(step.verdict.outcome != Outcome.UNTRIED))


@pytest.mark.parametrize("text", ["", "x", "0.5,0.6", "1.1", "-0.1", "0.5,,0.2", "nan"])
def test_bad_rates_are_refused(text):
    with pytest.raises(UserError, match="write synthetic:"):
        EngineConfig(drafter=f"synthetic:{text}")


def test_it_takes_a_static_tree_and_no_draft_model():
    with pytest.raises(UserError, match="static tree"):
        EngineConfig(drafter="synthetic:0.5", tree="dynamic:8")
    with pytest.raises(UserError, match="draft-model"):
        EngineConfig(drafter="synthetic:0.5", draft_model="x")
