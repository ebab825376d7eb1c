"""The rows that fed a head, as recorded: other layers, another position, another token, and a healthy run."""

import dataclasses

import pytest

from specscope.analyze.audit.audit import FED, audit
from specscope.analyze.findings import CheckResult
from specscope.measure.judges import audit_options
from specscope.model.features import AuxHiddenStates
from specscope.trace.history.history import History
from specscope.trace.wire.reading import read_capture
from tests.faults.models import HEAD
from tests.faults.planted.features import one_late
from tests.measure.head_runs import served


def fed(history):
    """What an audit finds of the rows."""
    return audit(history, "run", audit_options(history, None, None, None)).finding(FED)


@pytest.fixture(scope="module")
def healthy(tmp_path_factory):
    return read_capture(served(tmp_path_factory.mktemp("healthy") / "run.jsonl", HEAD)).history


def test_a_healthy_run_was_fed_what_the_text_gives(healthy):
    check = fed(healthy)
    drafted = sum(part.notes is not None for record in healthy.steps for part in record.requests)
    assert (check.result, check.failed) == (CheckResult.PASSED, 0)
    assert 20 < check.tested <= drafted


LAYERS = [lambda layers: [layer - 1 for layer in layers], lambda layers: list(reversed(layers))]


@pytest.mark.parametrize(("change", "looks"), zip(LAYERS, ("1, 2, 3", "4, 3, 2"), strict=True))
def test_an_engine_that_fed_other_layers(change, looks, tmp_path):
    def install(engine):
        aux = engine.runner._aux
        aux.close()
        engine.runner._aux = AuxHiddenStates(engine.runner.loaded.model, change(aux.aux_layers))

    check = fed(read_capture(served(tmp_path / "run.jsonl", HEAD, install=install)).history)
    assert check.failed == check.tested > 20
    assert check.about.endswith(f"it looks like layers {looks} instead of 2, 3, 4")


def test_an_engine_that_fed_features_one_late(tmp_path, monkeypatch):
    path = served(tmp_path / "run.jsonl", HEAD, install=lambda engine: one_late(monkeypatch, engine))
    check = fed(read_capture(path).history)
    assert check.failed == check.tested
    assert check.about.endswith("it looks like the hidden states of the position before")


def test_one_token_that_is_not_the_texts_is_named_with_its_step(healthy):
    changed = History(run=healthy.run, vocabulary=healthy.vocabulary)
    step = next(part for part in healthy.requests["r1"].steps if part.index > 3 and part.notes is not None)
    tokens = step.notes.fed_token.copy()
    tokens[0] += 1
    other = dataclasses.replace(step, notes=dataclasses.replace(step.notes, fed_token=tokens))
    for record in healthy.steps:
        parts = tuple(other if part == step else part for part in record.requests)
        changed.append(dataclasses.replace(record, requests=parts))
    found = fed(changed)
    assert found.failed == 1
    assert (found.example.request, found.example.index) == ("r1", step.index)
    assert f"at position {step.notes.fed_position[0]}, the text has" in found.detail
