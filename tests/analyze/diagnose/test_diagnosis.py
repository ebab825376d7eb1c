"""Ranking, exit codes, and what is said where something is wrong that fits no cause."""

import dataclasses
from itertools import count

import pytest
import torch

from specscope.analyze.compare.comparison import compare
from specscope.analyze.compare.fields import FEATURES
from specscope.analyze.compare.result import Sameness
from specscope.analyze.compare.side import from_history
from specscope.analyze.diagnose.causes import Cause
from specscope.analyze.diagnose.diagnosis import Grade, Suspect, merged
from specscope.analyze.diagnose.run import examine
from specscope.analyze.findings import CheckResult, Exit
from specscope.analyze.locate.located import Proof
from specscope.model.batch import NO_TREE, Segment
from specscope.speculate.drafters.eagle import Eagle
from specscope.speculate.drafters.model_drafter import DraftModel, ModelDrafter
from tests.analyze.judges.edits import case_of
from tests.faults.fault import Fault, replaced
from tests.faults.judged import diagnosed
from tests.faults.planted import FAULTS
from tests.faults.settings import SETTINGS, history, record


def test_the_evidence_for_a_cause_is_told_together_the_surest_first():
    some = [Suspect(Cause.COINS, Proof.SUM, ("some coins",)), Suspect(Cause.COINS, Proof.ROWS, ("coins",))]
    (found,) = merged(some)
    assert (found.for_, found.proof) == (("coins", "some coins"), Proof.ROWS)


@pytest.mark.parametrize(
    ("proof", "counts", "grade"),
    [
        (Proof.ROWS, (9, 9, 0), Grade.PROVEN),
        (Proof.ROWS, (9, 9, 1), Grade.POSSIBLE),
        (Proof.ROWS, (90, 90, 9), Grade.LIKELY),
        (Proof.ROWS, (8, 9, 0), Grade.POSSIBLE),
        (Proof.CONDITION, (9, 9, 0), Grade.LIKELY),
        (Proof.SUM, (9, 9, 0), Grade.POSSIBLE),
    ],
)
def test_how_sure_a_cause_is_follows_from_what_it_explains_and_spoils(proof, counts, grade):
    explained, of, spoiled = counts
    one = Suspect(Cause.TOKEN_LOST, proof, (), explained=explained, of=of, spoiled=spoiled)
    told = one.to_dict("run.jsonl")
    assert (told["grade"], told["explained"], told["of"], told["spoiled"]) == (grade.value, *counts)


@replaced(Segment, "of_tree")
def positions_past_100(of_tree, table, context, tokens, tree=NO_TREE, *, logits):
    """The target's own positions are wrong from some length on: none of the causes that are known."""
    segment = of_tree(table, context, tokens, tree, logits=logits)
    if len(tree) and context > 100:
        segment.positions = segment.positions - 16
    return segment


def test_what_fits_no_cause_is_said_with_its_condition(tmp_path):
    setting = SETTINGS["model chain long"]
    fault = Fault("unknown", Cause.TOKEN_LOST, positions_past_100, "model chain long")
    found = diagnosed(record(setting, tmp_path / "unknown.jsonl", fault), setting)
    assert found.exit is Exit.INCONSISTENT
    assert not found.faults
    assert any("context length >= 10" in line for line in found.unexplained), found.unexplained


def test_compare_shows_what_no_check_can(tmp_path):
    """Layers of another height break no rule: without the models only a good run beside it tells."""
    setting = SETTINGS["eagle chain"]
    good = history(record(setting, tmp_path / "good.jsonl"))
    bad = history(record(setting, tmp_path / "bad.jsonl", FAULTS["layers one lower"]))
    assert examine(bad).exit is Exit.CONSISTENT
    beside = compare(from_history(good, "good"), from_history(bad, "bad"))
    assert beside.answer is Sameness.DIFFERENT
    assert beside.summary.startswith("B gets fewer tokens per draft than A: ")
    assert {field.name for field in beside.fields if field.suspect and field.differ} & {"draft p", "draft tree"}
    assert compare(from_history(good, "good"), from_history(good, "good")).answer is not Sameness.DIFFERENT


def repeated(patch, engine):
    """A buffer that is written once: from the second call on each row holds what the first call left in it."""
    observe, first = Eagle.observe, {}

    def stale(self, request, start, features, tokens):
        kept = first.setdefault(request, features[-1:])
        observe(self, request, start, features if not start else kept.expand_as(features), tokens)

    patch.setattr(Eagle, "observe", stale)


def a_step_late(patch, engine):
    """Accepted tokens get the features that the step before made."""
    observe, last = Eagle.observe, {}

    def late(self, request, start, features, tokens):
        before = last.get(request, features)
        last[request] = features
        observe(self, request, start, before[-len(features) :] if len(before) >= len(features) else features, tokens)

    patch.setattr(Eagle, "observe", late)


@replaced(ModelDrafter, "_begin")
def counted(begin, drafter, context):
    """A request's first draft takes 69 tokens of its prompt for cached that no pass was given."""
    drafting = begin(drafter, context)
    if drafting is not None and not drafting.cached and len(context.tokens) > 69:
        drafting.state.computed = drafting.cached = 69
    return drafting


def no_numbers(patch, engine):
    """One row in seven passes of the drafter is NaN."""
    run_pass, passes = DraftModel.run_pass, count(1)

    def spoiled(self, *given):
        made = run_pass(self, *given)
        if next(passes) % 7 == 0:
            made.logits[0] = float("nan")
        return made

    patch.setattr(DraftModel, "run_pass", spoiled)


def first_pass_tells(patch, engine):
    """Positions that are one high while decoding; in passes after the first, something that no mistake gives."""
    run_pass = ModelDrafter.run_pass

    def spoiled(self, *given):
        is_later = bool(self.passes)
        made = run_pass(self, *given)
        noise = torch.arange(made.logits.shape[-1]).sin() / 5
        return dataclasses.replace(made, logits=made.logits + noise) if is_later else made

    FAULTS["high while decoding"].install(patch, engine)
    patch.setattr(ModelDrafter, "run_pass", spoiled)


def test_a_mistake_is_named_by_the_first_pass_where_later_ones_show_something_else(tmp_path):
    setting = short("eagle chain")
    fault = Fault("first pass", Cause.ROTARY_POSITIONS, first_pass_tells, "eagle chain")
    found = diagnosed(record(setting, tmp_path / "capture.jsonl", fault), setting)
    assert found.suspects[0].cause is Cause.ROTARY_POSITIONS
    assert "one position too far" in found.suspects[0].for_[0]


OF_STATE = (
    Fault("a step late", Cause.DRAFTER_FED, a_step_late, "eagle chain"),
    Fault("counted", Cause.DRAFTER_KV, counted, "model chain"),
    Fault("no numbers", Cause.NOT_A_NUMBER, no_numbers, "model chain"),
)


@pytest.mark.parametrize("fault", OF_STATE, ids=lambda fault: fault.name)
def test_a_drafters_state_is_named_from_the_capture_alone(fault, tmp_path):
    found = examine(history(record(short(fault.setting), tmp_path / "capture.jsonl", fault)))
    assert [suspect.cause for suspect in found.suspects] == [fault.cause]


def short(name):
    return dataclasses.replace(SETTINGS[name], requests=4, tokens=40)


def test_what_fed_the_head_names_features_that_are_zero_or_repeated(tmp_path):
    """From the capture alone, without a model."""
    stale = Fault("features repeated", Cause.DRAFTER_FED, repeated, "eagle chain")
    for one in (FAULTS["features of roots only"], FAULTS["no features"], FAULTS["features normalised"], stale):
        found = examine(history(record(short(one.setting), tmp_path / "capture.jsonl", one)))
        assert found.suspects[0].cause is one.cause
        assert found.suspects[0].for_[0].startswith("features fed: ")
    healthy = case_of(history(record(short("eagle tree"), tmp_path / "healthy.jsonl")))
    assert healthy.checks["features fed"].result is CheckResult.PASSED
    assert healthy.checks["features fed"].unit == "row"


@pytest.mark.slow
def test_compare_shows_other_features(tmp_path):
    """One late, taken from the wrong rows, from other layers: each has the norms of something else."""
    good = {}
    for name in ("features one late", "features by index", "layers one lower", "layers in another order"):
        one = FAULTS[name]
        if one.setting not in good:
            good[one.setting] = from_history(history(record(short(one.setting), tmp_path / "good.jsonl")), "good")
            other = dataclasses.replace(short(one.setting), batch=1)
            again = compare(good[one.setting], from_history(history(record(other, tmp_path / "again.jsonl")), "again"))
            (field,) = (field for field in again.fields if field.name == FEATURES)
            assert field.compared > 300
            assert field.differ == 0
        run = history(record(short(one.setting), tmp_path / "bad.jsonl", one))
        beside = compare(good[one.setting], from_history(run, "bad"))
        (field,) = (field for field in beside.fields if field.name == FEATURES)
        assert field.suspect
        assert field.compared > 300
