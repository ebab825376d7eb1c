"""The rows that fed a head, as recorded: other layers, another position, another token, and a healthy run."""

import dataclasses

import pytest

from specscope.analyze.audit.audit import audit
from specscope.analyze.audit.tally import FED
from specscope.analyze.findings import CheckResult
from specscope.measure.judges import audit_options
from tests.analyze.audit.runs import changed
from tests.faults.planted import FAULTS
from tests.faults.settings import SETTINGS, history, record


def recorded(folder, fault=None):
    """A short run of a head, with a fault or without."""
    setting = SETTINGS["eagle chain" if fault is None else fault.setting]
    return history(record(dataclasses.replace(setting, requests=3, tokens=30), folder / "run.jsonl", fault))


def fed(history):
    """What an audit finds of the rows."""
    return audit(history, "run", audit_options(history, None, None, None)).finding(FED)


@pytest.fixture(scope="module")
def healthy(tmp_path_factory):
    return recorded(tmp_path_factory.mktemp("healthy"))


def test_a_healthy_run_was_fed_what_the_text_gives(healthy):
    check = fed(healthy)
    drafted = sum(part.notes is not None for record in healthy.steps for part in record.requests)
    assert (check.result, check.failed) == (CheckResult.PASSED, 0)
    assert 20 < check.tested <= drafted


LOOKS = {  # of faults
    "layers one lower": "layers 1, 2, 3 instead of 2, 3, 4",
    "layers in another order": "layers 4, 3, 2 instead of 2, 3, 4",
    "features one late": "the hidden states of the position before",
}


@pytest.mark.parametrize("fault", LOOKS)
def test_whose_hidden_states_were_fed_is_said(fault, tmp_path):
    check = fed(recorded(tmp_path, FAULTS[fault]))
    assert check.failed == check.tested > 20
    assert check.about.endswith(f"it looks like {LOOKS[fault]}")


def test_one_token_that_is_not_the_texts_is_named_with_its_step(healthy):
    step = next(part for part in healthy.requests["r1"].steps if part.index > 3 and part.notes is not None)
    tokens = step.notes.fed_token.copy()
    tokens[0] += 1
    other = dataclasses.replace(step, notes=dataclasses.replace(step.notes, fed_token=tokens))
    found = fed(changed(healthy, lambda part: other if part == step else part))
    assert found.failed == 1
    assert (found.example.request, found.example.index) == ("r1", step.index)
    assert f"at position {step.notes.fed_position[0]}, where the text has" in found.detail
