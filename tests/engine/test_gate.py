"""Whether steps draft: switched off, or off under load; and that drafting comes back whole."""

import numpy as np
import pytest

from specscope import Engine, SamplingParams
from specscope.engine.config import EngineConfig
from specscope.engine.scheduler import SpeculationGate
from specscope.errors import UserError
from tests.engine.test_pipeline import make, run  # noqa: F401
from tests.engines import PROMPTS


def test_it_does_not_flap():
    """Load that swings by one request around the limit changes it once (vLLM 49548: at every step)."""
    gate = SpeculationGate(disable_above=8)
    swing = [7, 8, 9, 8, 9, 7, 8, 9, 8, 7, 9]
    assert [bool(gate.why_off(n)) for n in swing] == [False, False] + [True] * 9
    assert (gate.why_off(9), gate.why_off(7)) == ("decoding requests above 8", "decoding requests still above 6")
    assert not gate.why_off(6)
    assert [bool(gate.why_off(n)) for n in (7, 8, 7, 8)] == [False] * 4


def greedy(engine, tokens=30, prompts=PROMPTS):
    for i, prompt in enumerate(prompts):
        engine.add(prompt, SamplingParams(max_tokens=tokens, seed=i, ignore_eos=True))
    return run(engine)


def outputs(records):
    return {end.info.id: end.output.tolist() for record in records for end in record.finished}


@pytest.mark.every(3)
@pytest.mark.parametrize("name", ["ngram", "suffix", "draft tree", "eagle", "p-eagle dynamic"])
def test_it_goes_off_under_load_and_says_why(make, name):  # noqa: F811
    engine = make(name, disable_above=1)
    records = greedy(engine)
    assert outputs(records) == outputs(greedy(make("none")))
    for record in records:
        drafted = any(len(part.tree) for part in record.requests)
        assert not (drafted and not record.speculation)
        assert record.speculation == (not record.speculation_off)
    why = {record.speculation_off for record in records}
    assert {"", "decoding requests above 1"} <= why
    last = [record for record in records if record.speculation][-5:]
    assert any(len(part.tree) for record in last for part in record.requests)  # on again for the last request


@pytest.mark.every(3)
@pytest.mark.parametrize("name", ["draft tree", "eagle", "p-eagle", "ngram", "suffix"])
def test_a_drafter_is_caught_up_when_drafting_returns(make, name):  # noqa: F811
    """TensorRT-LLM 16888: acceptance stayed low for the rest of the request. Here the trees are those of no gap."""
    trees = []
    for gap in (range(0), range(6, 19)):
        engine = make(name)
        engine.add("hello hello hel", SamplingParams(max_tokens=60, ignore_eos=True))
        by_place = {}
        while engine.busy:
            engine.gate.chosen = engine.steps not in gap
            for part in engine.step().requests:
                assert not (len(part.tree) and not engine.gate.chosen)
                if part.verdict is not None and len(part.tree):
                    notes = () if part.notes is None else part.notes.prob.tolist()
                    by_place[part.position] = (part.tree.token.tolist(), part.tree.parent.tolist(), notes)
        trees.append(by_place)
    whole, gapped = trees
    common = [place for place in gapped if place in whole and place > 40]
    assert len(common) > 3
    for place in common:
        assert gapped[place][:2] == whole[place][:2]
        assert np.allclose(gapped[place][2], whole[place][2], atol=1e-5)


def test_what_does_not_fit_together_is_refused():
    with pytest.raises(UserError, match="unknown speculation 'maybe': use on, off"):
        EngineConfig(speculation="maybe")
    with pytest.raises(UserError, match="disable_above"):
        Engine(disable_above=0)
