"""Which models are run again under named mistakes: those of which any check of the audit's fails. And how."""

import dataclasses

import pytest
import transformers
from transformers import DynamicCache

from specscope.analyze.audit import audit as audits
from specscope.analyze.audit.model.causal import Causal
from specscope.analyze.audit.options import ModelSource, Options
from specscope.analyze.diagnose.causes import DRAFTER, LOGPROBS, TARGET
from specscope.analyze.diagnose.diagnosis import JudgedCase
from specscope.analyze.diagnose.rerun.target import RIGHT, decoded
from specscope.analyze.diagnose.run import rerun
from specscope.analyze.findings import CheckResult, Finding
from specscope.analyze.verify.trial import Case, judge
from tests.analyze.compare.runs import Made, make
from tests.model.test_architectures import CONFIGS

NOWHERE = Options(ModelSource("/nowhere", "target"), ModelSource("/nowhere", "drafter"))


def test_the_checks_are_called_as_the_audit_calls_them():
    assert {*TARGET} == {*audits.TARGET}
    assert {*DRAFTER} == {*audits.DRAFTER, audits.TREE[0]}


@pytest.mark.parametrize("name", [*TARGET, *DRAFTER])
def test_one_check_that_fails_alone_has_its_model_asked(name):
    """The models are nowhere, so that each that is asked is a problem."""
    history = make(Made(requests=2, tokens=8))
    audited = dataclasses.replace(
        audits.Audit("run", "target", "drafter", "float32", 8, 8, 24, 0.0, 0.0, 0.0, ()),
        findings=(Finding(name, CheckResult.FAILED, "", tested=24, failed=3, unit="node"),),
    )
    problems: list[str] = []
    session = JudgedCase(Case(history, judge(history, source="run")), audited, NOWHERE)
    assert rerun(session, lambda *_: None, problems) == []
    asked = {line.split(":")[0] for line in problems}
    assert ("the target under named mistakes" in asked) == (name in TARGET and name != LOGPROBS)  # its p agrees
    assert ("the drafter under named mistakes" in asked) == (name in DRAFTER)


@pytest.mark.parametrize("name", ["mistral_sliding", "gemma3_mixed"])
def test_a_model_that_is_run_again_sees_as_far_as_its_window(name, tmp_path):
    """Step by step over what the steps before left, and each context by itself: the text is longer than the window."""
    transformers.AutoModelForCausalLM.from_config(CONFIGS[name]()).save_pretrained(tmp_path)
    model, cache, history = Causal(ModelSource(str(tmp_path), name), "float32", "cpu"), DynamicCache(), make(Made())
    steps = [step for step in Case(history, judge(history, source="run")).steps if step.request == "r0"]
    for step in steps:
        rows = decoded(model, step, RIGHT, cache)
        for node in range(-1, len(step.tree)):
            path = step.tree.token[step.tree.path_to(node)].tolist() if node >= 0 else []
            alone = model.alone([*step.text[: step.after], *path])[0][-1]
            assert (rows[node + 1] - alone).abs().max() < 1e-4
    assert steps[-1].after > 8
