"""A fork of another engine's request in one of ours: here the other is ours too, so that the answer is known."""

import dataclasses

import pytest

from specscope import Engine, SamplingParams
from specscope.debug.session import Session
from specscope.engine.config import EngineConfig
from specscope.errors import UserError
from specscope.live.beside import BesideEngine, like
from specscope.live.fork import beside as beside_engine
from specscope.live.local import EngineWhatIf, session_over
from specscope.remote.debug_server import context
from specscope.trace.changes import Changes
from specscope.trace.wire.reading import read_capture
from tests.tiny import write_tiny_model

SETTINGS = {"drafter": "draft_model", "draft_model": "self:1", "tree": "4", "dtype": "float32", "kv_memory": 0.01}


@pytest.fixture
def stopped(tiny):
    """An engine in the midst of two requests, with its session."""
    engine = Engine(target=str(tiny), **SETTINGS)
    session = session_over(engine)
    for seed, prompt in enumerate(("abcabcabcab", "hello hello hel")):
        engine.add(prompt, SamplingParams(temperature=0.9, seed=seed, max_tokens=60))
    session.next(7)
    session.request = "r1"
    return engine, session


def told(session, folder):
    """The session that a client has of it: one request, from a capture."""
    path = folder / "context.jsonl"
    path.write_text(context(session))
    history = read_capture(str(path)).history
    assert list(history.requests) == [session.request]
    return Session(history, position=len(history.steps) - 1, request=session.request)


@pytest.mark.parametrize("words", [["accept=0"], ["token=65"], ["temperature=0"], ["seed=9"]])
def test_it_gives_what_a_fork_in_the_same_engine_gives(stopped, tiny, tmp_path, words):
    engine, session = stopped
    expected = EngineWhatIf(engine).fork(session, [*words, "tokens=20"])
    beside = BesideEngine(EngineConfig(target=str(tiny), **SETTINGS), lambda stage: None)
    client = told(session, tmp_path)
    found = beside.fork(client, [*words, "tokens=20"])
    assert found.outputs == expected.outputs
    assert found.changes == expected.changes
    assert found.forced == expected.forced
    assert found.describe(client.history.vocabulary) == expected.describe(session.history.vocabulary)


@pytest.mark.parametrize(
    ("words", "drafter"),
    [
        ({"tree": "4"}, "draft_model"),  # beside a text there are dynamic trees alone
        ({"tree": "4", "rule": "block"}, "draft_model"),
        ({"tree": "dynamic:9"}, "suffix+draft_model"),
        ({"drafter": "ngram"}, "ngram"),
        ({"drafter": "draft_model", "draft_model": "self:1"}, "draft_model"),
    ],
)
def test_an_engine_beside_one_that_drafts_from_text_and_model(tiny, words, drafter):
    how = {"draft_model": "self:1", "tree": "dynamic:6", "dtype": "float32", "kv_memory": 0.01}
    engine = Engine(target=str(tiny), drafter="suffix+draft_model", **how)
    other = beside_engine(engine, Changes(engine=words))
    assert (other.drafter.name, other.config.drafter) == (drafter, drafter)
    assert other.run_info.rule == words.get("rule", "standard")


def test_another_engine_waits_for_no_measurement(stopped, tiny, tmp_path):
    """While a fork's engine loads, vLLM and its clients stand still: what a step costs is not measured meanwhile."""
    _, session = stopped
    costs, stages = tmp_path / "costs.json", []
    how = SETTINGS | {"tree": "dynamic:4,depth=2,top=2", "adaptive": True, "costs": str(costs)}
    beside = BesideEngine(EngineConfig(target=str(tiny), **how), stages.append)
    assert beside.fork(told(session, tmp_path), ["token=65", "tokens=5"]).outputs
    assert not [stage for stage in stages if "measuring" in stage]
    assert not costs.exists()


def test_without_names_the_models_are_those_of_the_other_engine(stopped, tiny, tmp_path):
    _, session = stopped
    run = dataclasses.replace(session.history.run, tree="sampled:4")
    assert like(EngineConfig(), run) == EngineConfig(
        target=str(tiny), drafter="draft_model", draft_model="self:1", tree="sampled:4", dtype="float32", adaptive=False
    )
    other = dataclasses.replace(run, drafter="medusa", draft_path="HEADS")
    assert like(EngineConfig(), other).drafter == "none"
    named = EngineConfig(target=str(tiny), drafter="ngram", tree="2x2")
    assert like(named, run) == dataclasses.replace(named, adaptive=False)
    gone = dataclasses.replace(run, target_path=str(tmp_path / "gone"))
    assert like(EngineConfig(), gone) == dataclasses.replace(EngineConfig(), adaptive=False)
    beside = BesideEngine(EngineConfig(kv_memory=0.01), lambda stage: None)
    assert beside.fork(told(session, tmp_path), ["temperature=0", "tokens=5"]).outputs


def test_another_model_is_refused(stopped, tmp_path):
    _, session = stopped
    other = write_tiny_model(tmp_path / "other", seed=7)
    beside = BesideEngine(EngineConfig(target=str(other), **SETTINGS), lambda stage: None)
    with pytest.raises(UserError, match="the models are not the same"):
        beside.fork(told(session, tmp_path), ["accept=0"])


def test_a_context_that_is_partly_known_is_refused(stopped, tiny, tmp_path):
    _, session = stopped
    client = told(session, tmp_path)
    request = client.history.requests["r1"]
    request.info = None
    beside = BesideEngine(EngineConfig(target=str(tiny), **SETTINGS), lambda stage: None)
    with pytest.raises(UserError, match="only partly known"):
        beside.fork(client, ["accept=0"])
