"""Two runs compared: the same, with one thing planted, and with one side's evidence taken away."""

from __future__ import annotations

import dataclasses

import numpy as np
import orjson
import pytest

from specscope.analyze.compare.comparison import compare
from specscope.analyze.compare.config import explaining
from specscope.analyze.compare.failif import parse
from specscope.analyze.compare.result import SUSPECT, Difference, PairedBy, PartingCause, Sameness, StepStage
from specscope.analyze.compare.side import from_history, joined
from specscope.trace.history.history import History
from specscope.trace.record.records import Absent, RunInfo
from tests.analyze.histories import RUN, info, record, step

from .runs import Made, make, side


@pytest.fixture(scope="module")
def plain():
    return side(seed=1)


@pytest.fixture(scope="module")
def recorded():
    return side(seed=1, evidence=True)


def begins(one, request: int, number: int) -> int:
    """Output tokens before a step of a request."""
    return int(one.place[one.requests[request].first + number])


def test_a_run_is_the_same_as_itself(recorded):
    found = compare(recorded, side(seed=1, evidence=True))
    assert found.answer is Sameness.SAME
    assert found.summary == "The runs are the same: all 24 pairs of requests made exactly the same decisions."
    assert all(pair.match is PairedBy.EXACT and pair.same and pair.first is None for pair in found.pairs)
    assert not found.differences
    assert not found.reasons
    assert found.nodes > 900
    assert found.steps == len(recorded)
    assert {field.differ for field in found.fields} == {0}
    assert {one.difference for one in found.figures} == {0.0}


@pytest.mark.parametrize(
    ("fault", "cause", "evidence"),
    [
        ("coin", PartingCause.COIN, "coin"),
        ("p", PartingCause.TARGET, "target p"),
        ("verdict", PartingCause.VERDICT, "outcome"),
    ],
)
def test_a_fault_at_one_place_is_where_the_pair_parts(recorded, fault, cause, evidence):
    at = begins(recorded, 3, 4)
    found = compare(recorded, side(seed=1, evidence=True, plant={("r3", at): fault}))
    assert found.answer is Sameness.DIFFERENT
    assert found.partings == {cause: 1}
    (pair,) = (pair for pair in found.pairs if not pair.same)
    assert pair.id_a == pair.id_b == "r3"
    assert at <= pair.parting.position <= at + 3
    assert pair.parting.a.at.index == pair.parting.b.at.index == 4
    assert "r3" in found.reasons[-1]
    assert next(field for field in found.fields if field.name == evidence).differ > 0


def test_a_parting_shows_p_q_coin_and_margin_of_both(plain):
    at = begins(plain, 3, 4)
    found = compare(plain, side(seed=1, plant={("r3", at): "verdict"}))
    parting = next(pair.parting for pair in found.pairs if not pair.same)
    for one, half in ((plain, parting.a), (side(seed=1, plant={("r3", at): "verdict"}), parting.b)):
        step = one.columns.parts[half.row]
        first = half.decisions[0]
        assert (first.node, first.token) == (0, step.tree.token[0])
        assert first.p == pytest.approx(step.verdict.p[0])
        assert first.q == pytest.approx(step.tree.q[0])
        assert first.coin == step.verdict.coin[0]
        assert first.margin == pytest.approx(step.verdict.margin[0], rel=1e-6)
    what = {half.decisions[0].what for half in (parting.a, parting.b)}
    assert what == {"accepted", "rejected"}


def test_a_near_tie_is_called_rounding():
    found = compare(side(seed=1, dtype="bfloat16"), side(seed=1, dtype="bfloat16", noise=0.004))
    assert found.partings.keys() == {PartingCause.ROUNDING}
    assert found.answer is not Sameness.DIFFERENT
    for pair in found.pairs:
        if pair.parting is not None:
            assert any(one.near_tie for one in (*pair.parting.a.decisions, *pair.parting.b.decisions))


@pytest.mark.parametrize(("fault", "cause"), [("draw", PartingCause.DRAFTS), ("near draw", PartingCause.ROUNDING)])
def test_another_draw_of_the_drafter_is_rounding_only_at_a_border(plain, fault, cause):
    found = compare(plain, side(seed=1, plant={("r3", begins(plain, 3, 4)): fault}))
    assert set(found.partings) == {cause}
    assert found.answer is not Sameness.DIFFERENT


def test_the_same_change_is_no_rounding_in_float32():
    found = compare(side(seed=1), side(seed=1, noise=0.004))
    assert found.answer is Sameness.DIFFERENT
    assert PartingCause.TARGET in found.partings
    assert next(field for field in found.fields if field.name == "target p").suspect


def test_greedy_near_ties_are_told_by_the_raw_probabilities():
    how = {"seed": 1, "temperature": 0.0, "dtype": "bfloat16"}
    found = compare(side(evidence=True, **how), side(evidence=True, noise=0.02, **how))
    assert found.partings.keys() == {PartingCause.ROUNDING}
    assert found.answer is not Sameness.DIFFERENT
    bare = compare(side(**how), side(noise=0.02, **how))  # the raw ones are not recorded
    assert bare.partings.keys() == {PartingCause.CHOICE}
    assert bare.answer is Sameness.UNKNOWN
    assert any("raw probabilities" in line for line in bare.missing)


def test_a_greedy_choice_far_from_a_tie_is_the_targets():
    how = {"seed": 1, "temperature": 0.0, "evidence": True}
    found = compare(side(**how), side(model=2, **how))
    assert found.answer is Sameness.DIFFERENT
    assert found.partings[PartingCause.TARGET] == 24


def test_another_target_is_seen_where_no_token_was_tried_by_both():
    found = compare(side(seed=1, evidence=True), side(seed=1, evidence=True, model=2))
    assert found.partings == {PartingCause.TARGET: 24}
    assert next(field for field in found.fields if field.name == "target entropy").suspect


def test_other_seeds_part_for_no_other_reason(plain):
    found = compare(plain, side(seed=2))
    assert all(pair.match is PairedBy.SEED for pair in found.pairs)
    assert found.partings == {PartingCause.SEED: 24}
    assert found.answer is not Sameness.DIFFERENT
    assert [one.name for one in found.differences if "schedule" not in one.note and one.name == "seed"] == ["seed"]


def test_a_drafter_that_lost_its_q_is_named_in_one_line(plain):
    found = compare(plain, side(seed=1, sampled=False))
    first = found.differences[0]
    assert (first.name, first.a, first.b) == ("drafts", "sampled, with q", "deterministic, without q")
    assert "accepted with probability p alone" in first.note
    tau = next(one for one in found.figures if one.name == "tau")
    assert tau.significant
    assert tau.high < 0
    assert not set(found.partings) & {PartingCause.TARGET, PartingCause.VERDICT, PartingCause.COIN}
    assert any("calibration is not compared" in line for line in found.missing)


def test_a_worse_drafter_differs_in_q_and_not_in_p():
    found = compare(side(seed=1, evidence=True), side(seed=1, evidence=True, blur=0.6))
    by_name = {field.name: field for field in found.fields}
    assert by_name["target p"].differ == by_name["verdict"].differ == by_name["coin"].differ == 0
    assert by_name["drafter q"].differ > 0
    assert set(found.partings) & set(SUSPECT) <= {PartingCause.DRAFTER}
    assert found.summary.startswith("B gets fewer tokens out of a draft than A: ")


def test_what_differs_is_laid_out_by_depth_and_by_what_came_before(recorded):
    plant = {(f"r{n}", begins(recorded, n, 4)): "p" for n in range(24)}
    found = compare(recorded, side(seed=1, evidence=True, plant=plant))
    field = next(one for one in found.fields if one.name == "target p")
    assert {where.group for where in field.where} == {"depth", "sibling", "after", "requests in the step"}
    for group in {where.group for where in field.where}:
        mine = [where for where in field.where if where.group == group]
        assert sum(where.differ for where in mine) == field.differ
        assert sum(where.compared for where in mine) == field.compared


def test_the_condition_under_which_it_differs_is_named(recorded):
    plant = {(f"r{n}", place): "deep p" for n in range(24) for place in range(40)}
    found = compare(recorded, side(seed=1, evidence=True, plant=plant))
    field = next(one for one in found.fields if one.name == "target p")
    assert field.condition.startswith("depth >= 2")
    assert "; elsewhere 0 of " in field.condition
    assert any(field.condition in reason for reason in found.reasons)


@pytest.mark.parametrize(
    ("dtype", "cut", "share", "by", "suspect"),
    [
        ("float32", False, 0.02, 0.2, True),
        ("float32", True, 0.02, 0.2, False),  # the edge of top-p: a token more or less
        ("float32", True, 0.5, 0.2, True),
        ("bfloat16", False, 0.01, 0.06, False),  # a little beyond what rounding does as a rule
        ("bfloat16", False, 0.2, 0.06, True),
        ("bfloat16", False, 0.02, 0.2, True),
        ("float32", False, 0.0005, 0.2, False),  # a single context
    ],
)
def test_how_much_of_p_must_differ_to_be_suspect(dtype, cut, share, by, suspect):
    sides = [side(seed=1, dtype=dtype) for _ in range(2)]
    if cut:
        for request in (request for one in sides for request in one.requests):
            params = dataclasses.replace(request.info.params, top_p=0.9)
            request.info = dataclasses.replace(request.info, params=params)
    p = sides[1].columns.p
    moved = np.random.default_rng(1).permutation(len(p))[: max(1, int(share * len(p)))]
    p[moved] += np.where(p[moved] < 0.5, by, -by).astype(np.float32)
    found = compare(*sides)
    field = next(one for one in found.fields if one.name == ("target p, cut" if cut else "target p"))
    assert field.differ == len(moved)
    assert field.suspect is suspect
    assert (found.answer is Sameness.DIFFERENT) is suspect


def test_template_variables_that_differ_are_named_first(plain):
    other = side(seed=1, sampled=False)
    for request in other.requests:
        labels = {**request.info.labels, "chat_template_kwargs": '{"enable_thinking": false}'}
        request.info = dataclasses.replace(request.info, labels=labels)
    first, second = compare(plain, other).differences[:2]
    assert (first.name, first.a, first.b) == ("chat_template_kwargs", "–", '{"enable_thinking": false}')
    assert second.name == "drafts"


def test_parameters_that_differ_are_the_cause(plain):
    other = side(seed=1)
    for request in other.requests:
        params = dataclasses.replace(request.info.params, temperature=0.5)
        request.info = dataclasses.replace(request.info, params=params)
    found = compare(plain, side(seed=2))
    changed = compare(plain, other)
    assert all(pair.match is PairedBy.PROMPT for pair in changed.pairs)
    assert "temperature" in {one.name for one in changed.differences}
    assert "temperature" not in {one.name for one in found.differences}


def test_configuration_lines_name_what_differs_in_the_run(plain):
    run = dataclasses.replace(
        plain.captures[0].run, draft_model="other-head", tree="5", versions={"torch": "2.14.0", "python": "3.11.2"}
    )
    history = make(Made(seed=1, run=run))
    lines = {one.name: one for one in compare(plain, from_history(history, "b")).differences}
    assert lines["tree"].a == "4"
    assert lines["tree"].b == "5"
    assert (lines["draft model"].a, lines["draft model"].b) == ("–", "other-head")
    assert lines["version of torch"].b == "2.14.0"
    assert "version of python" not in lines
    assert lines["version of specscope"].b == "–"


def test_the_contents_of_models_decide_and_not_where_they_lie(plain):
    """Digests are compared where both sides have them, else revisions, which hash paths and sizes."""

    def lines(first, second):
        sides = [
            from_history(make(Made(seed=1, run=dataclasses.replace(plain.captures[0].run, **told))), "x")
            for told in (first, second)
        ]
        return {one.name for one in compare(*sides).differences}

    here = {"revision": "a", "target_path": "/home/a/m", "target_digest": "1", "draft_digest": "3"}
    there = {"revision": "b", "target_path": "/home/b/m", "target_digest": "1", "draft_digest": "3"}
    assert not {"revision", "draft revision"} & lines(here, there)
    assert "revision" in lines(here, {**there, "revision": "a", "target_digest": "2"})
    assert "draft revision" in lines(here, {**there, "draft_digest": "4"})
    assert {"revision", "draft revision"} & lines(here, {"revision": "b"}) == {"revision"}  # a capture of before
    assert not {"revision", "draft revision"} & lines(here, {"revision": "a"})


def test_every_field_of_a_run_is_compared_or_left_out_on_purpose():
    from specscope.analyze.compare import config

    # Its id, compared apart (the rule: of the steps), or said with the blocks; where models lie; said as the revision
    left_out = {"run_id", "params", "versions", "speculation", "settings", "privacy", "block_size", "rule"}
    left_out |= {"target_path", "draft_path", "target_digest"}
    every = {field.name for field in dataclasses.fields(RunInfo)} - left_out
    assert len(config._RUN) == len(every)


def test_several_captures_on_a_side_are_one(plain):
    halves = [make(Made(seed=1, requests=24)), make(Made(seed=4, requests=24))]
    a = joined([from_history(one, f"a{n}") for n, one in enumerate(halves)])
    b = joined([from_history(one, f"b{n}") for n, one in enumerate(reversed(halves))])
    assert len(a.requests) == 48
    assert len(a) == len(b) == sum(one.acceptance.steps for one in halves)
    found = compare(a, b)
    assert found.answer is Sameness.SAME
    assert len(found.pairs) == 48
    assert all(pair.match is PairedBy.EXACT for pair in found.pairs)
    assert found.a.sources == ("a0", "a1")
    for request in range(48):
        one, other = found.pairs[request].a, found.pairs[request].b
        assert a.tokens(a.requests[one]).tolist() == b.tokens(b.requests[other]).tolist()
    alone = compare(plain, from_history(halves[0], "x"))
    tau = {one.name: one for one in found.figures}["tau"].weight
    assert tau[0] > {one.name: one for one in alone.figures}["tau"].weight[0]


def test_without_prompts_requests_are_paired_by_order(plain):
    bare = side(seed=1)
    for request in bare.requests:
        request.info = dataclasses.replace(request.info, prompt="", prompt_tokens=np.zeros(0, np.int32))
    found = compare(plain, bare)
    assert all(pair.match is PairedBy.ORDER for pair in found.pairs)
    assert all(pair.same for pair in found.pairs)
    assert any("paired by their order" in line for line in found.missing)


def test_other_prompts_make_no_pair_and_distributions_are_compared(plain):
    other = side(seed=5)
    for at, request in enumerate(other.requests):
        request.info = dataclasses.replace(request.info, prompt_tokens=np.array([at, 99], np.int32))
    found = compare(plain, other)
    assert not found.pairs
    assert found.a.unmatched == found.b.unmatched == 24
    assert found.nodes == found.steps == 0
    tau = next(one for one in found.figures if one.name == "tau")
    assert tau.low < tau.difference < tau.high
    assert found.answer is not Sameness.DIFFERENT


def test_a_side_without_coins_or_p_is_compared_by_the_rest(plain):
    bare = side(seed=1)
    for name in ("coin", "p", "p_trial"):
        getattr(bare.columns, name)[:] = 0
    bare.columns.final_p[:] = bare.columns.final_coin[:] = 0
    found = compare(plain, bare)
    said = "\n".join(found.missing)
    assert "B records no coins" in said
    assert "B records no p" in said
    assert found.answer is Sameness.SAME, found.reasons
    assert not {field.name for field in found.fields if field.suspect}


def test_verdicts_that_are_made_up_are_named(plain):
    other = side(seed=1)
    other.rules[:] = ["lossy:synthetic"] * len(other)
    assert any("B has made-up verdicts (lossy:synthetic)" in line for line in compare(plain, other).missing)
    assert not any("made-up" in line for line in compare(plain, plain).missing)


def test_counts_of_runs_can_be_asked_for(plain):
    asked = parse("requests drops > 40% or drafts drops > 10% or output tokens < 900 or requests < 12")
    outcomes = compare(plain, side(seed=1, requests=12), asked).conditions
    assert [outcome.hit for outcome in outcomes] == [True, True, True, False]
    assert not any(outcome.hit for outcome in compare(plain, plain, asked).conditions)


def test_a_side_without_drafts_has_its_outputs_compared(plain):
    how = {"seed": 1, "temperature": 0.0, "evidence": True}
    bare = make(Made(chain=0, **how))
    found = compare(side(**how), from_history(bare, "none"))
    assert all(pair.same for pair in found.pairs)
    assert any("B has no drafts" in line for line in found.missing)
    assert "tau" not in {one.name for one in found.figures}
    assert next(one for one in found.figures if one.name == "tokens per step").significant


def looping(requests: int, loops: int, steps: int = 30):
    """Requests that accept nothing of new text; the first so many of them then go round two tokens, all accepted."""
    history = History(run=RUN)
    for at in range(requests):
        about = info(f"r{at}", f"prompt {at}")
        parts = [step(about.id, "2", (), (50, 51), 100 * at + index) for index in range(steps)]
        if at < loops:
            parts += [step(about.id, "3", (0, 1, 2), (7, 8, 7), 8)] * steps
        for index, part in enumerate(parts):
            part = dataclasses.replace(part, index=index)
            history.append(record(len(history.steps), [part], admitted=() if index else (about,)))
    return from_history(history, "made")


def test_text_that_loops_is_named_before_anything_else_is_blamed():
    found = compare(looping(8, 0), looping(8, 8))
    figures = {one.name: one for one in found.figures}
    assert (figures["tau"].a, figures["tau"].b) == (1.0, 2.5)
    assert (figures["output in loops"].a, figures["output in loops"].b) == (0.0, 0.8)
    assert (figures["tau without loops"].a, figures["tau without loops"].b) == (1.0, 1.0)
    assert figures["tau without loops"].weight == (240.0, 240.0)
    assert found.answer is Sameness.DIFFERENT
    assert found.reasons[0].startswith("output in loops 0.0% → 80.0%, +80.0")
    assert "tau without loops 1.000 → 1.000" in found.reasons[0]
    assert not any(reason.startswith("output in loops") for reason in found.reasons[1:])


def test_a_difference_in_loops_is_named_where_too_few_requests_show_it():
    found = compare(looping(2, 0), looping(2, 1))
    assert found.answer is not Sameness.DIFFERENT
    assert found.reasons[0].startswith("output in loops 0.0% → 66.7%")


def test_loops_on_both_sides_are_no_difference():
    found = compare(looping(3, 2), looping(3, 2))
    assert not any("loops" in reason for reason in found.reasons)


def test_json_holds_all_of_it(plain):
    found = compare(plain, side(seed=1, plant={("r3", begins(plain, 3, 4)): "coin"}))
    read = orjson.loads(orjson.dumps(found.to_dict(), option=orjson.OPT_NON_STR_KEYS))
    assert read["answer"] == "different"
    assert read["partings"] == {"coin": 1}
    assert len(read["pairs"]) == 24
    assert {one["name"] for one in read["figures"]} >= {"tau", "rate", "depth 1 rate"}


def test_one_request_alone_is_told_by_its_decisions_and_not_by_its_figures():
    found = compare(side(seed=1, requests=1), side(seed=2, requests=1))
    assert found.answer is Sameness.UNKNOWN
    assert "1 request with drafts" in found.summary
    assert all(one.low is None for one in found.figures)
    assert compare(side(seed=1, requests=1), side(seed=1, requests=1)).answer is Sameness.SAME


def test_a_request_that_ended_sooner_parts_at_its_end(plain):
    other = make(Made(seed=1, tokens=30))
    found = compare(plain, from_history(other, "short"))
    assert found.partings == {PartingCause.END: 24}
    assert all(pair.parting.b.token is None and pair.parting.position == 30 for pair in found.pairs)
    assert found.answer is not Sameness.DIFFERENT


@pytest.mark.parametrize("cut", [True, False])
def test_a_final_draw_from_what_a_cut_left_is_the_cuts(plain, cut):
    """In bfloat16 top-k left one token more on one side: the same coin drew another token, far from any border."""
    at = begins(plain, 3, 4)
    sides = [side(seed=1), side(seed=1)]
    for request in (request for one in sides for request in one.requests):
        params = dataclasses.replace(request.info.params, top_k=5 if cut else 0)
        request.info = dataclasses.replace(request.info, params=params)
    c, row = sides[1].columns, sides[1].requests[3].first + 4
    place = sides[1].begins[row] + c.depth_reached[row]
    c.output[place] = c.final[row] = (c.final[row] + 1) % 12
    found = compare(*sides)
    (pair,) = (pair for pair in found.pairs if not pair.same)
    assert pair.parting.position >= at
    assert pair.parting.cause is (PartingCause.CUT if cut else PartingCause.VERDICT)
    assert (found.answer is Sameness.DIFFERENT) is not cut


def test_another_rule_or_drafter_explains_more_than_a_near_tie_does():
    """In bfloat16 most draws are near ties: rounding was blamed for what was configured."""
    how = {"seed": 1, "dtype": "bfloat16"}
    plain, other = side(**how), side(**how, noise=0.004)
    assert compare(plain, other).partings.keys() == {PartingCause.ROUNDING}
    other.rules[:] = ["block"] * len(other)
    assert compare(plain, other).partings.keys() == {PartingCause.RULE}
    run = dataclasses.replace(plain.captures[0].run, drafter="another")
    found = compare(plain, side(Made(**how, blur=0.6, run=run)))
    assert found.partings.keys() >= {PartingCause.DRAFTS, PartingCause.DRAFTER}
    assert not any("the drafter's q" in reason and "as configured" not in reason for reason in found.reasons)
    for pair in found.pairs:
        if pair.parting is not None and pair.parting.cause is PartingCause.ROUNDING:
            halves = (pair.parting.a, pair.parting.b)
            tried = [[(one.token, one.q) for one in half.decisions if one.node is not None] for half in halves]
            assert pair.parting.a.position == pair.parting.b.position
            assert tried[0] == tried[1]


def test_a_greedy_output_hangs_on_no_rule_and_no_drafter():
    how = {"seed": 1, "temperature": 0.0, "dtype": "bfloat16", "evidence": True}
    run = dataclasses.replace(side(requests=1).captures[0].run, drafter="another")
    found = compare(side(**how), side(Made(noise=0.02, run=run, blur=0.6, **how)))
    assert found.partings.keys() == {PartingCause.ROUNDING}


def test_preemptions_that_one_side_does_not_tell_are_no_difference():
    """Of a part of a run, the engine's own steps may not be there: they alone name who was preempted."""
    history = make(Made(requests=2))
    last = history.steps[-1]
    preempted = [*history.steps[:-1], dataclasses.replace(last, preempted=("r0",))]
    without = [*history.steps[:-1], dataclasses.replace(last, absent=Absent(engine=True))]

    def told(steps):
        other = History(run=history.run)
        for one in steps:
            other.append(one)
        found = compare(from_history(history, "a"), from_history(other, "b"))
        return [(one.a, one.b) for one in found.differences if one.name == "preemptions"]

    assert told(preempted) == [("0", "1")]
    assert told(without) == []
    assert told([dataclasses.replace(without[0], preempted=("r0",)), *without[1:]]) == []


def test_another_drafter_does_not_excuse_another_target():
    """With other drafts, sampling uses other coins: so the one place where p was wrong was "other drafts"."""
    plain = side(seed=1, evidence=True)
    run = dataclasses.replace(plain.captures[0].run, drafter="another")
    other = side(Made(seed=1, evidence=True, blur=0.31, run=run))
    parted = {pair.id_a for pair in compare(plain, other).pairs if not pair.same}
    plant = {(f"r{at}", 0): "p" for at in range(24)}
    found = compare(plain, side(Made(seed=1, evidence=True, blur=0.31, run=run, plant=plant)))
    assert len(parted) < 24
    assert PartingCause.TARGET in found.partings
    assert found.answer is Sameness.DIFFERENT
    assert not any("target" in reason and "as configured" in reason for reason in found.reasons)
    assert {line.name: line.enters for line in found.differences}["drafter"] == "drafter"


def test_a_setting_explains_what_is_computed_from_it_and_nothing_else():
    def names(setting, stage):
        return explaining(stage, [Difference(setting.value, "1", "2", enters=setting)])

    explained = {(setting, stage) for setting in StepStage for stage in StepStage if names(setting, stage)}
    assert {stage for setting, stage in explained if setting is StepStage.DRAFTER} == {
        StepStage.DRAFTER,
        StepStage.TREE,
    }
    assert {stage for setting, stage in explained if setting is StepStage.COINS} == {
        StepStage.COINS,
        StepStage.TREE,
        StepStage.VERDICT,
    }
    assert {setting for setting, stage in explained if stage is StepStage.TARGET} == {StepStage.TARGET}
    assert explaining(None, [Difference("model", "1", "2", enters=StepStage.TARGET)]) == ()
