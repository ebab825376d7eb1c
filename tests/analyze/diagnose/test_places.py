"""What is located and what has a name, put together; and which models are run again under named mistakes, and how."""

import dataclasses

import pytest
import transformers
from transformers import DynamicCache

from specscope.analyze.audit import audit as audits
from specscope.analyze.audit.model.causal import Causal
from specscope.analyze.audit.options import ModelSource, Options
from specscope.analyze.diagnose.causes import DRAFTER, LOGPROBS, TARGET, Cause
from specscope.analyze.diagnose.diagnosis import Diagnosis, JudgedCase, Suspect, fits
from specscope.analyze.diagnose.rerun.target import RIGHT, decoded
from specscope.analyze.diagnose.run import examine, rerun
from specscope.analyze.findings import CheckResult, Exit, Finding
from specscope.analyze.locate.located import Operation, Proof, Stage, ranked
from specscope.analyze.verify.trial import Case, judge
from specscope.errors import UserError
from specscope.measure.judges import audit_options
from tests.analyze.compare.runs import Made, make
from tests.analyze.locate.locations import wrong
from tests.faults import models
from tests.faults.planted import FAULTS
from tests.faults.settings import DRAFTERS, capture, history, short
from tests.model.test_architectures import CONFIGS

(LOCATED,) = wrong().located  # the drafter's scores


def at(stage, name, certain=True):
    return dataclasses.replace(LOCATED, operation=Operation(stage, name, name), certain=certain)


def suspect(cause):
    return Suspect(cause, Proof.ROWS, ("evidence",))


@pytest.mark.parametrize(
    ("cause", "place", "fitting"),
    [
        (Cause.ROTARY_POSITIONS, at(Stage.DRAFTER, "layers.0.self_attn.query"), True),
        (Cause.ROTARY_POSITIONS, at(Stage.DRAFTER, "layers.0.mlp.down_proj"), False),
        (Cause.ROTARY_POSITIONS, at(Stage.DRAFTER, "layers.0.self_attn.q_proj"), False),
        (Cause.DRAFTER_KV, at(Stage.TARGET, "layers.0.self_attn.query"), False),
        (Cause.TARGET_KV, at(Stage.TARGET, "layers.3.self_attn.keys read"), True),
        (Cause.TARGET_KV, at(Stage.TARGET, "layers.3.post_attention_layernorm"), False),
        (Cause.TARGET_KV, at(Stage.TARGET, "layers.3", certain=False), True),
        (Cause.RULES_WRONG, at(Stage.SAMPLING, "top-p"), True),
        (Cause.DRAFT_VOCABULARY, at(Stage.DRAFTER, "vocabulary"), True),
        (Cause.NOT_A_NUMBER, at(Stage.VERDICT, "p"), True),
        (Cause.SIBLINGS_CHANGED, at(Stage.VERDICT, "q"), True),
        (Cause.SIBLINGS_CHANGED, at(Stage.VERDICT, "p"), False),
        (Cause.PAST_THE_END, at(Stage.VERDICT, "ratio"), False),
    ],
)
def test_a_cause_fits_where_it_shows_first(cause, place, fitting):
    assert fits(cause, place) is fitting


def test_a_place_takes_the_likeliest_name_that_fits_and_the_others_of_its_stage_follow():
    faults = [suspect(Cause.DRAFTER_FED), suspect(Cause.MASK_SIBLINGS), suspect(Cause.COINS)]
    first, second = Diagnosis(tuple(faults), located=(LOCATED,)).placed
    assert (first.place, first.cause.cause) == (LOCATED, Cause.MASK_SIBLINGS)
    assert (second.place, second.cause.cause) == (None, Cause.COINS)


def fault(stage, name, proof, explained=5, spoiled=0):
    counts = {"explained": explained, "spoiled": spoiled, "differing": 112}
    return dataclasses.replace(at(stage, name), proof=proof, **counts)


def test_a_place_stands_before_rows_and_what_explains_the_most_before_what_explains_little():
    walked = fault(Stage.DRAFTER, "walked", Proof.PLACE, 2)
    above = fault(Stage.TARGET, "above", Proof.PLACE, 1)
    all_rows = fault(Stage.VERDICT, "all rows", Proof.ROWS, 112)
    spoils = fault(Stage.VERDICT, "spoils", Proof.ROWS, 112, spoiled=100)
    two = fault(Stage.SAMPLING, "two of two", Proof.ROWS, 2)
    summed = fault(Stage.SAMPLING, "summed", Proof.SUM, 5000)
    order = [item.operation.name for item in ranked([two, summed, spoils, all_rows, walked, above])]
    assert order == ["above", "walked", "all rows", "spoils", "two of two", "summed"]


@pytest.fixture(scope="module")
def run():
    """A run whose head is fed the features of other layers, and the models that judge it."""
    setting = short("eagle chain")
    wrong_run = history(capture(setting, FAULTS["layers one lower"]))
    return wrong_run, audit_options(wrong_run, str(models.TARGET), DRAFTERS[setting.drafter]["draft_model"], 40)


def test_the_place_is_asked_for_where_the_models_disagree(run):
    asked = []

    def locate(session, little):
        asked.append(little)
        return wrong()

    found = examine(run[0], "bad.jsonl", run[1], known=False, locate=locate)
    assert asked == [False]  # the whole search, not the few steps where nothing is wrong
    assert (found.suspects, found.remarks, found.located, found.exit) == ((), (), wrong().located, 1)
    assert found.unexplained == ()  # the drafter's place explains all of the drafter's checks
    assert "locate" in found.looked_at


def test_a_search_that_cannot_be_made_is_said(run):
    def locate(*_):
        raise UserError("there is no head at hand")

    found = examine(run[0], "bad.jsonl", run[1], known=False, locate=locate)
    assert "locate: there is no head at hand" in found.left_out
    assert found.exit is Exit.INCONSISTENT


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
