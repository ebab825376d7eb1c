"""`specscope compare` as people run it: its syntax, its outputs and its exit codes."""

import json

import pytest

from tests.analyze.compare.runs import Made, make
from tests.analyze.histories import write
from tests.support.commands import run_here
from tests.support.samples import EAGLE, NGRAM, SAMPLED


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Captures of the same configuration (1, 2) and one with a worse drafter."""
    folder = tmp_path_factory.mktemp("runs")
    for name, made in (
        ("a1", Made(seed=1)),
        ("a2", Made(seed=2)),
        ("b1", Made(seed=3)),
        ("worse", Made(seed=4, blur=0.7)),
    ):
        write(make(made), folder / f"{name}.jsonl")
    return folder


def compare(*words):
    return run_here(["compare", *map(str, words)])


def test_several_captures_on_a_side(runs):
    a1, a2, b1, worse = (runs / f"{name}.jsonl" for name in ("a1", "a2", "b1", "worse"))
    code, out, _ = compare(a1, a2, "--with", b1, worse, "--json")
    read = json.loads(out)
    assert code == 1
    assert read["a"]["source"] == [str(a1), str(a2)]
    assert read["b"]["source"] == [str(b1), str(worse)]
    again = json.loads(compare(a1, a2, "--json", "--with", b1, "--with", worse)[1])
    assert again == read
    assert json.loads(compare("--with", b1, worse, "--json", a1, a2)[1])["a"]["source"] == [str(a1), str(a2)]


@pytest.mark.parametrize(
    ("condition", "code"),
    [
        (None, 1),
        ("tau drops > 2%", 1),
        ("tau drops > 60%", 0),
        ("tau where label kind is code drops > 1%", 1),
        ("tau where kind is prose rises > 0 or tau where after is full drops > 90%", 0),
    ],
)
def test_fail_if_alone_decides(runs, condition, code):
    asked = [] if condition is None else ["--fail-if", condition]
    done, out, _ = compare(runs / "a1.jsonl", runs / "worse.jsonl", *asked)
    assert done == code
    assert ("FAIL" in out) is bool(code and condition)
    assert "B gets fewer tokens per draft than A: " in out


def test_an_older_kind_of_run_is_compared_by_what_both_have():
    code, out, _ = compare(EAGLE, NGRAM)
    out = " ".join(out.split())
    assert code == 0
    assert "B does not record the drafter's probabilities" in out
    assert "Only the configured settings differ (drafter, draft model, tree)." in out
    assert "draft tree differs at 46 of 49 equal contexts, as configured: drafter, draft model, tree" in out


def test_steps_without_drafts_are_named_and_a_change_that_no_tree_can_make_is_not_called_visible():
    out = compare(NGRAM, EAGLE)[1]
    assert "(95 %: -88.3 to +167.9 %); 3 requests are too few to see any change in tau\n" in out
    steps = "τ counts only steps with drafts: 14 % of A's, 95 % of B's. Output tokens per step: 1.40 → 2.21. Only the"
    assert steps in " ".join(out.split())
    assert "τ counts" not in compare(EAGLE, SAMPLED)[1]
    figures = {each["name"]: each["visible"] for each in json.loads(compare(NGRAM, EAGLE, "--json")[1])["figures"]}
    assert figures["tau"] is figures["rate"] is figures["whole paths"] is None


def test_every_setting_that_can_explain_a_difference_is_named_and_differences_of_rates_are_points():
    out = " ".join(compare(EAGLE, SAMPLED)[1].split())
    every = "drafts, drafter, draft model, draft revision, tree, draft vocabulary, max_tokens, temperature, seed"
    assert f"Only the configured settings differ ({every})." in out
    assert "depth 2 rate 33.3% 17.1% -16.3 points -22.7 to -5.8 31.1 points" in out
    assert "All 3 pairs diverge: the sampling parameters differ." in out
