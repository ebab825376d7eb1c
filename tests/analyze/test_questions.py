"""What a report answers, on runs that can be counted by hand; and conditions, found where one was planted."""

import dataclasses

import numpy as np
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specscope.analyze import conditions, tables
from specscope.analyze.conditions import find, log_fisher, rarest
from specscope.analyze.facts import facts_table
from specscope.analyze.findings import Reference
from specscope.analyze.questions.answers import Count, answer, rejections, tokens_table
from specscope.analyze.questions.evidence import COUNTS_ONLY, Evidence
from specscope.analyze.questions.missed import LEAN, PLACES, ChoicePlace, RejectionKinds, places_of
from specscope.analyze.report import build_report
from specscope.analyze.text import render_text
from specscope.analyze.why import why_run
from specscope.trace.history.history import History
from specscope.trace.record.records import Outcome, Preceded
from specscope.trace.record.tree import ROOT, Drawn
from specscope.trace.record.vocabulary import Vocabulary
from specscope.trace.wire.reading import read_capture
from tests.analyze.audit.runs import run
from tests.analyze.edits import TRACES, sample
from tests.analyze.histories import decode, noted, run_of
from tests.analyze.synthetic import Synthetic
from tests.analyze.texts import page
from tests.engines import tiny_engine

T = 77  # the final token
DRAFT = {"draft_top": [[5, 6, 7, 8]], "draft_top_p": [[0.4, 0.3, 0.2, 0.1]]}
TOP = [[T, 1, 2, 3]], [[0.9, 0.05, 0.01, 0.01]]


def at_root(top=TOP, rank=0, nodes=1, **more):
    """What was noted at the root, of whose likeliest token the drafter had this rank."""
    return noted([-1], nodes, *top, [0.0] * nodes, **DRAFT | more, choice_rank=[rank])


def rejected(rank):
    """A chain of two whose first node was rejected."""
    return decode([5, 9], rejected=[0], final=T, parents=at_root(rank=rank, nodes=2))


def kinds(*parts):
    return RejectionKinds(Evidence.of(run_of(parts))).all()


WHOLE = decode([5, 9], path=[0, 1], final=T)  # a chain of two that was accepted whole


def test_a_kind_is_the_place_of_the_token_the_depth_and_what_preceded():
    answers = kinds(rejected(7), rejected(7), rejected(50), WHOLE, rejected(7))
    assert {(kind.place, kind.depth, kind.preceded): kind.rejections for kind in answers} == {
        (ChoicePlace.RANKED, 1, Preceded.PREFILL): 1,
        (ChoicePlace.RANKED, 1, Preceded.NOTHING): 1,
        (ChoicePlace.LOWER, 1, Preceded.NOTHING): 1,
        (ChoicePlace.RANKED, 1, Preceded.FULL): 1,
    }
    assert {kind.of_rejections for kind in answers} == {4}


def test_the_cost_is_what_steps_that_got_past_the_depth_kept_more():
    """Two steps accepted 2 and 1 nodes: past depth 1 a step kept 1.5, and each rejection at depth 1 kept none."""
    one = decode([5, 9], path=[0], rejected=[1], final=T)
    answers = kinds(rejected(7), WHOLE, one, rejected(7), rejected(7))
    first = answers[0]
    assert (first.place, first.depth, first.compared_drafts) == (ChoicePlace.RANKED, 1, 2)
    lost = {depth: sum(kind.tokens_lost for kind in answers if kind.depth == depth) for depth in (1, 2)}
    assert lost == pytest.approx({1: 3 * 1.5, 2: 1})  # the one that got to depth 2 kept 2, this one 1
    assert [kind.tokens_lost for kind in answers] == sorted((kind.tokens_lost for kind in answers), reverse=True)
    (alone,) = kinds(rejected(7))  # no step got past the depth: a token each
    assert (alone.tokens_lost, alone.compared_drafts) == (1.0, 0)


def test_a_kind_is_about_the_token_that_was_wanted_and_not_the_one_that_came():
    """The target's likeliest token is the drafter's second, and not in the tree; a coin drew another one."""
    parents = at_root(([[6, T, 2, 3]], TOP[1]), rank=2, nodes=2)
    parents = dataclasses.replace(parents, choice=np.array([6], np.int32))
    (kind,) = kinds(decode([5, 9], rejected=[0], final=T, parents=parents))
    assert kind.place is ChoicePlace.TOP


def ends_in(*parts):
    """Where the final token of each part was."""
    evidence = Evidence.of(run_of(parts))
    found = places_of(evidence, np.arange(len(parts)), evidence.columns.final)
    return [PLACES[place] for place in found.tolist()]


def test_dropped_by_re_ranking():
    part = decode([1, 2], path=[0], rejected=[1], final=T, own=[0.5, 0.5], dropped=[(T, 0)])
    assert ends_in(part) == [ChoicePlace.DROPPED]
    elsewhere = decode([1, 2], path=[0], rejected=[1], final=T, own=[0.5, 0.5], dropped=[(T, -1), (T, 2)])
    assert ends_in(elsewhere) == [ChoicePlace.UNKNOWN]


@pytest.mark.parametrize(
    ("notes", "place"),
    [
        (at_root(draft_top=[[5, T, 7, 8]]), ChoicePlace.TOP),
        (at_root(rank=32), ChoicePlace.RANKED),
        (at_root(rank=33), ChoicePlace.LOWER),
        (at_root(rank=0), ChoicePlace.OUTSIDE),  # the target's first choice, and the drafter has no rank for it
        (at_root(([[1, T, 2, 3]], TOP[1])), ChoicePlace.LOWER),  # not the first choice: its rank is not known
        (at_root(draft_top=np.zeros((1, 0)), draft_top_p=np.zeros((1, 0))), ChoicePlace.UNKNOWN),
        (at_root(draft_top=[[T, 0, 0, 0]], draft_top_p=[[0, 0, 0, 0]]), ChoicePlace.UNKNOWN),  # no distribution here
        (None, ChoicePlace.UNKNOWN),
    ],
)
def test_what_the_drafter_thought_of_it(notes, place):
    assert ends_in(decode([9], rejected=[0], final=T, parents=notes)) == [place]


def test_what_is_rejected_where_and_what_was_taken():
    """X is always rejected at depth 2 and Y taken; GOOD is rejected once of three times, at the root."""
    x, y, good = 50, 51, 60
    parts = [
        decode([good, x, 1], path=[0], rejected=[1], final=y, own=[0.9, 0.3, 0.2], request="a", output=0),
        decode([good, x, 1], path=[0], rejected=[1], final=y, own=[0.9, 0.8, 0.2], request="b", output=20),
        decode([good, x], rejected=[0], final=7, own=[0.4, 0.5], request="b", output=40),
    ]
    found = rejections(Evidence.of(run_of(parts, {"a": "code", "b": "chat"}), None))
    assert (found.rejected.count, found.rejected.total) == (3, 5)  # the third X was not tried
    of_x, of_good = found.tokens
    assert (of_x.token, of_x.rejected.count, of_x.rejected.total, of_x.taken) == (x, 2, 2, (Count(y, 2),))
    assert (of_good.token, of_good.rejected.count, of_good.rejected.total) == (good, 1, 3)
    assert of_good.taken == (Count(7, 1),)
    assert str(of_x.examples.first) == "a@0/1"
    assert str(of_x.examples.clearest) == "b@0/1"  # the drafter was surer
    assert not found.notes


def test_lean_evidence_says_what_it_lacks():
    lean, full = (Synthetic(1, "2x2", Drawn.WITHOUT_REPLACEMENT, notes=notes).run(3, 20) for notes in (False, True))
    assert answer(lean).rejections == answer(full).rejections
    assert LEAN in why_run(lean).notes
    assert LEAN not in why_run(full).notes


def test_counts_only_and_nothing():
    counts = read_capture(TRACES.parent / "tests" / "data" / "vllm" / "watched.jsonl").history
    table = tokens_table(answer(counts), counts.vocabulary)
    assert (table.rows, table.notes) == ((), (COUNTS_ONLY,))
    assert "answers" not in build_report(counts, source="x").to_dict()
    table = tokens_table(answer(History()), Vocabulary())
    assert (table.rows, table.notes) == ((), ("nothing was drafted",))
    assert page(render_text, build_report(History(), source="x"))


def test_the_report_prints_rows_with_their_examples_and_the_json_has_all():
    report = build_report(sample("eagle"), source="traces/eagle.jsonl")
    values = orjson.loads(orjson.dumps(report.to_dict()))["answers"]
    tokens = report.answers.rejections.tokens
    assert [one["token"] for one in values["rejections"]["tokens"]] == [one.token for one in tokens]
    assert values["rejections"]["tokens"][0]["examples"]["clearest"] == str(tokens[0].examples.clearest)
    text = page(render_text, report, width=160)
    assert str(tokens[0].examples.clearest) in text
    assert f"{len(tokens) - 10} more; --top {len(tokens)} or --json shows all" in " ".join(text.split())
    assert len(tables.questions(report, 3)[0].rows) == 3
    assert len(tables.questions(report, 10**6)[0].rows) == len(tokens)


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


@settings(max_examples=10)
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
    how = {"drafter": "draft_model", "draft_model": str(tiny), "tree": TREE, "max_batch": 3, "max_step_tokens": 24}
    engine = tiny_engine(tiny, **how)
    engine.runner.cache.pool.__init__(9)
    return run(engine, {"temperature": 0.3}, 30, ["abc " * 12, "hello hello", "the cat sat"])


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
