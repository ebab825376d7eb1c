"""Causes in order, how sure each is, what is said of healthy runs, and of what is wrong and fits no cause."""

import dataclasses
import re
from itertools import count

import numpy as np
import pytest
import torch

from specscope import Draft, Drafter
from specscope.analyze.compare.comparison import compare
from specscope.analyze.compare.fields import FEATURES
from specscope.analyze.compare.result import Sameness
from specscope.analyze.compare.side import from_history
from specscope.analyze.diagnose import healthy
from specscope.analyze.diagnose.causes import Cause
from specscope.analyze.diagnose.diagnosis import Failure, Grade, Suspect, merged, render_diagnosis, settled
from specscope.analyze.diagnose.run import examine
from specscope.analyze.findings import CheckResult, Exit, Finding
from specscope.analyze.locate.located import Proof
from specscope.model.batch import NO_TREE, Segment
from specscope.speculate.drafters.eagle import Eagle
from specscope.speculate.drafters.model_drafter import DraftModel, ModelDrafter
from specscope.trace.record.records import Outcome, Preceded
from tests.analyze.audit.runs import run
from tests.analyze.edits import able, case_of, changed, of, replaced, sample, under
from tests.analyze.texts import shown
from tests.analyze.verify.test_edits import accepted_by_p, judged
from tests.engines import tiny_engine
from tests.faults import fault as faults
from tests.faults.fault import Fault
from tests.faults.judged import diagnosed
from tests.faults.planted import FAULTS
from tests.faults.planted.trials import tried
from tests.faults.settings import capture, history, short


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
    one = by_rows(Cause.TOKEN_LOST, *counts)
    told = dataclasses.replace(one, proof=proof).to_dict("run.jsonl")
    assert (told["grade"], told["explained"], told["of"], told["spoiled"]) == (grade.value, *counts)


def failure(name, failed, tested):
    return Failure("audit", Finding(name, CheckResult.FAILED, "", tested, failed, unit="node"))


def by_rows(cause, explained=0, of=0, spoiled=0):
    return Suspect(cause, Proof.ROWS, ("",), explained=explained, of=of, spoiled=spoiled)


def test_causes_in_order_of_what_they_explain_and_nothing_that_chance_gives():
    """738 of 738 before 1, 112 of 112 before 2 of 2, what rows prove before what a sum suggests."""
    failures = [failure("draft p", 738, 738), failure("target p", 1, 738)]
    pair = [by_rows(cause) for cause in (Cause.RULES_WRONG, Cause.Q_TEMPERATURE)]
    assert [fault.cause for fault in settled(pair, failures)] == [Cause.Q_TEMPERATURE, Cause.RULES_WRONG]
    failures = [failure("accept probability", 2, 2), failure("target p", 112, 112), failure("trial order", 9, 300)]
    suspects = [Suspect(Cause.VERDICT_LATE, Proof.SUM, ("z",)), by_rows(Cause.RATIO_TEST, 2, 2)]
    suspects += [by_rows(Cause.TRIAL_ORDER, 9, 9, 9), by_rows(Cause.RULES_WRONG, 112, 112)]
    wanted = [Cause.RULES_WRONG, Cause.RATIO_TEST, Cause.TRIAL_ORDER]
    assert [fault.cause for fault in settled(suspects, failures)] == wanted
    by_chance = Suspect(Cause.DRAFTER_KV, Proof.CONDITION, ("perhaps",), chance=0.01)
    assert settled([by_chance], [failure("draft p", 5, 100)]) == []
    (fault,) = settled([dataclasses.replace(by_chance, chance=1e-9)], [failure("draft p", 5, 100)])
    assert fault.to_dict("x")["chance"] == 1e-9


def after_no_acceptance(part):
    """The ratio test without q, behind a step that accepted no draft."""
    return accepted_by_p(part) if part.preceded is Preceded.NOTHING else None


def test_when_it_happens_is_said_by_recorded_facts():
    """An error that occurs only after one kind of step."""
    assert len(able(sample("sampled"), after_no_acceptance)) > 5
    failed, found = judged(changed(sample("sampled"), after_no_acceptance))
    assert "accept probability" in failed
    assert "where the step before is nothing" in found.when[0]
    assert found.when[0] in shown(render_diagnosis, found, "run.jsonl")


def test_a_healthy_run_says_what_was_looked_at():
    found = examine(sample("sampled"))
    assert found.exit is Exit.CONSISTENT
    text = shown(render_diagnosis, found, "run.jsonl")
    assert "No fault found by verify over 41 decode steps" in text
    surprisal = r"drafted surprisal: would have seen a bias of [\d.]+ nats a token with 95 % power, over 64 draws"
    assert re.search(surprisal, text)
    assert found.builds in text
    assert re.match(r"recorded by specscope \S+, torch ", found.builds)
    assert not found.when
    apart = examine(sample("sampled"), left_out=["audit: the model is not at hand"])
    assert apart.exit is Exit.NOT_JUDGED
    assert "what could not be judged is named above" in shown(render_diagnosis, apart, "run.jsonl")


def guessing(rank):
    """The drafter ranks the token that the target wants so, by the number of the parent; and nothing is accepted."""

    def ranks(part):
        return np.array([rank(part.position + node) for node in part.parents.node.tolist()], np.int32)

    return of(
        lambda part: part.parents is not None,
        parents__choice_rank=ranks,
        verdict__path=np.zeros(0, np.int32),
        verdict__outcome=lambda part: (np.minimum(part.verdict.outcome, 1) * Outcome.REJECTED).astype(np.uint8),
    )


@pytest.mark.parametrize(
    ("rank", "cause"),
    [(lambda n: 1 + n * 7919 % 49_152, Cause.DRAFTER_AT_CHANCE), (lambda n: 2 + n % 40 * (n % 40), Cause.WEAK_DRAFTER)],
)
def test_a_drafter_at_the_level_of_chance_is_more_than_weak(rank, cause):
    """Nothing is accepted: ranks spread evenly over the vocabulary are no weak drafter's."""
    (found,) = healthy.weak_drafter(case_of(changed(sample("eagle"), guessing(rank))), None)
    assert found.cause is cause
    assert ("as by chance" in found.for_[-1]) is (cause is Cause.DRAFTER_AT_CHANCE)
    assert not cause.is_fault


def heated(part):
    """The target's likeliest token holds a fifth of its own mass, and p is wide."""
    top = np.zeros_like(part.parents.top_p)
    top[:, 0] = 0.2
    return replaced(part, parents__top_p=top, parents__entropy=np.full_like(part.parents.entropy, 9.0))


@pytest.mark.parametrize(("temperature", "cause"), [(2.5, Cause.HIGH_TEMPERATURE), (0.5, Cause.HARD_TEXT)])
def test_a_lower_bound_shows_no_sure_target_and_a_high_temperature_explains_low_acceptance(temperature, cause):
    """At 2.5 the target's own entropy lies below p's, somewhere from 0.5 nats on; at 0.5 it lies above p's 9."""
    case = case_of(under(changed(sample("sampled"), heated), temperature=temperature))
    (found,) = (remark for remark in healthy.remarks(case) if remark.cause is not Cause.TREE_TOO_SMALL)
    assert found.cause is cause
    (line,) = found.for_
    assert "between 0.50 and 9.00 nats" in line if temperature > 1 else "is at least 9.00 nats" in line


class Oracle(Drafter):
    """Drafts what comes, but from `shift` tokens further on."""

    max_nodes = max_depth = 3

    def __init__(self, texts, shift):
        self.texts, self.shift = texts, shift

    def propose(self, contexts):
        begins = [(self.texts[c.request], len(c.tokens) + self.shift) for c in contexts]
        return [Draft.chain(text[begin : begin + 3]) for text, begin in begins]


@pytest.mark.every(2)
@pytest.mark.parametrize(("shift", "begins"), [(1, "late"), (-1, "early"), (0, "")])
def test_drafts_that_begin_a_token_off_are_named_whatever_drafted_them(tiny, shift, begins):
    def recorded(drafter):
        engine = tiny_engine(tiny, drafter=drafter)
        return run(engine, {}, 40, ["the cat sat on", "a dog", "x y z", "once more"])

    plain = recorded("none").requests.values()
    texts = {r.id: [*r.info.prompt_tokens.tolist(), *(token for token, _ in r.output()), 0, 0] for r in plain}
    found = [*healthy.shifted(case_of(recorded(lambda setup: Oracle(texts, shift))))]
    assert [each.cause for each in found] == [Cause.DRAFTS_SHIFTED] * bool(begins)
    assert all(each.for_[0].endswith(f"drafts: drafts begin one token too {begins}") for each in found)


@faults.replaced(Segment, "of_tree")
def positions_past_100(of_tree, table, context, tokens, tree=NO_TREE, *, logits):
    """The target's own positions are wrong from some length on: none of the causes that are known."""
    segment = of_tree(table, context, tokens, tree, logits=logits)
    if len(tree) and context > 100:
        segment.positions = segment.positions - 16
    return segment


def test_what_fits_no_cause_is_said_with_its_condition():
    setting = short("model chain", requests=3)
    found = diagnosed(capture(setting, Fault("unknown", Cause.TOKEN_LOST, positions_past_100, "model chain")), setting)
    assert found.exit is Exit.INCONSISTENT
    assert not found.faults
    assert any("context length >= 10" in line for line in found.unexplained), found.unexplained


def repeated(patch, engine):
    """A buffer that is written once: from the second call on each row holds what the first call left in it."""
    first = {}

    def stale(observe, self, request, start, features, tokens):
        kept = first.setdefault(request, features[-1:])
        observe(self, request, start, features if not start else kept.expand_as(features), tokens)

    faults.replaced(Eagle, "observe")(stale)(patch, engine)


@faults.replaced(ModelDrafter, "_begin")
def counted(begin, drafter, context):
    """A request's first draft takes 69 tokens of its prompt for cached that no pass was given."""
    drafting = begin(drafter, context)
    if drafting is not None and not drafting.cached and len(context.tokens) > 69:
        drafting.state.computed = drafting.cached = 69
    return drafting


def no_numbers(patch, engine):
    """One row in seven passes of the drafter is NaN."""
    passes = count(1)

    def spoiled(run_pass, self, *given):
        made = run_pass(self, *given)
        if next(passes) % 7 == 0:
            made.logits[0] = float("nan")
        return made

    faults.replaced(DraftModel, "run_pass")(spoiled)(patch, engine)


def first_pass_tells(patch, engine):
    """Positions that are one high while decoding; in passes after the first, something that no mistake gives."""

    def spoiled(run_pass, self, *given):
        is_later = bool(self.passes)
        made = run_pass(self, *given)
        noise = torch.arange(made.logits.shape[-1]).sin() / 5
        return dataclasses.replace(made, logits=made.logits + noise) if is_later else made

    FAULTS["high while decoding"].install(patch, engine)
    faults.replaced(ModelDrafter, "run_pass")(spoiled)(patch, engine)


def test_what_this_build_does_right_is_not_ruled_out_of_the_run():
    setting = short("early chain warm", requests=2)
    fault = Fault("squared", Cause.RATIO_TEST, tried(accept=lambda coin, a, q: coin < a * a), "early chain warm")
    found = diagnosed(capture(setting, fault), setting, place=True)
    assert found.suspects[0].cause is Cause.RATIO_TEST
    assert [note for note in found.notes if "this build does not show what was recorded: the verdict:" in note]
    assert found.ruled_out
    assert not [line for line in found.ruled_out if line.startswith("the verdict:")]


def test_a_mistake_is_named_by_the_first_pass_where_later_ones_show_something_else():
    setting = short("eagle chain", requests=2)
    fault = Fault("first pass", Cause.ROTARY_POSITIONS, first_pass_tells, "eagle chain")
    found = diagnosed(capture(setting, fault), setting)
    assert found.suspects[0].cause is Cause.ROTARY_POSITIONS
    assert "one position too far" in found.suspects[0].for_[0]


FED = [Fault("features repeated", Cause.DRAFTER_FED, repeated, "eagle chain")]
FED += [FAULTS[name] for name in ("features of roots only", "no features", "features normalised")]
OF_STATE = [
    FAULTS["features of the step before"],
    Fault("counted", Cause.DRAFTER_KV, counted, "model chain"),
    Fault("no numbers", Cause.NOT_A_NUMBER, no_numbers, "model chain"),
]


@pytest.mark.every(2)
@pytest.mark.parametrize("fault", [*OF_STATE, *FED], ids=lambda fault: fault.name)
def test_a_drafters_state_is_named_from_the_capture_alone(fault):
    """Of what fed a head: features that are zero, repeated, or brought to one norm."""
    found = examine(history(capture(short(fault.setting), fault)))
    assert fault in FED or [suspect.cause for suspect in found.suspects] == [fault.cause]
    assert found.suspects[0].cause is fault.cause
    assert fault not in FED or found.suspects[0].for_[0].startswith("features fed: ")


def test_healthy_features_pass():
    check = case_of(history(capture(short("eagle chain")))).checks["features fed"]
    assert (check.result, check.unit) == (CheckResult.PASSED, "row")


OTHER_FEATURES = ["features one late", "features by index", "layers one lower", "layers in another order"]


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.slow if name != "layers one lower" else ()) for name in OTHER_FEATURES],
)
def test_compare_shows_other_features(name):
    """One late, taken from the wrong rows, from other layers: each has the norms of something else.

    Layers of another height break no rule: without the models only a good run beside it tells.
    """
    setting = short(FAULTS[name].setting, requests=6 if name == "layers one lower" else 4)
    batches = dataclasses.replace(setting, batch=1)
    captures = [capture(setting), capture(batches), capture(setting, FAULTS[name])]
    good, again, bad = (from_history(history(path), "run") for path in captures)
    for other, differs in ((again, False), (bad, True)):
        found = compare(good, other)
        (field,) = (field for field in found.fields if field.name == FEATURES)
        assert field.compared > 300
        assert bool(field.suspect if differs else field.differ) is differs
        assert (found.answer is Sameness.DIFFERENT) is differs
    if name == "layers one lower":
        assert examine(history(captures[-1])).exit is Exit.CONSISTENT
        assert found.summary.startswith("B gets fewer tokens per draft than A: ")
        assert {field.name for field in found.fields if field.suspect and field.differ} & {"draft p", "draft tree"}
