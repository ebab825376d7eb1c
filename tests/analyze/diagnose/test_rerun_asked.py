"""Which models are run again under named mistakes: those of which any check of the audit's fails."""

import dataclasses

import pytest

from specscope.analyze.audit import audit as audits
from specscope.analyze.audit.options import ModelSource, Options
from specscope.analyze.diagnose.causes import DRAFTER, LOGPROBS, TARGET
from specscope.analyze.diagnose.run import rerun
from specscope.analyze.findings import CheckResult, Finding
from specscope.analyze.verify.case import Case
from specscope.analyze.verify.trial import judge
from tests.analyze.compare.runs import Made, make

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
    case = Case(history, judge(history, source="run"))
    assert rerun(case, audited, NOWHERE, lambda *_: None, problems) == []
    asked = {line.split(":")[0] for line in problems}
    assert ("the target under named mistakes" in asked) == (name in TARGET and name != LOGPROBS)  # its p agrees
    assert ("the drafter under named mistakes" in asked) == (name in DRAFTER)
