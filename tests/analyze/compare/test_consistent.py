"""No two places of a comparison contradict each other: verdict, headline, reasons, tables, --fail-if and page."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from specscope.analyze.compare import tables
from specscope.analyze.compare.comparison import compare
from specscope.analyze.compare.failif import named, parse
from specscope.analyze.compare.result import Comparison, Sameness

from .runs import RUN, Made, field_of, side

NONE_MARKED = (Sameness.SAME, Sameness.CONFIGURED)
FAULTS = ("coin", "p", "deep p", "verdict", "draw", "near draw")
CACHE: dict = {}  # of the model's distributions
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


def marked(found: Comparison) -> list[str]:
    """The rows of all tables that hold a mark of something that nothing explains."""
    rows = [(table.title, row) for table in tables.tables(found) for row in table.rows]
    return [f"{title}: {row}" for title, row in rows if row[-1] == "*" or any(_is_marked(cell) for cell in row)]


def _is_marked(cell: str) -> bool:
    return cell.startswith("! ") or ": ! " in cell


def check(found: Comparison) -> None:
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
@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_verdict_tables_and_headline_agree(how, other, alike, plant):
    a = side(Made(**how, _cache=CACHE))
    b = side(Made(**(how if alike else other), plant=plant, _cache=CACHE))
    check(compare(a, b))


@given(st.sampled_from(["drops", "rises", "differs"]), st.sampled_from(["0", "0.01", "1%", "5%"]), st.integers(1, 4))
@settings(max_examples=6, deadline=None)
def test_every_row_can_be_a_condition_and_is_judged_by_its_interval(way, size, seed):
    sides = [side(Made(seed=at, blur=blur, _cache=CACHE)) for at, blur in ((seed, 0.3), (seed + 10, 0.45))]
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


def probable(one, *, moved: float = 0.0, from_depth: int = 2):
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
    other = probable(side(Made(seed=1, run=dataclasses.replace(RUN, **told))), moved=moved)
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


def rounded(spread: float, dtype: str, *, from_depth: int = 1):
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
