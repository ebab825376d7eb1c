"""A run under each rule passes every check, and edits of its records are convicted by that rule."""

import pytest

from specscope import Engine
from specscope.analyze.diagnose.run import examine
from specscope.analyze.findings import CheckResult
from specscope.speculate.changes import Changes
from specscope.speculate.verify import traversal
from specscope.trace.record.records import FinalKind, Outcome
from specscope.trace.record.rules import BLOCK, MATCH, STANDARD, TRAVERSAL
from tests.analyze.edits import at, checks, edited, elder, failed, of, put, recovered
from tests.analyze.verify.conftest import HOT, run
from tests.speculate.verify.test_rules import TRAVERSAL_MISTAKES, mutant

TREES = {
    BLOCK: "5",
    TRAVERSAL: "[(0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0)]",
    MATCH: "[(0,), (1,), (0, 0), (1, 0)]",
}


def engine_of(target, rule, tree, changes=None):
    return Engine(
        changes=changes,
        target=str(target),
        dtype="float32",
        kv_memory=0.01,
        max_batch=3,
        max_step_tokens=24,
        drafter="draft_model",
        draft_model="self:2",
        tree=tree,
        rule=rule,
    )


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
