"""Real engines compared: the same run in other batches, with preemptions, and with other drafters."""

import pytest

from specscope.analyze.compare.comparison import compare
from specscope.analyze.compare.result import Sameness
from specscope.analyze.compare.side import from_history
from specscope.trace.record.params import SamplingParams
from tests.analyze.audit.runs import drained
from tests.engines import DRAFTERS, PROMPTS, each_drafter, fresh
from tests.faults.planted import FAULTS


def ran(engine, *, batch=3, temperature=1.0):
    """A run of some prompts as a side."""
    fresh(engine, 64)
    before, engine.scheduler.max_batch = engine.scheduler.max_batch, batch
    for number, prompt in enumerate(PROMPTS[:3]):
        params = SamplingParams(temperature=temperature, seed=number, max_tokens=20, ignore_eos=True)
        engine.add(prompt, params)
    history, engine.scheduler.max_batch = drained(engine), before
    return from_history(history, "run")


@pytest.mark.every(4)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("name", each_drafter(DRAFTERS))
def test_the_batch_changes_nothing(bench, name, temperature):
    engine = bench.engine(name)
    a = ran(engine, temperature=temperature)
    found = compare(a, ran(engine, batch=1, temperature=temperature))
    assert found.answer is Sameness.SAME, (found.summary, found.reasons)
    assert found.nodes > 50
    assert {field.name for field in found.fields if field.suspect} == set()
    assert any(one.name == "requests in a step, mean" for one in found.differences)


@pytest.mark.parametrize("name", ["eagle", "eagle dynamic", "draft tree"])
def test_drafts_at_the_positions_of_their_children_are_different(bench, name, monkeypatch):
    """The outputs are the same, and acceptance hardly is another: the drafter's own probabilities tell."""
    engine = bench.engine(name)
    a = ran(engine, temperature=0.0)
    assert compare(a, ran(engine, temperature=0.0)).answer is Sameness.SAME
    FAULTS["nodes one position further"].install(monkeypatch, engine)
    found = compare(a, ran(engine, temperature=0.0))
    marked = {field.name for field in found.fields if field.suspect}
    assert "draft p" in marked
    assert found.answer is Sameness.DIFFERENT
    assert not marked & {"target p", "target p, raw", "coin", "verdict"}


@pytest.mark.parametrize("temperature", [0.0, 0.2], ids=["greedy", "sampled"])
def test_other_drafters_have_the_same_target(bench, temperature):
    sides = {
        name: ran(bench.engine(name), temperature=temperature) for name in ("none", "draft tree", "eagle", "ngram")
    }
    for name in ("none", "eagle", "ngram"):
        found = compare(sides["draft tree"], sides[name])
        fields = {field.name: field for field in found.fields}
        assert fields["target p"].compared > 0
        assert fields["target p"].differ == 0
        assert not any(cause.suspect for cause in found.partings)
        assert found.differences[0].name in ("drafts", "drafter")
        if temperature == 0:
            assert all(pair.same for pair in found.pairs)
