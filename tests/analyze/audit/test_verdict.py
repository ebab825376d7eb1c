"""The audit's sentence: each check that fails accuses the model that it is about, and no other."""

import pytest

from specscope.analyze.audit.audit import TREE, verdict
from specscope.analyze.audit.tally import DRAFTER, EMBEDDING, TARGET
from specscope.analyze.findings import CheckResult, Finding


@pytest.mark.parametrize("name", [*TARGET, *DRAFTER, TREE[0], EMBEDDING[0]])
def test_a_check_accuses_its_own_model(name):
    every = (*TARGET, *DRAFTER)
    findings = [Finding(other, CheckResult.PASSED, "", tested=9, unit="node") for other in every if other != name]
    findings.append(Finding(name, CheckResult.FAILED, "", tested=9, failed=2, unit="node"))
    accused, other = ("target", "drafter") if name in TARGET else ("drafter", "target")
    sentence = verdict(findings, 3, ())
    assert f"The {accused} does not agree: {name} differs at 2 of 9 nodes." in sentence
    assert f"The {other} agrees at 9 nodes of 3 steps." in sentence
