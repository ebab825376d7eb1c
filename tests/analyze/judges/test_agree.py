"""No two judges contradict each other, over any capture; and drafters from capture to cause, by every verb."""

import json

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from benchmarks.freeze.results import run_here
from specscope.analyze.audit.audit import audit
from specscope.analyze.compare.comparison import compare
from specscope.analyze.compare.result import Sameness
from specscope.analyze.compare.side import from_history
from specscope.analyze.diagnose.causes import Cause
from specscope.analyze.diagnose.run import examine
from specscope.analyze.findings import Exit
from specscope.measure import step_costs
from specscope.measure.judges import audit_options
from specscope.plans.kinds import IN_SGLANG
from tests.analyze.edits import changed, of, put, sample
from tests.faults.judged import diagnosed
from tests.faults.models import DRAFT, HEAD, TARGET
from tests.faults.planted import FAULTS
from tests.faults.settings import DRAFTERS, capture, history, short
from tests.measure.head_runs import head_copy

NAMES = ("sampled", "eagle", "ngram")
FIELDS = ("p", "p_trial", "q_trial", "accept_prob", "coin", "residual_mass", "outcome")
VALUES = (0.0, 1.0, 0.3, 1.5, -0.25, float("nan"), float("inf"))


def contradictions(history):
    """What two judges say that cannot both be so, in lines."""
    found = examine(history, "run.jsonl")
    trial = found.stages["verify"]
    failed = {check.name for check in trial.failed}
    lines = [f"{line}" for line in found.left_out if "could not be asked" in line]
    # What verify convicts, diagnose reports: by a fault from which it follows, or as unexplained
    for name in failed:
        named = any(name in fault.cause.follows for fault in found.faults)
        told = any(f"{name}:" in line or name in line for line in found.unexplained)
        if not named and not told:
            lines.append(f"{name} failed, and diagnose says nothing of it")
    # What diagnose names, some check of verify or audit failed, or something was run again
    for fault in found.faults:
        if not fault.rerun and not (fault.cause.follows & failed):
            lines.append(f"{fault.cause.label} is named, and no check failed that follows from it")
    if failed and found.exit is not Exit.INCONSISTENT:
        lines.append(f"{sorted(failed)} failed, and diagnose exits with {found.exit}")
    if found.exit is Exit.INCONSISTENT and not failed and not any(f.rerun for f in found.faults):
        lines.append("diagnose convicts, and no judge does")
    if (trial.exit is Exit.INCONSISTENT) != bool(failed):
        lines.append(f"verify exits with {trial.exit}, and {len(failed)} checks failed")
    for remark in found.remarks:
        if remark.cause in [fault.cause for fault in found.faults]:
            lines.append(f"{remark.cause.label} is a fault and a remark")
    return lines


def spoiled(field, value, place):
    """A value of the evidence replaced: of the right type, and whatever it is."""

    def values(part):
        array = getattr(part.verdict, field)
        return put(array, place % len(array), place % 3 if field == "outcome" else value)

    return of(lambda part: len(part.tree), **{f"verdict__{field}": values})


OTHERWISE = [  # steps that say other things of themselves: positions, blocks, paths, final tokens, params
    of(context_len=lambda part: part.context_len + 1),
    of(emitted=lambda part: max(part.emitted - 1, 0)),
    of(moved=lambda part: part.moved[:0]),
    of(blocks=lambda part: part.blocks[::-1]),
    of(preceded=None),
    of(verdict__token=7),
    of(verdict__final_p=0.5),
    of(verdict__path=lambda part: part.verdict.path[:0]),
    of(tree__token=lambda part: part.tree.token + 1),
    of(tree__q=lambda part: part.tree.q / 2),
    of(parents=None),
]
DAMAGE = st.builds(spoiled, st.sampled_from(FIELDS), st.sampled_from(VALUES), st.integers(0, 5))


def damaged(edits, most):
    """Sample captures with an edit in some steps, at most so many."""
    steps = st.sets(st.integers(0, 60), min_size=1, max_size=most)
    return st.builds(changed, st.sampled_from(NAMES).map(sample), edits, steps)


@settings(max_examples=8, suppress_health_check=list(HealthCheck))
@given(damaged(DAMAGE, 4) | damaged(st.sampled_from(OTHERWISE), 60))
def test_damaged_captures_and_misplaced_steps(history):
    assert contradictions(history) == []


@pytest.mark.parametrize("name", [*NAMES, "evidence", "planted"])
def test_the_samples(name):
    assert contradictions(sample(name)) == []


@settings(max_examples=8, suppress_health_check=list(HealthCheck))
@given(damaged(DAMAGE, 4))
def test_no_difference_means_that_nothing_is_marked(history):
    """compare: "the same" is said where no row of any table is starred or marked."""
    whole = sample("sampled")
    beside = history if history.run.run_id == whole.run.run_id else whole
    found = compare(from_history(whole, "a"), from_history(beside, "b"))
    marked = [field.name for field in found.fields if field.suspect]
    starred = [figure.name for figure in found.figures if figure.significant]
    starred += [figure.name for each in found.groups.values() for figure in each if figure.significant]
    if found.answer is Sameness.SAME:
        assert not marked
        assert not starred
    if marked or starred:
        assert found.answer is Sameness.DIFFERENT


@pytest.fixture(scope="module", params=["mtp tree", pytest.param("mtp chain", marks=pytest.mark.slow)])
def of_modules(request):
    """(the capture, its target) as they are given to a verb."""
    setting = short(request.param, requests=2)
    return str(capture(setting)), str(setting.target)


@pytest.mark.slow
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
