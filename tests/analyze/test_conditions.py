"""Conditions that tell what differs, and the facts that they are made of: planted rules, noise, and a run by hand."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specscope import Engine, SamplingParams
from specscope.analyze import conditions
from specscope.analyze.conditions import find, log_fisher, rarest
from specscope.analyze.facts import facts_table
from specscope.analyze.findings import Reference
from specscope.trace.history.history import History
from specscope.trace.record.records import Outcome
from specscope.trace.record.tree import ROOT


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


@pytest.mark.parametrize(("seed", "name"), enumerate(RULES))
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


@settings(max_examples=20)
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
    for seed in range(20):
        facts = random_facts(seed, items=600)
        differs = np.random.default_rng(1000 + seed).random(600) < share
        found += find(facts, differs) is not None
    assert found <= 1


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


TREE = "top:[(0,), (1,), (0, 0), (1, 0), (0, 0, 0)]"


@pytest.fixture(scope="module")
def history(tiny):
    """Three requests, of which one is preempted; one prompt comes in chunks."""
    engine = Engine(
        target=str(tiny),
        drafter="draft_model",
        draft_model=str(tiny),
        tree=TREE,
        dtype="float32",
        kv_memory=0.01,
        max_batch=3,
        max_step_tokens=24,
    )
    engine.runner.cache.pool.__init__(9)
    found = History(engine.run_info, engine.vocabulary)
    for at, prompt in enumerate(["abc " * 12, "hello hello", "the cat sat"]):
        params = SamplingParams(max_tokens=30, temperature=0.3, seed=at, ignore_eos=True)
        engine.add(prompt, params, labels={"kind": "even" if at % 2 == 0 else "odd"})
    while engine.busy:
        found.append(engine.step())
    return found


def items(history, nodes):
    """Where every decode step is, or every node; with the step and its place in its request."""
    for record in history.steps:
        for part in record.requests:
            for node in (range(len(part.tree)) if nodes else [None]) if part.verdict is not None else ():
                place = history.requests[part.request].place_of(part.index)
                yield Reference(part.request, part.index, record.step, node), part, place


def test_facts_of_nodes(history):
    where = list(items(history, nodes=True))
    table = facts_table(history, [one for one, *_ in where])
    assert {len(column) for column in table.values()} == {len(where)}
    for at, (one, part, _) in enumerate(where):
        path = part.tree.path_to(one.node)
        rank = [part.tree.children(int(part.tree.parent[node])).index(node) for node in path]
        expected = {
            "depth": len(path),
            "sibling": rank[-1],
            "the path is all first siblings": not any(rank),
            "the path to its parent is all first siblings": not any(rank[:-1]),
            "the parent is the root": part.tree.parent[one.node] == ROOT,
            "the nodes before its parent are its ancestors": path[:-1] == list(range(len(path) - 1)),
            "position of the node": part.position + len(path),
            "token id": part.tree.token[one.node],
            "the token is already on its path": part.tree.token[one.node] in part.tree.token[path[:-1]],
        }
        assert {name: table[name][at] for name in expected} == expected


def test_facts_of_steps(history):
    where = list(items(history, nodes=False))
    table = facts_table(history, [one for one, *_ in where])
    assert "depth" not in table
    for at, (one, part, place) in enumerate(where):
        request = history.requests[one.request]
        record, before = history.steps[request.engine_steps[place]], request.steps[place - 1] if place else None
        rejected = [(step.verdict.outcome == Outcome.REJECTED).sum() for step in request.steps[:place] if step.verdict]
        expected = {
            "batch size": len(record.requests),
            "place in the batch": record.requests.index(part),
            "the step before": part.preceded.value,
            "the step before was accepted in full": part.preceded.value == "full",
            "drafted tokens rejected earlier": sum(rejected),
            "position of the root in its block": part.position % 16,
            "output tokens before": part.position + 1 - len(request.info.prompt_tokens),
            "label kind": request.info.labels["kind"],
        }
        if before is not None and before.verdict is not None and part.preceded.value != "preemption":
            path = before.verdict.path.tolist()
            expected["accepted in the previous step"] = len(path)
            expected["the previous step's path was moved"] = path != list(range(len(path)))
        assert {name: table[name][at] for name in expected} == expected
    assert min(table["preemptions of the request"]) == 0
    assert max(table["preemptions of the request"]) >= 1
    assert max(table["prefill chunks"]) >= 2
