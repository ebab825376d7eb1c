"""Whether steps draft: switched off, or off under load; and that drafting comes back whole."""

import numpy as np
import pytest

from specscope import SamplingParams
from specscope.engine.scheduler import SpeculationGate
from tests.engine.test_pipeline import run
from tests.engines import PROMPTS


def test_it_does_not_flap():
    """Load that swings by one request around the limit changes it once (vLLM 49548: at every step)."""
    gate = SpeculationGate(disable_above=8)
    swing = [7, 8, 9, 8, 9, 7, 8, 9, 8, 7, 9]
    assert [bool(gate.why_off(n)) for n in swing] == [False, False] + [True] * 9
    assert (gate.why_off(9), gate.why_off(7)) == ("decoding requests above 8", "decoding requests still above 6")
    assert not gate.why_off(6)
    assert [bool(gate.why_off(n)) for n in (7, 8, 7, 8)] == [False] * 4


@pytest.mark.every(3)
@pytest.mark.parametrize("name", ["ngram", "suffix", "draft tree", "eagle", "p-eagle dynamic"])
def test_it_goes_off_under_load_and_says_why(make, engines, name):
    engine = make(name, disable_above=1)
    for i, prompt in enumerate(PROMPTS):
        engine.add(prompt, SamplingParams(max_tokens=20, seed=i, ignore_eos=True))
    records = run(engine)
    ends = {end.info.id: end.output.tolist() for record in records for end in record.finished}
    plain = engines["none"].generate(PROMPTS, SamplingParams(max_tokens=20, ignore_eos=True))
    assert [ends[f"r{i}"] for i in range(len(PROMPTS))] == [result.token_ids for result in plain]
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
def test_a_drafter_is_caught_up_when_drafting_returns(make, name):
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
