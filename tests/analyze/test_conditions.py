"""The condition finder: a planted rule is found in random facts, and noise gives none."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specscope.analyze import conditions
from specscope.analyze.conditions import find, log_fisher, rarest


def random_facts(seed, items=2000, extra=8):
    draw = np.random.default_rng(seed)
    facts = {
        "depth": draw.integers(1, 6, items),
        "sibling": draw.integers(0, 4, items),
        "the parent is the first sibling": draw.random(items) < 0.6,
        "kind": draw.choice(["chat", "code", "list"], items),
        "context length": draw.integers(1, 3000, items),
        "temperature": draw.choice([0.0, 0.7, 1.0], items),
    }
    return facts | {f"noise {i}": draw.integers(0, 10, items) for i in range(extra)}


RULES = {
    "depth >= 2": lambda f: f["depth"] >= 2,
    "kind is code": lambda f: f["kind"] == "code",
    "the parent is not the first sibling": lambda f: ~f["the parent is the first sibling"],
    "temperature >= 0.7": lambda f: f["temperature"] > 0,
    "context length >= 2,049": lambda f: f["context length"] > 2048,
    "depth and parent": lambda f: (f["depth"] >= 2) & ~f["the parent is the first sibling"],
    "kind or sibling": lambda f: (f["kind"] == "list") | (f["sibling"] == 3),
    "three": lambda f: (f["depth"] >= 3) & (f["sibling"] >= 2) & (f["kind"] != "chat"),
    "a range": lambda f: (f["context length"] >= 1000) & (f["context length"] <= 1500),
}


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("seed", range(3))
def test_a_planted_rule_is_found(name, seed):
    facts = random_facts(seed)
    differs = RULES[name](facts)
    found = find(facts, differs)
    assert found is not None
    assert (found.holds(facts) == differs).mean() > 0.998  # thresholds between observed values are all alike
    assert found.hits_in == found.total_in
    assert found.hits_out <= 2


@pytest.mark.parametrize("name", ["three", "depth >= 2"])
def test_of_many_items_some_are_searched_and_the_figures_are_over_all(name, monkeypatch):
    monkeypatch.setattr(conditions, "SEARCHED", 400)
    facts = random_facts(1)
    differs = RULES[name](facts)
    found = find(facts, differs)
    assert (found.holds(facts) == differs).mean() > 0.998
    assert found.total_in + found.total_out == len(differs)


@settings(max_examples=40)
@given(seed=st.integers(0, 10**6), miss=st.floats(0, 0.3), false=st.floats(0, 0.05), depth=st.integers(2, 5))
def test_a_rule_is_found_behind_noise(seed, miss, false, depth):
    """Some that should differ do not (they agree by chance), and a few others do."""
    facts = random_facts(seed)
    draw = np.random.default_rng(seed + 1)
    rule = facts["depth"] >= depth
    differs = np.where(rule, draw.random(len(rule)) >= miss, draw.random(len(rule)) < false)
    found = find(facts, differs)
    assert found is not None
    assert f"depth >= {depth}" in found.text or f"depth == {depth}" in found.text


@pytest.mark.parametrize(
    "share", [pytest.param(0.005, marks=pytest.mark.slow), 0.05, pytest.param(0.5, marks=pytest.mark.slow)]
)
def test_noise_has_no_condition(share):
    found = 0
    for seed in range(100):
        facts = random_facts(seed, items=600)
        differs = np.random.default_rng(1000 + seed).random(600) < share
        found += find(facts, differs) is not None
    assert found <= 5


def test_items_of_a_cluster_count_as_one():
    """Twelve nodes of one step that differ together are one observation, not twelve."""
    draw = np.random.default_rng(0)
    steps = np.repeat(np.arange(50), 12)
    facts = {"depth": np.tile(np.arange(12), 50), "batch": draw.integers(1, 9, 50).repeat(12)}
    facts["place"] = np.arange(50).repeat(12)
    differs = steps == 17
    assert find(facts, differs) is not None
    assert find(facts, differs, clusters=steps) is None


def test_fishers_exact_test():
    from scipy.stats import fisher_exact

    for table in ((3, 1, 1, 3), (12, 0, 5, 90), (1, 0, 0, 1), (0, 4, 7, 2)):
        a, b, c, d = table
        assert np.exp(log_fisher(a, b, c, d)) == pytest.approx(fisher_exact([[a, b], [c, d]], "greater").pvalue)


def test_few_that_differ_are_told_by_what_they_have_in_common_and_the_fewest_others_have():
    facts = {"depth": [3 if i in (7, 90) else i % 2 for i in range(267)], "batch size": [2] * 267, "kind": ["a"] * 267}
    assert rarest(facts, [i == 7 for i in range(267)]) == "depth 3 (1); in brackets: of 266 others"
    assert rarest(facts, [i < 100 for i in range(267)]) == ""
    assert rarest({"batch size": [2] * 267}, [i == 7 for i in range(267)]) == ""
