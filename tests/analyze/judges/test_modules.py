"""A target's own next-token modules, from capture to cause: every verb over 20 prompts, and where faults lie."""

import dataclasses
import json

import pytest

from benchmarks.freeze.results import run_here
from specscope.analyze.diagnose.diagnosis import JudgedCase
from specscope.analyze.locate.located import Stage
from specscope.analyze.verify.trial import Case, judge
from specscope.measure.judges import audit_options
from specscope.measure.locate.locate import locate
from tests.faults.fault import in_every_engine
from tests.faults.models import HEAD
from tests.faults.planted import FAULTS
from tests.faults.settings import SETTINGS, history, record
from tests.measure.locate.test_drafter import NOTHING


@pytest.fixture(scope="module", params=["mtp tree", pytest.param("mtp chain", marks=pytest.mark.slow)])
def run(request, tmp_path_factory):
    """(the capture, its target)."""
    setting = dataclasses.replace(SETTINGS[request.param], requests=20, tokens=40)
    return record(setting, tmp_path_factory.mktemp("run") / "run.jsonl"), setting.target


def test_a_healthy_run_passes_verify_and_diagnose(run):
    capture, target = run
    assert run_here(["verify", str(capture)])[0] == 0
    code, out, _ = run_here(["diagnose", str(capture), "--target", str(target), "--json"])
    assert code == 0, out
    (found,) = json.loads(out)["captures"]
    assert not found["left_out"]


def test_the_other_verbs_work(run):
    capture, target = run
    for verb in (["report"], ["why"], ["compare", str(capture)], ["tune"]):
        code, out, error = run_here([verb[0], str(capture), *verb[1:]])
        assert code == 0, (verb, error)
        assert "mtp" in out or verb[0] != "report"
    code, _, error = run_here(["diagnose", str(capture), "--target", str(target), "--draft-model", str(HEAD)])
    assert code == 2
    assert "drafter mtp is in its target" in error


def located(name, folder, stages=(Stage.DRAFTER,)):
    """What a walk over a fault's run finds."""
    fault = FAULTS[name]
    setting = dataclasses.replace(SETTINGS[fault.setting], requests=3, tokens=30)
    made = history(record(setting, folder / "run.jsonl", fault))
    options = audit_options(made, str(setting.target), None, None)
    with in_every_engine(fault.install):
        session = JudgedCase(Case(made, judge(made, source="run")), NOTHING, options)
        return locate(session, stages=stages)


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("no norm of the state", "hnorm"),
        ("state before embedding", "eh_proj"),
        ("modules' nodes one further", "positions"),
    ],
)
def test_a_fault_is_located_at_its_operation(name, place, tmp_path):
    (found,) = located(name, tmp_path).located
    assert found.operation.name == place


def test_several_modules_are_judged_and_not_walked(tmp_path):
    """And the target all the same."""
    found = located("modules in another order", tmp_path, (Stage.TARGET, Stage.DRAFTER))
    assert not found.located
    (why,) = found.left_out
    assert why.startswith("drafter: 2 next-token modules draft a depth each: ")
    assert any(line.startswith("the target: ") for line in found.ruled_out)
