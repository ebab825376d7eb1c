"""A run under each rule and each parameter passes every check; edits, and a judge told of others, convict it."""

import dataclasses

import pytest

from specscope.analyze.diagnose.run import examine
from specscope.analyze.findings import CheckResult
from specscope.speculate.changes import Changes
from specscope.speculate.sampling import LogitRows
from specscope.speculate.verify import traversal
from specscope.trace.record.records import FinalKind, Outcome
from specscope.trace.record.rules import BLOCK, MATCH, STANDARD, TRAVERSAL
from specscope.trace.record.tree import ROOT
from tests.analyze.edits import at, check, checks, edited, elder, failed, of, passed, put, recovered, under
from tests.analyze.verify.conftest import HOT, run
from tests.engines import tiny_engine
from tests.speculate.verify.test_rules import TRAVERSAL_MISTAKES, mutant

TREES = {
    BLOCK: "5",
    TRAVERSAL: "[(0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0)]",
    MATCH: "[(0,), (1,), (0, 0), (1, 0)]",
}


def engine_of(target, rule, tree, changes=None):
    how = {"drafter": "draft_model", "draft_model": "self:2", "max_batch": 3, "max_step_tokens": 24}
    return tiny_engine(target, changes=changes, tree=tree, rule=rule, **how)


@pytest.fixture(scope="module", params=list(TREES))
def judged(request, deep):
    return request.param, run(engine_of(deep, request.param, TREES[request.param]), max_tokens=60, **HOT)


def test_a_healthy_run_passes_every_check(judged):
    rule, history = judged
    assert failed(history) == []
    assert {part.rule for record in history.steps for part in record.requests if part.verdict} == {rule}
    found = checks(history)
    for name in ("accept probability", "p at later trials", "residual mass", "trial order", "emitted surprisal"):
        assert found[name].result is CheckResult.PASSED, name
    assert (found["outcomes"].result is CheckResult.PASSED) is (rule != MATCH)
    assert not examine(history, "run.jsonl").faults


REJECTED, ACCEPT_PROB = Outcome.REJECTED, lambda part, i: part.verdict.accept_prob[i]
EDITS = {
    "accept probability": at(REJECTED, lambda p, i: ACCEPT_PROB(p, i) > 0.01, verdict__accept_prob=0.0),
    "residual mass": at(REJECTED, verdict__residual_mass=1.01),
    "coins": at(REJECTED, lambda p, i: ACCEPT_PROB(p, i) < 0.9, verdict__coin=0.95),
    "kind of final token": of(recovered, verdict__kind=FinalKind.BONUS),
}


@pytest.mark.parametrize("name", EDITS)
def test_an_edit_is_convicted(judged, name):
    assert name in failed(edited(judged[1], EDITS[name]))


def test_what_each_rule_holds_coins_and_ratios_to(judged):
    """The accepted node whose own coin spoke is held to it; those above it are not. A ratio is capped.

    Under match coins are held against no probability, and siblings have one.
    """
    rule, history = judged
    if rule == MATCH:
        assert "coins" in failed(edited(history, at(REJECTED, elder, verdict__coin=0.123)))
        return

    def coin_at(place):
        at_node = lambda p: put(p.verdict.coin, p.verdict.path[place], 0.9999)  # noqa: E731
        return of(lambda p: len(p.verdict.path) > 1, verdict__coin=at_node)

    assert "outcomes" in failed(edited(history, coin_at(-1)))
    assert "outcomes" not in failed(edited(history, coin_at(0)))
    more = lambda p, i: p.verdict.p_trial[i] > p.verdict.q_trial[i] > 0  # noqa: E731
    ratio = lambda p, i: p.verdict.p_trial[i] / p.verdict.q_trial[i]  # noqa: E731
    assert "accept probability" in failed(edited(history, at(REJECTED, more, verdict__accept_prob=ratio)))


@pytest.mark.every(9)
@pytest.mark.parametrize("name", TRAVERSAL_MISTAKES)
def test_a_mistake_in_the_rule_is_seen_in_a_run(deep, monkeypatch, name):
    """Each mistake that the enumeration catches, planted in a running engine: its own evidence gives it away."""
    monkeypatch.setattr(traversal, "verify", mutant(traversal, *TRAVERSAL_MISTAKES[name]))
    history = run(engine_of(deep, TRAVERSAL, TREES[TRAVERSAL]), max_tokens=120, **HOT)
    assert failed(history)


@pytest.mark.every(5)
@pytest.mark.parametrize("what", ["accepted", "rejected", "deep", "final"])
@pytest.mark.parametrize("rule", [*TREES, STANDARD])
def test_what_is_forced_convicts_nobody(deep, rule, what):
    """Verdicts that follow from force are left out of every check, exact and statistical."""
    places = range(0, 200, 2)
    node = 2 if what == "deep" else 0
    outcomes = {} if what == "final" else {(place, node): what != "rejected" for place in places}
    changes = Changes(outcomes=outcomes, tokens=dict.fromkeys(places, 7) if what == "final" else {})
    history = run(engine_of(deep, rule, TREES.get(rule, TREES[TRAVERSAL]), changes), max_tokens=50, **HOT)
    assert any(len(part.verdict.forced) for record in history.steps for part in record.requests if part.verdict)
    assert failed(history) == []


SAMPLED = {
    "top-k": {"temperature": 1.3, "top_k": 20},
    "min-p": {"temperature": 1.1, "min_p": 0.05},
    "top-p": {"temperature": 1.0, "top_p": 0.7},
    "temperature and penalties": {"temperature": 0.9, "presence_penalty": 0.5, "logit_bias": {65: 2.0}},
}
OTHER = {
    "top-k": {"top_k": 2},
    "min-p": {"min_p": 0.5},
    "top-p": {"top_p": 0.2},
    "temperature and penalties": {"presence_penalty": 0.0},
}


@pytest.mark.every(3)
@pytest.mark.parametrize("name", SAMPLED)
@pytest.mark.parametrize("engine", ["draft tree", "eagle dynamic"])
def test_each_rule_is_seen_and_passes(bench, name, engine):
    history = run(bench.engine(engine), **SAMPLED[name])
    assert failed(history) == []
    assert passed(history, name)
    found = check(under(history, **OTHER[name]), name)
    assert found.result is CheckResult.FAILED
    assert "at depth" in found.detail


def test_tokens_that_tie_at_a_border_of_top_p_are_all_kept(bench):
    """In 16 bits logits lie on a grid, and many share the last place of a long tail: more mass than top_p is kept."""
    history = run(bench.engine("draft tree"), temperature=1.0, top_p=0.7)
    kept = of(
        lambda part: part.parents is not None and part.verdict.p[0] > 0 and part.tree.parent[0] == ROOT,
        parents__rank=lambda part: put(part.parents.rank, 0, 180),
        parents__raw_p=lambda part: put(part.parents.raw_p, 0, 1e-4),
        parents__choice_p=lambda part: part.parents.choice_p * _kept(part) / 0.7025,
    )
    assert "top-p" in failed(edited(history, kept))
    history.run = dataclasses.replace(history.run, dtype="bfloat16")
    assert "top-p" not in failed(edited(history, kept))
    assert check(under(history, top_p=0.2), "top-p").result is CheckResult.FAILED


def _kept(part):
    """The raw mass that the first parent's top-p kept."""
    notes = part.parents
    return notes.top_p[0][notes.top[0] == notes.choice[0]].sum() / notes.choice_p[0]


@pytest.mark.parametrize("said", [1.0, 2.0])
def test_q_of_another_temperature(bench, said):
    """A drafter that sampled colder than the request asked for."""
    history = run(bench.engine("draft tree"), temperature=0.05)
    assert failed(history) == []
    assert passed(history, "draft's temperature")
    assert check(under(history, temperature=said), "draft's temperature").result is CheckResult.FAILED


def test_repetition_penalty_has_a_direction(bench):
    """Where a token was seen before, p may only be less than without it."""
    history = run(bench.engine("draft tree"), temperature=0.9, repetition_penalty=1.3)
    assert failed(history) == []
    assert "temperature and penalties" in failed(under(history, repetition_penalty=1.0))
    assert "temperature and penalties" in failed(under(history, repetition_penalty=0.7))


def test_penalties_that_forget_the_path_are_convicted(bench, monkeypatch):
    """The root's row is right, deeper ones count the output without the drafted tokens on the way."""

    def forgets(context, draft, logits):
        return LogitRows(logits, context.params, context.tokens, context.prompt_len, [[]] * len(logits))

    monkeypatch.setattr("specscope.speculate.verify.batch.logit_rows", forgets)
    history = run(bench.engine("draft tree"), max_tokens=120, temperature=0.7, frequency_penalty=1.5)
    found = check(history, "temperature and penalties")
    assert found.result is CheckResult.FAILED
    assert "at depth 2" in found.detail


def test_rules_that_stop_at_the_root_are_convicted(bench, monkeypatch):
    """top-k is applied to the root's row alone."""
    from specscope.speculate import sampling

    real = sampling.softmax_

    def first_row(rows, params):
        deeper = real(rows[1:].clone(), dataclasses.replace(params, top_k=0))
        rows[1:] = deeper
        real(rows[:1], params)
        return rows

    monkeypatch.setattr("specscope.speculate.sampling.softmax_", first_row)
    history = run(bench.engine("eagle dynamic"), temperature=0.8, top_k=3)
    found = check(history, "top-k")
    assert found.result is CheckResult.FAILED
    assert "at depth 1" not in found.detail
