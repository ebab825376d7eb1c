"""Two runs compared: the same, with one thing planted, and with one side's evidence taken away."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from specscope.analyze.compare import config
from specscope.analyze.compare.align import PairedBy
from specscope.analyze.compare.comparison import compare
from specscope.analyze.compare.config import Difference, StepStage, explaining
from specscope.analyze.compare.parting import PartingCause
from specscope.analyze.compare.result import ALOUD, Sameness
from specscope.analyze.compare.side import from_history, joined
from specscope.trace.record.records import RunInfo
from tests.analyze.histories import RUN

from .runs import Made, field_of, make, side, with_params, with_rule

SAME, CONFIGURED, DIFFERENT, UNKNOWN = Sameness
NO_FAULT = (SAME, CONFIGURED, UNKNOWN)
AT = 10  # output tokens of r3 before its fifth step
GREEDY = {"temperature": 0.0, "evidence": True}
HALF, ANOTHER = {"dtype": "bfloat16"}, {"run": dataclasses.replace(RUN, drafter="another")}
BLURRED = {"blur": 0.6, **HALF, **ANOTHER}


@pytest.fixture(scope="module")
def plain():
    return side(seed=1)


def planted(fault: str, **how) -> dict:
    return {"plant": {("r3", AT): fault}, **how}


def test_a_run_is_the_same_as_itself():
    a, b = side(seed=1, evidence=True), side(seed=1, evidence=True)
    assert int(a.place[a.requests[3].first + 4]) == AT
    found = compare(a, b)
    assert found.answer is SAME
    assert found.summary == "The runs are the same: all 24 pairs of requests made exactly the same decisions."
    assert all(pair.match is PairedBy.EXACT and pair.same and pair.first is None for pair in found.pairs)
    assert not found.differences
    assert not found.reasons
    assert found.nodes > 900
    assert found.steps == len(a)
    assert {field.differ for field in found.fields} == {0}
    assert {one.difference for one in found.figures} == {0.0}


@pytest.mark.parametrize(
    ("a", "b", "causes", "answers"),
    [
        ({"evidence": True}, planted("coin", evidence=True), {"coin": 1}, [DIFFERENT]),
        ({"evidence": True}, planted("p", evidence=True), {"target": 1}, [DIFFERENT]),
        ({"evidence": True}, planted("verdict", evidence=True), {"verdict": 1}, [DIFFERENT]),
        ({}, planted("draw"), {"drafts": None}, NO_FAULT),  # another draw of the drafter is rounding only at a border
        ({}, planted("near draw"), {"rounding": None}, NO_FAULT),
        (HALF, {"noise": 0.004, **HALF}, {"rounding": None}, NO_FAULT),
        ({}, {"noise": 0.004}, {"target": None, "others": None}, [DIFFERENT]),  # in float32 it is no rounding
        ({**GREEDY, **HALF}, {"noise": 0.02, **GREEDY, **HALF}, {"rounding": None}, NO_FAULT),
        # The raw probabilities, which tell near ties of greedy requests, are not recorded
        ({"temperature": 0.0, **HALF}, {"temperature": 0.0, "noise": 0.02, **HALF}, {"choice": None}, [UNKNOWN]),
        (GREEDY, {"model": 2, **GREEDY}, {"target": 24}, [DIFFERENT]),
        ({"evidence": True}, {"model": 2, "evidence": True}, {"target": 24}, [DIFFERENT]),
        ({}, {"seed": 2}, {"seed": 24}, NO_FAULT),
        ({}, {"tokens": 30}, {"end": 24}, NO_FAULT),
        # A greedy output hangs on no rule and no drafter
        ({**GREEDY, **HALF}, {"noise": 0.02, "blur": 0.6, **GREEDY, **HALF, **ANOTHER}, {"rounding": None}, Sameness),
        # Another drafter explains more than a near tie does
        (HALF, BLURRED, {"drafts": None, "drafter": None, "others": None}, Sameness),
        (GREEDY, {**GREEDY, "chain": 0}, {}, Sameness),  # without drafts, outputs are compared
    ],
)
def test_the_cause_of_a_parting_is_named(a, b, causes, answers):
    """`causes`: how many pairs part by each; None: some. `others`: or by others."""
    found = compare(side(**{"seed": 1, **a}), side(**{"seed": 1, **b}))
    named = causes.keys() - {"others"}
    assert found.partings.keys() >= named
    assert "others" in causes or found.partings.keys() == named
    assert all(found.partings[cause] == count for cause, count in causes.items() if count)
    assert found.answer in answers
    for parting in (pair.parting for pair in found.pairs if not pair.same):
        if parting.cause is PartingCause.ROUNDING:
            assert any(one.near_tie or one.near_draw for half in (parting.a, parting.b) for one in half.decisions)
            assert b is not BLURRED or [one.q for one in parting.a.tried] == [one.q for one in parting.b.tried]
        if "plant" in b and answers == [DIFFERENT]:
            assert AT <= parting.position <= AT + 3
            assert parting.a.at.index == parting.b.at.index == 4
            assert "r3" in found.reasons[-1]
            assert found.summary == f"{ALOUD[parting.cause.stage]}, and nothing in the configuration explains it."


def test_a_parting_shows_p_q_coin_and_margin_of_both(plain):
    other = side(seed=1, **planted("verdict"))
    parting = next(pair.parting for pair in compare(plain, other).pairs if not pair.same)
    for one, half in ((plain, parting.a), (other, parting.b)):
        part, first = one.columns.parts[half.row], half.decisions[0]
        assert (first.node, first.token, first.coin) == (0, part.tree.token[0], part.verdict.coin[0])
        assert first.p == pytest.approx(part.verdict.p[0])
        assert first.q == pytest.approx(part.tree.q[0])
        assert first.margin == pytest.approx(part.verdict.margin[0], rel=1e-6)
    assert {half.decisions[0].what for half in (parting.a, parting.b)} == {"accepted", "rejected"}


def test_a_drafter_that_lost_its_q_is_named_in_one_line_behind_another_template(plain):
    other = side(seed=1, sampled=False)
    found = compare(plain, other)
    first = found.differences[0]
    assert (first.name, first.a, first.b) == ("drafts", "sampled, with q", "deterministic, without q")
    assert "accepted with probability p alone" in first.note
    assert found.tau.significant
    assert found.tau.high < 0
    assert not set(found.partings) & {PartingCause.TARGET, PartingCause.VERDICT, PartingCause.COIN}
    assert any("the drafter's probabilities: they are not compared" in line for line in found.missing)
    for request in other.requests:
        labels = {**request.info.labels, "chat_template_kwargs": '{"enable_thinking": false}'}
        request.info = dataclasses.replace(request.info, labels=labels)
    first, second = compare(plain, other).differences[:2]
    assert (first.name, first.a, first.b) == ("chat_template_kwargs", "–", '{"enable_thinking": false}')
    assert second.name == "drafts"


@pytest.mark.parametrize(
    ("fault", "places", "condition"),
    [("p", [AT], ""), ("deep p", range(40), "where depth >= 2")],
    ids=["one step", "deep"],
)
def test_the_condition_of_what_differs_is_named(fault, places, condition):
    plant = {(f"r{n}", place): fault for n in range(24) for place in places}
    found = compare(side(seed=1, evidence=True), side(seed=1, evidence=True, plant=plant))
    field = field_of(found, "target p")
    assert condition in field.condition
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
        ("float32", False, 0.02, np.nan, True),  # what is no number is no rounding
    ],
)
def test_how_much_of_p_must_differ_to_be_suspect(dtype, cut, share, by, suspect):
    sides = [with_params(side(seed=1, dtype=dtype), top_p=0.9 if cut else 1.0) for _ in range(2)]
    p = sides[1].columns.p
    moved = np.random.default_rng(1).permutation(len(p))[: max(1, int(share * len(p)))]
    p[moved] += np.where(p[moved] < 0.5, by, -by).astype(np.float32)
    found = compare(*sides)
    field = field_of(found, "target p, cut" if cut else "target p")
    assert field.differ == len(moved)
    assert field.suspect is suspect
    assert (found.answer is DIFFERENT) is suspect


@pytest.mark.parametrize(
    ("kind", "how", "changed"),
    [
        (PairedBy.EXACT, {"seed": 1}, {}),
        (PairedBy.SEED, {"seed": 2}, {}),
        (PairedBy.PROMPT, {"seed": 1, "temperature": 0.5}, {}),
        (None, {"seed": 1}, {"prompt": "", "prompt_tokens": np.zeros(0, np.int32)}),
        (None, {"seed": 5}, {"prompt_tokens": np.array([5, 99], np.int32)}),
    ],
)
def test_what_pairs_have_in_common(plain, kind, how, changed):
    other = side(**how)
    for request in other.requests:
        request.info = dataclasses.replace(request.info, **changed)
    found = compare(plain, other)
    assert [pair.match for pair in found.pairs] == [kind] * (24 if kind else 0)
    assert (found.a.unmatched, found.b.unmatched, found.steps > 0) == ((0, 0, True) if kind else (24, 24, False))
    assert found.tau.low <= found.tau.difference <= found.tau.high  # distributions are compared without pairs, too
    assert found.answer is not DIFFERENT or kind is PairedBy.PROMPT


def lines_of(first: dict, second: dict) -> dict[str, Difference]:
    """The configuration's lines of two runs whose headers say these."""
    sides = [side(Made(seed=1, run=dataclasses.replace(RUN, **told))) for told in (first, second)]
    return {one.name: one for one in compare(*sides).differences}


def test_configuration_lines_name_what_differs_in_the_run():
    versions = {"torch": "2.14.0", "python": "3.11.2"}
    lines = lines_of({}, {"draft_model": "other-head", "tree": "5", "versions": versions})
    assert (lines["tree"].a, lines["tree"].b) == ("4", "5")
    assert (lines["draft model"].a, lines["draft model"].b) == ("–", "other-head")
    assert lines["version of torch"].b == "2.14.0"
    assert "version of python" not in lines
    assert lines["version of specscope"].b == "–"


def test_the_contents_of_models_decide_and_not_where_they_lie():
    """Digests are compared where both sides have them, else revisions, which hash paths and sizes."""
    names = {"revision", "draft revision"}
    here = {"revision": "a", "target_path": "/home/a/m", "target_digest": "1", "draft_digest": "3"}
    there = {"revision": "b", "target_path": "/home/b/m", "target_digest": "1", "draft_digest": "3"}
    assert not names & lines_of(here, there).keys()
    assert "revision" in lines_of(here, {**there, "revision": "a", "target_digest": "2"})
    assert "draft revision" in lines_of(here, {**there, "draft_digest": "4"})
    assert names & lines_of(here, {"revision": "b"}).keys() == {"revision"}  # a capture of before
    assert not names & lines_of(here, {"revision": "a"}).keys()
    renamed = lines_of({"target": "m", "target_digest": "1"}, {"target": "m-0.1", "target_digest": "1"})
    assert "model" not in renamed  # and it explains no difference in p
    assert renamed["model's name"].note == "the same weights under another name"
    assert "model" in lines_of({"target": "m", "target_digest": "1"}, {"target": "m-0.1"})


def test_every_field_of_a_run_is_compared_or_left_out_on_purpose():
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
    assert found.answer is SAME
    assert [pair.match for pair in found.pairs] == [PairedBy.EXACT] * 48
    assert found.a.source == ("a0", "a1")
    for pair in found.pairs:
        assert a.tokens(a.requests[pair.a]).tolist() == b.tokens(b.requests[pair.b]).tolist()
        assert a.steps(a.requests[pair.a]) == b.steps(b.requests[pair.b])
    assert found.tau.weight[0] > compare(plain, from_history(halves[0], "x")).tau.weight[0]


def test_what_a_side_lacks_is_said(plain):
    bare = side(seed=1)
    for name in ("coin", "p", "p_trial", "final_p", "final_coin"):
        getattr(bare.columns, name)[:] = 0
    with_rule(bare, "lossy:synthetic")
    found = compare(plain, bare)
    for says in ("records no coins", "records no p", "has synthetic verdicts (lossy:synthetic)"):
        assert any(line.startswith(f"B {says}") for line in found.missing)
        assert not any(says in line for line in compare(plain, plain).missing)
    with_rule(bare, "standard")
    found = compare(plain, bare)
    assert found.answer is SAME, found.reasons
    assert not any(field.suspect for field in found.fields)
    none = compare(plain, side(seed=1, chain=0))
    assert any("B has no drafts" in line for line in none.missing)
    assert none.tau is None


@pytest.mark.parametrize("cut", [True, False])
def test_a_final_draw_from_what_a_cut_left_is_the_cuts(cut):
    """In bfloat16 top-k left one token more on one side: the same coin drew another token, far from any border."""
    sides = [with_params(side(seed=1), top_k=5 if cut else 0) for _ in range(2)]
    c, row = sides[1].columns, sides[1].requests[3].first + 4
    place = sides[1].begins[row] + c.depth_reached[row]
    c.output[place] = c.final[row] = (c.final[row] + 1) % 12
    found = compare(*sides)
    (pair,) = (pair for pair in found.pairs if not pair.same)
    assert pair.parting.position >= AT
    assert pair.parting.cause is (PartingCause.CUT if cut else PartingCause.VERDICT)
    assert (found.answer is DIFFERENT) is not cut


def test_another_drafter_does_not_excuse_another_target():
    """With other drafts, sampling uses other coins: so the one place where p was wrong was "other drafts"."""
    plain, how = side(seed=1, evidence=True), {"seed": 1, "evidence": True, "blur": 0.31, **ANOTHER}
    healthy = compare(plain, side(**how))
    assert 0 < sum(not pair.same for pair in healthy.pairs) < 24
    assert not any("the drafter's q" in line and "as configured" not in line for line in healthy.reasons)
    found = compare(plain, side(plant={(f"r{at}", 0): "p" for at in range(24)}, **how))
    assert PartingCause.TARGET in found.partings
    assert found.answer is DIFFERENT
    assert not any("target" in reason and "as configured" in reason for reason in found.reasons)
    assert {line.name: line.enters for line in found.differences}["drafter"] == "drafter"


def test_a_setting_explains_what_is_computed_from_it_and_nothing_else():
    def names(setting, stage):
        return explaining(stage, [Difference(setting.value, "1", "2", enters=setting)])

    explained = {(setting, stage) for setting in StepStage for stage in StepStage if names(setting, stage)}
    reached = {setting: {stage for one, stage in explained if one is setting} for setting in StepStage}
    assert reached[StepStage.DRAFTER] == {StepStage.DRAFTER, StepStage.TREE}
    assert reached[StepStage.COINS] == {StepStage.COINS, StepStage.TREE, StepStage.VERDICT}
    assert {setting for setting, stage in explained if stage is StepStage.TARGET} == {StepStage.TARGET}
    assert explaining(None, [Difference("model", "1", "2", enters=StepStage.TARGET)]) == ()
