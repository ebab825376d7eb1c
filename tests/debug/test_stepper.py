"""An engine under breakpoints, a step at a time, as a worker runs it; and a session that finds itself there."""

import pytest

from specscope import Engine, SamplingParams
from specscope.debug.session import Session


@pytest.fixture
def engine(tiny):
    how = {"drafter": "draft_model", "draft_model": "self:2", "tree": "[(0,), (1,), (0, 0), (1, 0)]"}
    engine = Engine(target=str(tiny), dtype="float32", kv_memory=0.02, **how)
    for seed, prompt in enumerate(["abcabcab", "the cat sat on the"]):
        engine.add(prompt, SamplingParams(max_tokens=14, temperature=0.8, seed=seed, ignore_eos=True))
    return engine


def test_without_breakpoints_a_step_is_the_engines_and_the_append(engine, monkeypatch):
    """Nobody looks at what happened in it, and nobody asks a session."""

    def unwanted(*_, **__):
        raise AssertionError("a run without breakpoints pays for nothing")

    monkeypatch.setattr("specscope.debug.breakpoints.events", unwanted)
    monkeypatch.setattr(Session, "_run", unwanted)
    stepper = Session(engine=engine)
    for _ in range(3):
        assert stepper.advance() is None
    stepper.breakpoints.add("draft")
    with pytest.raises(AssertionError, match="pays for nothing"):
        stepper.advance()
