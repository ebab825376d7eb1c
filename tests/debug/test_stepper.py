"""The stepper: an engine under breakpoints, without a session; and a session that finds itself where it left it."""

import pytest

from specscope import Engine, SamplingParams
from specscope.debug.answers import Stop, StopReason
from specscope.debug.breakpoints import Breakpoints
from specscope.debug.session import Session
from specscope.debug.stepper import Stepper
from specscope.trace.history.history import History


@pytest.fixture
def engine(tiny):
    how = {"drafter": "draft_model", "draft_model": "self:2", "tree": "[(0,), (1,), (0, 0), (1, 0)]"}
    engine = Engine(target=str(tiny), dtype="float32", kv_memory=0.02, **how)
    for seed, prompt in enumerate(["abcabcab", "the cat sat on the"]):
        engine.add(prompt, SamplingParams(max_tokens=14, temperature=0.8, seed=seed, ignore_eos=True))
    return engine


def test_it_runs_to_the_end_and_says_so(engine):
    stepper = Stepper(engine, History(), Breakpoints())
    while engine.busy:
        assert stepper.step() is None
    last = stepper.history.steps[-1].step
    assert stepper.step() == Stop(StopReason.END, last, moved=False)
    assert [record.step for record in stepper.history.steps] == list(range(last + 1))


def test_a_breakpoint_stops_it_at_the_step_that_a_session_stops_at(tiny, engine):
    breakpoints = Breakpoints()
    breakpoints.add("reject", "depth == 1")
    stepper = Stepper(engine, History(), breakpoints)
    stop = None
    while stop is None:
        stop = stepper.step()
    assert stop.reason is StopReason.BREAKPOINT
    assert (stop.step, stop.hits[0].text) == (stepper.history.last_step, "break reject if depth == 1")
    over = Session(stepper.history)
    over.breakpoints.add("reject", "depth == 1")
    assert over.cont() == stop


def test_without_breakpoints_a_step_is_the_engines_and_the_append(engine, monkeypatch):
    """Nobody looks at what happened in it, and nobody asks a session."""

    def unwanted(*_, **__):
        raise AssertionError("a run without breakpoints pays for nothing")

    monkeypatch.setattr("specscope.debug.breakpoints.events", unwanted)
    monkeypatch.setattr(Session, "_run", unwanted)
    stepper = Stepper(engine, History(), Breakpoints())
    for _ in range(3):
        assert stepper.step() is None
    stepper.breakpoints.add("draft")
    with pytest.raises(AssertionError, match="pays for nothing"):
        stepper.step()


def test_a_session_is_where_its_stepper_left_the_engine(engine):
    session = Session(engine=engine)
    session.next(3)
    session.breakpoints.add("reject")
    stop = session.cont()
    session.request, session.node = stop.hits[0].request, None
    session.node = stop.hits[0].node
    assert session.node == stop.hits[0].node is not None
    session.breakpoints.delete()
    session.stepper.step()
    assert session.node is None, "the current node is of its step alone"
    assert session.record is session.history.steps[-1]
    assert session.step().phase == "schedule" == session.phase
    session.stepper.step()
    assert session.phase == ""
    at = session.record.step
    session.reverse_next()
    assert session.record.step == at - 1
