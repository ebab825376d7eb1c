"""Two runs compared: the same, with one thing planted, with evidence taken away; and no two places of it disagree."""

import dataclasses
import re

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from specscope.analyze.compare import config, tables
from specscope.analyze.compare.align import PairedBy
from specscope.analyze.compare.comparison import compare
from specscope.analyze.compare.config import Difference, StepStage, explaining
from specscope.analyze.compare.failif import named, parse
from specscope.analyze.compare.parting import PartingCause
from specscope.analyze.compare.result import ALOUD, Sameness
from specscope.analyze.compare.side import from_history, joined
from specscope.trace.record.records import TEMPLATE, RunInfo
from tests.analyze.histories import RUN

from .runs import Made, field_of, make, side, with_params

SAME, CONFIGURED, DIFFERENT, UNKNOWN = Sameness
NO_FAULT = (SAME, CONFIGURED, UNKNOWN)
AT = 10  # output tokens of r3 before its fifth step
GREEDY = {"temperature": 0.0, "evidence": True}
HALF, ANOTHER = {"dtype": "bfloat16"}, {"run": dataclasses.replace(RUN, drafter="another")}
BLURRED = {"blur": 0.6, **HALF, **ANOTHER}


@pytest.fixture(scope="module")
def plain():
    return side(seed=1)


def planted(fault, **how):
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
        assert (first.p, first.q) == (pytest.approx(part.verdict.p[0]), pytest.approx(part.tree.q[0]))
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
    sides = [side(seed=1, run=dataclasses.replace(RUN, **told)) for told in (first, second)]
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
    vars(bare.columns)["rule"] = np.full(len(bare), "lossy:synthetic")
    found = compare(plain, bare)
    for says in ("records no coins", "records no p", "has synthetic verdicts (lossy:synthetic)"):
        assert any(line.startswith(f"B {says}") for line in found.missing)
        assert not any(says in line for line in compare(plain, plain).missing)
    vars(bare.columns)["rule"] = np.full(len(bare), "standard")
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


TREES = {"run": dataclasses.replace(RUN, tree="1")}
THINKING = {"labels": {TEMPLATE: '{"enable_thinking": false}'}, "prompt": "", "prompt_tokens": np.zeros(0, np.int32)}


@pytest.mark.parametrize(
    ("how", "info", "settings"),
    [
        ({}, {}, ""),
        (TREES, {}, "tree"),
        ({}, THINKING, TEMPLATE),  # a model writes other texts
        ({"sampled": False}, {}, ""),  # nobody set that its q was lost
    ],
)
def test_a_changed_setting_explains_another_acceptance(how, info, settings):
    plain, other = side(seed=1, temperature=0.0), side(seed=1, temperature=0.0, chain=1, **how)
    for request in other.requests:
        request.info = dataclasses.replace(request.info, **info)
    found = compare(plain, other)
    says, said = found.summary.split(". ", 1)
    assert re.fullmatch(r"B gets (fewer|more) tokens per draft than A: \S+ instead of \S+", says)
    if settings:
        assert (found.answer, found.exit_code) == (CONFIGURED, 0)
        assert said == f"Only the configured settings differ ({settings})."
        assert any(re.fullmatch(rf"tau .*, as configured: {settings}", reason) for reason in found.reasons)
        assert not any("Compared: acceptance" in reason for reason in found.reasons)
        assert {row[-1] for row in tables.figures(found).rows} - {""} == {"as configured"}
    else:
        assert (found.answer, found.exit_code) == (DIFFERENT, 1)
        assert {row[-1] for row in tables.figures(found).rows} - {""} == {"*"}


def test_a_setting_that_explains_acceptance_does_not_explain_a_fault():
    faults = {(f"r{n}", place): "p" for n in range(24) for place in range(40)}
    found = compare(side(seed=1), side(seed=1, chain=1, plant=faults, **TREES))
    assert found.answer is DIFFERENT
    assert found.summary.startswith("B gets fewer tokens per draft than A: ")
    assert f"{ALOUD[StepStage.TARGET]}, and nothing in the configuration explains it." in found.summary


NONE_MARKED = (Sameness.SAME, Sameness.CONFIGURED)
FAULTS = ("coin", "p", "deep p", "verdict", "draw", "near draw")
runs = st.fixed_dictionaries(
    {
        "seed": st.integers(1, 3),
        "requests": st.sampled_from([2, 5, 12]),
        "tokens": st.sampled_from([12, 40]),
        "temperature": st.sampled_from([0.0, 1.0]),
        "dtype": st.sampled_from(["float32", "bfloat16"]),
        "blur": st.sampled_from([0.3, 0.36, 0.6]),
        "noise": st.sampled_from([0.0, 0.0, 0.004]),
        "sampled": st.booleans(),
        "evidence": st.booleans(),
        "chain": st.sampled_from([0, 3, 4]),
        "batch": st.sampled_from([1, 4]),
    }
)
plants = st.dictionaries(
    st.tuples(st.sampled_from(["r0", "r1", "r2"]), st.integers(0, 20)), st.sampled_from(FAULTS), max_size=4
)


def marked(found):
    """The rows of all tables that hold a mark of something that nothing explains."""
    rows = [(table.title, row) for table in tables.tables(found) for row in table.rows]
    return [f"{title}: {row}" for title, row in rows if row[-1] == "*" or any(_is_marked(cell) for cell in row)]


def _is_marked(cell):
    return cell.startswith("! ") or ": ! " in cell


def check(found):
    """All rules."""
    rows = marked(found)
    if found.answer in NONE_MARKED:
        assert not rows
    assert bool(rows) == (found.answer is Sameness.DIFFERENT) == bool(found.exit_code)
    if found.answer is Sameness.SAME:
        assert not any(field.suspect or field.unsure or field.explained for field in found.fields)
        assert not any(one.significant for one in found.figures)
    tau = found.tau
    for word in ("fewer", "more"):
        assert (f"B gets {word} tokens" in found.summary) == (
            tau is not None and tau.significant and (tau.difference < 0) == (word == "fewer")
        )
    assert found.summary[0].isupper() or found.summary.startswith("τ counts only steps with drafts: ")
    assert found.summary[-1] == "."
    if tau is None or tau.low is None:
        return
    assert tau.significant == tau.nonzero
    ends = [f"{100 * end / tau.a:+.1f}" for end in (tau.low, tau.high)]
    assert f"(95 %: {ends[0]} to {ends[1]} %)" in found.headline
    assert ("no change found" in found.headline) == (not tau.significant and bool(tau.visible))
    assert ("too few to see any change" in found.headline) == (not tau.significant and tau.visible is None)
    assert tau.interval() in next(row for row in tables.figures(found).rows if row[0] == "tau")


@given(runs, runs, st.booleans(), plants)
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_verdict_tables_and_headline_agree(how, other, alike, plant):
    a = side(**how)
    b = side(**(how if alike else other), plant=plant)
    check(compare(a, b))


@given(st.sampled_from(["drops", "rises", "differs"]), st.sampled_from(["0", "0.01", "1%", "5%"]), st.integers(1, 4))
@settings(max_examples=4, deadline=None)
def test_every_row_can_be_a_condition_and_is_judged_by_its_interval(way, size, seed):
    sides = [side(seed=at, blur=blur) for at, blur in ((seed, 0.3), (seed + 10, 0.45))]
    found = compare(*sides)
    rows = {one.name: one for one in found.figures}
    rows |= {named(title, one): one for title, each in found.groups.items() for one in each}
    assert len(rows) > 10
    limits = parse(" or ".join(f"{name} {way} > {size}" for name in rows))
    for one, condition in zip(rows.values(), compare(*sides, limits).conditions, strict=True):
        least = float(size.rstrip("%")) / 100 * abs(one.a) if "%" in size else float(size)
        beyond = {"drops": one.high < -least, "rises": one.low > least}
        assert condition.hit == (any(beyond.values()) if way == "differs" else beyond[way])
        if size == "0" and way == "differs":
            assert condition.hit == one.nonzero


def probable(one, *, moved=0.0, from_depth=2):
    """A side whose drafter's own probabilities are recorded; at this depth and below they may be moved."""
    c = one.columns
    c.draft_prob[:] = np.where(c.sampled, c.q, 0.5)
    c.draft_prob[c.depth >= from_depth] *= 1 - moved
    return one


@pytest.mark.parametrize(
    ("told", "moved", "answer"),
    [
        ({}, 0.0, Sameness.SAME),
        ({}, 0.01, Sameness.DIFFERENT),  # it was exit code 0, where the probability differed at 358 of 359 nodes
        ({"draft_model": "another"}, 0.2, Sameness.CONFIGURED),
        ({"versions": {"torch": "9"}, "device": "another"}, 0.2, Sameness.DIFFERENT),  # these have no part in it
    ],
)
def test_a_drafter_that_differs_where_no_verdict_does_is_different_or_as_configured(told, moved, answer):
    other = probable(side(seed=1, run=dataclasses.replace(RUN, **told)), moved=moved)
    found = compare(probable(side(seed=1)), other)
    field = field_of(found, "draft p")
    assert (field.suspect, field.differ > 100) == (answer is Sameness.DIFFERENT, moved > 0)
    assert found.answer is answer
    assert found.exit_code == (answer is Sameness.DIFFERENT)
    assert any(reason.startswith("draft p differs at") for reason in found.reasons) == (moved > 0)
    if answer is Sameness.CONFIGURED:
        assert field.explained == ("draft model",)
        assert found.summary == "Only the configured settings differ (draft model)."
        assert any("as configured: draft model" in line for line in found.reasons)
        assert "draft model" in next(row for row in tables.contexts(found).rows if row[0] == "draft p")[-1]


def rounded(spread, dtype, *, from_depth=1):
    """A side whose drafter's log odds moved by so much, at this depth and below; a few of them by 0.15."""
    one, rng = probable(side(seed=1, dtype=dtype)), np.random.default_rng(7)
    c = one.columns
    by = rng.normal(0, spread, len(c.token)) + 0.15 * (rng.random(len(c.token)) < 0.02) * (spread > 0)
    odds = c.draft_prob / (1 - c.draft_prob) * np.exp(np.where(c.depth >= from_depth, by, 0))
    c.draft_prob[:] = odds / (1 + odds)
    return one


@pytest.mark.parametrize(
    ("dtype", "spread", "from_depth", "differs"),
    [
        ("bfloat16", 0.025, 1, False),  # a healthy repeat of the default model in another batch
        ("bfloat16", 0.08, 2, True),  # its head's nodes one position too far
        ("bfloat16", 0.08, 1, True),
        ("float32", 0.0, 1, False),
        ("float32", 0.08, 2, True),
    ],
)
def test_a_drafter_that_moves_further_than_its_dtype_as_a_rule_differs(dtype, spread, from_depth, differs):
    """No single node is beyond the bound of bfloat16: the runs were "no difference"."""
    found = compare(rounded(0.0, dtype), rounded(spread, dtype, from_depth=from_depth))
    assert found.answer is (Sameness.DIFFERENT if differs else Sameness.SAME), found.reasons
    names = {field.name for field in found.fields if field.suspect}
    assert names <= {"draft p", "draft p, on the whole, at the root", "draft p, on the whole, below the root"}
    assert ("draft p, on the whole, at the root" in names) is (differs and dtype == "bfloat16" and from_depth == 1)


@pytest.mark.parametrize(
    ("dtype", "prob", "apart", "suspect"),
    [
        ("bfloat16", 0.4, 0.03, False),
        ("bfloat16", 0.4, 0.25, True),  # each may be a near tie of bfloat16; thirty that are all so far apart are none
        ("float32", 0.4, 0.0, False),
        ("float32", 0.9, 0.0, True),  # two likeliest tokens, each above one half: of a map that is off by one
    ],
)
def test_other_trees_are_near_ties_only_where_most_of_them_are_near(dtype, prob, apart, suspect):
    sides = [side(seed=1, sampled=False, dtype=dtype) for _ in range(2)]
    a, b = (one.columns for one in sides)
    last = np.flatnonzero(~np.isin(np.arange(len(a.above)), a.above))  # leaves: what is below stays
    leaves = last[~a.tried[last]][:30]
    b.token[leaves] = (b.token[leaves] + 1) % 12
    for c in (a, b):
        c.draft_prob[:] = prob
        c.score[:] = np.log(prob) * c.depth
    b.score[leaves] += apart
    found = compare(*sides)
    field = field_of(found, "draft tree")
    assert (field.differ, field.suspect, field.unsure) == (30, suspect, False)
    assert (found.answer is Sameness.DIFFERENT) is suspect, found.reasons


@pytest.mark.parametrize(
    ("fault", "margin", "answer"),
    [
        ("draw", None, Sameness.UNKNOWN),
        ("draw", 0.2, Sameness.DIFFERENT),  # rounding made them only where a draw was at a border
        ("near draw", None, Sameness.UNKNOWN),  # B was at a border; of A that is not recorded
    ],
)
def test_other_drafts_at_the_same_context_are_far_or_near_or_not_known(fault, margin, answer):
    plain = side(seed=1)
    plant = {(f"r{at}", int(plain.place[plain.requests[at].first + 2])): fault for at in range(20)}
    sides = [plain, side(seed=1, plant=plant)]
    if margin is not None:
        for one in sides:
            one.draw_margin[:] = margin
    found = compare(*sides)
    field = field_of(found, "draft tree")
    assert field.differ == 20
    assert (field.suspect, field.unsure) == (answer is Sameness.DIFFERENT, answer is Sameness.UNKNOWN)
    assert found.answer is answer
    assert "draft tree" in (found.reasons[0] if answer is Sameness.DIFFERENT else found.summary)
    assert sum(one.suspect for one in found.fields) == (answer is Sameness.DIFFERENT)


@pytest.mark.parametrize("varies", [False, True])
def test_other_seeds_and_adaptive_trees_make_no_other_drafter(varies):
    """Such trees follow costs and load."""
    plain, other = side(seed=1), side(seed=1 if varies else 2, chain=4 if varies else 3)
    if varies:
        plain.varies[:] = other.varies[:] = True
    found = compare(plain, other)
    assert "draft tree" not in {field.name for field in found.fields}
    assert not any(one.suspect or one.unsure for one in found.fields)
    said = sum("depend on costs, load, a threshold or other requests" in line for line in found.missing)
    assert said == 2 * varies


@pytest.mark.parametrize(("backend", "place", "suspect"), [("vllm", 0, False), ("vllm", 2, True), ("made", 0, True)])
def test_another_engine_may_draft_nothing_behind_a_prompt(backend, place, suspect):
    """vLLM drafts behind a step: its first one has no tree. In one engine, or elsewhere, that is another drafter."""
    plain = side(seed=1, sampled=False, temperature=0, run=dataclasses.replace(RUN, backend="made"))
    plant = {(f"r{at}", int(plain.place[plain.requests[at].first + place])): "no draft" for at in range(24)}
    run = dataclasses.replace(RUN, backend=backend, versions={"vllm": "0.32.0"} if backend == "vllm" else RUN.versions)
    found = compare(plain, side(seed=1, sampled=False, temperature=0, plant=plant, run=run))
    assert any(one.suspect or one.unsure for one in found.fields) == suspect
    assert not any("sampled outputs part" in difference.note for difference in found.differences)
