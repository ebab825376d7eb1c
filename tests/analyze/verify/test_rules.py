"""A run under each rule passes every check, and edits of its records are convicted by that rule."""

import numpy as np
import pytest

from specscope.analyze.findings import Result
from specscope.trace.records import FinalKind, Outcome
from specscope.trace.rules import BLOCK, MATCH, TRAVERSAL
from tests.analyze.verify.conftest import HOT, run
from tests.analyze.verify.edits import check, edited, failed, node, put, replaced

TREES = {
    BLOCK: "5",
    TRAVERSAL: "[(0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0)]",
    MATCH: "[(0,), (1,), (0, 0), (1, 0)]",
}


@pytest.fixture(scope="module", params=list(TREES))
def judged(request, deep):
    from specscope import Engine

    engine = Engine(
        target=str(deep),
        dtype="float32",
        kv_memory=0.01,
        max_batch=3,
        max_step_tokens=24,
        drafter="draft_model",
        draft_model="self:2",
        tree=TREES[request.param],
        rule=request.param,
    )
    engine.keep_timeline()
    return request.param, run(engine, max_tokens=60, **HOT)


def test_a_healthy_run_passes_every_check(judged):
    rule, history = judged
    assert failed(history) == []
    assert {part.rule for record in history.steps for part in record.requests if part.verdict} == {rule}
    for name in ("accept probability", "p at later trials", "residual mass", "trial order", "emitted surprisal"):
        assert check(history, name).result is Result.PASSED, name
    assert (check(history, "outcomes").result is Result.PASSED) is (rule != MATCH)


def accept_probability(part):
    i = node(part, Outcome.REJECTED, lambda p, i: p.verdict.accept_prob[i] > 0.01)
    return None if i is None else replaced(part, verdict__accept_prob=put(part.verdict.accept_prob, i, 0.0))


def residual_mass(part):
    i = node(part, Outcome.REJECTED)
    return None if i is None else replaced(part, verdict__residual_mass=put(part.verdict.residual_mass, i, 1.01))


def coins(part):
    i = node(part, Outcome.REJECTED, lambda p, i: p.verdict.accept_prob[i] < 0.9)
    return None if i is None else replaced(part, verdict__coin=put(part.verdict.coin, i, 0.95))


def kind(part):
    return replaced(part, verdict__kind=FinalKind.BONUS) if part.verdict.kind is FinalKind.RECOVERED else None


@pytest.mark.parametrize(
    ("edit", "name"),
    [
        (accept_probability, "accept probability"),
        (residual_mass, "residual mass"),
        (coins, "coins"),
        (kind, "kind of final token"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_an_edit_is_convicted(judged, edit, name):
    _, history = judged
    assert name in failed(edited(history, edit))


def test_a_coin_that_failed_rejects_unless_one_below_it_fell(judged):
    """The accepted node whose own coin spoke is held to it; those above it are not."""
    rule, history = judged
    if rule == MATCH:
        pytest.skip("its coins are held against no probability")

    def last(part):
        path = part.verdict.path
        return replaced(part, verdict__coin=put(part.verdict.coin, path[-1], 0.9999)) if len(path) > 1 else None

    def above(part):
        path = part.verdict.path
        return replaced(part, verdict__coin=put(part.verdict.coin, path[0], 0.9999)) if len(path) > 1 else None

    assert "outcomes" in failed(edited(history, last))
    assert "outcomes" not in failed(edited(history, above))


def test_a_ratio_that_was_not_capped_is_seen(judged):
    rule, history = judged
    if rule == MATCH:
        pytest.skip("it has no ratios")

    def uncapped(part):
        i = node(part, Outcome.REJECTED, lambda p, i: p.verdict.p_trial[i] > p.verdict.q_trial[i] > 0)
        ratio = None if i is None else part.verdict.p_trial[i] / part.verdict.q_trial[i]
        return None if i is None else replaced(part, verdict__accept_prob=put(part.verdict.accept_prob, i, ratio))

    assert "accept probability" in failed(edited(history, uncapped))


def test_siblings_that_each_had_a_coin_are_seen_under_match(judged):
    rule, history = judged
    if rule != MATCH:
        pytest.skip("each of its nodes has a coin")

    def own(part):
        i = node(part, Outcome.REJECTED, lambda p, i: np.any(p.tree.parent[:i] == p.tree.parent[i]))
        return None if i is None else replaced(part, verdict__coin=put(part.verdict.coin, i, 0.123))

    assert "coins" in failed(edited(history, own))
