"""Drafters from capture to cause: a target's own modules by every verb, and heads that are not what they should be."""

import json

import pytest
import torch
from safetensors.torch import load_file

from benchmarks.freeze.results import run_here
from specscope.analyze.audit.audit import audit
from specscope.analyze.diagnose.causes import Cause
from specscope.analyze.findings import Exit
from specscope.measure import step_costs
from specscope.measure.judges import audit_options
from specscope.plans.kinds import IN_SGLANG
from tests.faults.judged import diagnosed
from tests.faults.models import DRAFT, HEAD, TARGET
from tests.faults.planted import FAULTS
from tests.faults.settings import DRAFTERS, capture, history, short
from tests.measure.head_runs import head_copy


@pytest.fixture(scope="module", params=["mtp tree", pytest.param("mtp chain", marks=pytest.mark.slow)])
def of_modules(request):
    """(the capture, its target) as they are given to a verb."""
    setting = short(request.param)
    return str(capture(setting)), str(setting.target)


def test_all_verbs_work_over_a_targets_own_modules(of_modules, monkeypatch):
    monkeypatch.setattr(step_costs, "SECONDS", 0.0)  # of each measurement of tune
    capture, target = of_modules
    assert run_here(["verify", capture])[0] == 0
    code, out, _ = run_here(["diagnose", capture, "--target", target, "--json"])
    assert code == 0, out
    (found,) = json.loads(out)["captures"]
    assert not found["left_out"]
    for verb, *more in (["report"], ["why"], ["compare", capture], ["tune", "--nodes", "8"]):
        code, out, error = run_here([verb, capture, *more])
        assert code == 0, (verb, error)
        assert "mtp" in out or verb != "report"
    code, _, error = run_here(["diagnose", capture, "--target", target, "--draft-model", str(HEAD)])
    assert code == 2
    assert "drafter mtp is in its target" in error


def test_a_head_that_tells_one_engine_alone_which_layers_feed_it_is_warned_of(tmp_path):
    path = capture(short("eagle chain", requests=1, tokens=8))
    for folder, warns in ((HEAD, False), (head_copy(tmp_path / "head", {IN_SGLANG: None}), True)):
        words = ["diagnose", str(path), "--json", "--target", str(TARGET), "--draft-model", str(folder)]
        (told,) = json.loads(run_here(words)[1])["captures"]
        assert any("SGLang would not find which layers" in line for line in told["warnings"]) is warns


@pytest.mark.parametrize("trained", [True, False], ids=["trained on", "random"])
def test_an_embedding_that_is_random_is_named_and_one_that_was_trained_on_is_not(monkeypatch, tmp_path, trained):
    """It was said to be a weak drafter."""
    own = load_file(TARGET / "model.safetensors")["model.embed_tokens.weight"].float()
    noise = torch.randn(own.shape, generator=torch.Generator().manual_seed(0))
    embedding = own + 0.3 * own.std() * noise if trained else noise
    head = head_copy(tmp_path / "head", tensors=lambda tensors: {**tensors, "embed_tokens.weight": embedding})
    how = {"drafter": "eagle", "draft_model": str(head), "tree": "4"}
    monkeypatch.setitem(DRAFTERS, "eagle chain", how)
    found = diagnosed(capture(short("eagle chain")), short("eagle chain"))
    assert found.exit is (Exit.CONSISTENT if trained else Exit.INCONSISTENT)
    if trained:
        assert Cause.HEAD_EMBEDDING not in [fault.cause for fault in found.faults]
    else:
        assert found.faults[0].cause is Cause.HEAD_EMBEDDING
        assert "mean cosine 0.0" in found.faults[0].for_[0] or "mean cosine -0.0" in found.faults[0].for_[0]


def test_a_choice_among_the_first_tokens_is_told_by_what_the_drafter_would_choose():
    """What is drafted tells nothing; where it differs, the drafter would have chosen a later token."""
    fault = FAULTS["first tokens only"]
    setting = short(fault.setting)
    path = capture(setting, fault)
    options = audit_options(history(path), str(TARGET), str(DRAFT), 100)
    finding = audit(history(path), str(path), options).finding("drafter tokens")
    assert finding.failed > 20
    assert "token id that the drafter would choose >= " in finding.sentence
    assert finding.condition.hits_in == finding.condition.total_in
    assert diagnosed(path, setting).faults[0].cause is Cause.DRAFT_VOCABULARY
