"""The conditions of --fail-if: what they mean, and that bad ones get one line."""

from __future__ import annotations

import contextlib
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specscope.analyze.compare.failif import counted, judge, parse
from specscope.analyze.compare.result import FIGURES, Estimate
from specscope.errors import UserError
from specscope.trace.history.conditions import COUNTED, Threshold, Way

labels = st.text("abc ofr>%1.:", min_size=1).map(lambda text: " ".join(text.split()) or "x")
figures = st.one_of(
    st.sampled_from((*FIGURES, *COUNTED)),
    st.integers(1, 999).map(lambda n: f"depth {n} rate"),
    st.tuples(labels, labels)
    .map(lambda pair: f"tau where label {pair[0]} is {pair[1]}")
    .filter(lambda text: not re.search(r"> *[0-9.]+ *%? *or\b", text)),  # there one condition ends
)
sizes = st.decimals(0, 1_000_000, places=3, allow_nan=False).map(lambda size: f"{size:f}")


@given(figures, st.sampled_from(list(Way)), sizes, st.booleans())
def test_what_is_written_is_read(figure, way, size, percent):
    percent = percent and way not in (Way.BELOW, Way.ABOVE)
    (limit,) = parse(f"{figure}  {way} {'' if len(way) == 1 else '> '}{size}{'%' if percent else ''}")
    assert (limit.figure, limit.way, limit.percent) == (figure, way, percent)
    assert limit.size == pytest.approx(float(size) / (100 if percent else 1))
    (again,) = parse(str(limit))
    assert (again.figure, again.way, again.percent) == (limit.figure, limit.way, limit.percent)
    assert again.size == pytest.approx(limit.size, rel=1e-9)


@given(st.text(max_size=40))
def test_any_other_text_is_a_users_error(text):
    with contextlib.suppress(UserError):  # nothing else is raised
        assert parse(text)


BAD = [
    "",
    "tau",
    "tau drops",
    "tau drops 2%",
    "tau falls > 2%",
    "tau drops > -1",
    "tau drops > 2%%",
    "length drops > 1",
]
BAD += ["depth 0 rate drops > 1", "depth rate drops > 1", "tau drops > 1e3", "tau drops > nan", "tau drops < 2%"]
BAD += ["tau < 1.5 for 2m", "tau < 5%", "drafts < 5%", "tau =< 5"]
BAD += ["tau drops > 2% or", "tau drops > 99999999999", "tau drops > ٣"]


@pytest.mark.parametrize("text", BAD)
def test_bad_conditions_are_refused(text):
    with pytest.raises(UserError, match=r"\A--fail-if [^\n]*\Z"):
        parse(text)


def test_several_are_joined_by_or():
    limits = parse("tau drops > 2% or depth 1 differs > 0.05")
    assert limits == [Threshold("tau", Way.DROPS, 0.02, True), Threshold("depth 1 rate", Way.DIFFERS, 0.05, False)]


def figure(low: float, high: float, a: float = 3.0, name: str = "tau") -> Estimate:
    middle = (low + high) / 2
    return Estimate(name, a, a + middle, difference=middle, low=low, high=high, p_value=0.01, clusters=20)


@pytest.mark.parametrize(
    ("low", "high", "text", "hit"),
    [
        (-0.20, -0.08, "tau drops > 2%", True),  # 2 % of 3 are 0.06: the whole interval lies beyond
        (-0.20, -0.05, "tau drops > 2%", False),  # it may be less
        (-0.20, -0.05, "tau drops > 0.04", True),
        (-0.20, -0.08, "tau rises > 0", False),
        (-0.20, -0.08, "tau differs > 2%", True),
        (0.08, 0.20, "tau differs > 2%", True),
        (0.08, 0.20, "tau drops > 0%", False),
        (0.08, 0.20, "tau rises > 2%", True),
        (-0.10, 0.10, "tau differs > 0", False),
        (-0.20, -0.08, "rate drops > 0 or tau drops > 2%", True),
    ],
)
def test_it_is_hit_where_the_whole_interval_lies_beyond(low, high, text, hit):
    both = [figure(low, high), figure(-0.001, 0.001, name="rate")]
    assert any(one.hit for one in judge(parse(text), both)) is hit


@pytest.mark.parametrize(
    ("text", "hit"),
    [("tau < 2.9", True), ("tau < 2.8", False), ("tau > 2.8", True), ("rate < 90%", True), ("rate > .9", False)],
)
def test_a_limit_is_about_the_second_side_alone(text, hit):
    both = [figure(-0.20, -0.08), figure(-0.21, -0.09, a=1.0, name="rate")]
    assert [one.hit for one in judge(parse(text), both)] == [hit]


@pytest.mark.parametrize(
    ("text", "hit"),
    [
        ("drafts drops > 9%", True),
        ("drafts drops > 10%", False),
        ("requests differs > 0", False),
        ("accepted > 99", True),
        ("drafted < 1 or accepted rises > 1", True),
    ],
)
def test_counts_are_exact(text, hit):
    a = {"drafts": 100, "accepted": 50, "requests": 8, "output tokens": None, "drafted": 3}
    b = {"drafts": 90, "accepted": 100, "requests": 8, "output tokens": 5, "drafted": 3}
    outcomes = judge(parse(text), counted(a, b))
    assert any(outcome.hit for outcome in outcomes) is hit
    with pytest.raises(UserError, match="do not show this figure"):
        judge(parse("output tokens drops > 1"), counted(a, b))
    assert judge(parse("drafts drops > 1%"), counted(a, b))[0].detail == "hit; 100 → 90, -10"


def test_what_may_or_may_not_be_is_said():
    (condition,) = judge(parse("tau drops > 2%"), [figure(-0.20, 0.0)])
    assert not condition.hit
    assert condition.detail.startswith("not shown")
    (condition,) = judge(parse("tau drops > 2%"), [figure(-0.01, 0.01)])
    assert condition.detail.startswith("not hit")


GROUPS = {
    "label kind": [figure(-0.3, -0.2, name="code"), figure(-0.1, 0.1, name="prose or not")],
    "label after": [figure(-0.3, -0.2, name="lunch")],
    "after": [figure(0.1, 0.2, name="nothing accepted")],
}


@pytest.mark.parametrize(
    ("text", "hit"),
    [
        ("tau where label kind is code drops > 2%", True),
        ("tau where kind is code drops > 2%", True),
        ("tau where kind is code drops > 20%", False),
        ("tau where kind is prose or not differs > 0", False),
        ("tau where kind is prose or not drops > 1% or tau where kind is code drops > 1%", True),
        ("tau where after is nothing accepted rises > 0", True),
        ("tau where after is lunch drops > 0.1", True),
    ],
)
def test_groups_are_taken_as_the_table_names_them(text, hit):
    assert any(one.hit for one in judge(parse(text), [figure(-1, 1)], GROUPS)) is hit


def test_a_group_that_is_not_there_is_refused_with_those_that_are():
    with pytest.raises(UserError, match="groups: 'label kind', 'label after', 'after'"):
        judge(parse("tau where colour is red drops > 1%"), [figure(-1, 1)], GROUPS)
    with pytest.raises(UserError, match="kind is one of 'code', 'prose or not'"):
        judge(parse("tau where kind is verse drops > 1%"), [figure(-1, 1)], GROUPS)


def test_a_hit_that_the_table_does_not_star_says_why():
    (condition,) = judge(parse("rate drops > 0"), [figure(-0.2, -0.1, name="rate")])
    assert condition.hit
    assert "by its own interval" in condition.detail


def test_a_figure_that_is_not_there_is_refused():
    with pytest.raises(UserError, match="do not show this figure"):
        judge(parse("depth 9 rate drops > 1%"), [figure(-1, 1)])
    bare = Estimate("tau", 3.0, 3.1, difference=0.1, clusters=2)
    with pytest.raises(UserError, match="2 requests are too few"):
        judge(parse("tau drops > 1%"), [bare])
