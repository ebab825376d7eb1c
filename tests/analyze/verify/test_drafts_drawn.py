"""The coins that drew drafts: what a verdict on them sees, and how seldom it sees what is not there."""

import numpy as np
import pytest

from specscope.analyze.findings import CheckResult
from specscope.analyze.locate.formulas import located_draws
from specscope.analyze.verify.trial import judge
from specscope.speculate.drafters import tree_builder
from specscope.trace.record.coins import Stream, coins
from specscope.trace.record.tree import Drawn
from tests.analyze.judges.edits import case_of, changed
from tests.analyze.synthetic import Synthetic
from tests.analyze.verify.conftest import HOT, run
from tests.analyze.verify.edits import check, edited, failed, of, put, replaced

OF_DRAWS = ("draft coins", "draft coins in their intervals", "coins over steps", "coins unequal", "coins of requests")


def test_a_healthy_run_passes(runs):
    for name in OF_DRAWS:
        assert check(runs["sampled"], name).result is CheckResult.PASSED, name
    assert check(runs["sampled"], "draft coins").tested > 100
    assert not located_draws(case_of(runs["sampled"]))


UNTOLD = "the coins that drew drafts are not recorded"


@pytest.mark.parametrize("name", ["greedy", "deterministic", "sampled"])
def test_where_no_coin_drew_a_draft_or_none_is_told_nothing_is_checked(runs, name):
    def without(part):
        return part.notes and replaced(part, notes__coin=np.zeros(0), notes__low=np.zeros(0))

    history = changed(runs[name], without) if name == "sampled" else runs[name]
    for one in OF_DRAWS[:3]:
        found = check(history, one)
        assert found.result is CheckResult.SKIPPED
        assert (found.note == UNTOLD) is (name == "sampled")
    assert not failed(history)


def with_coins(part):
    return part.notes is not None and len(part.notes.coin)


def test_an_interval_or_a_coin_that_is_anothers_is_seen(runs):
    """Off by one: the interval of the token before, or of the one behind. And another coin of the interval."""
    there = lambda p: with_coins(p) and p.tree.q[0] >= 0.01  # noqa: E731
    for move in (-1.0, 1.0):
        beside = of(there, notes__low=lambda p, by=move: put(p.notes.low, 0, p.notes.low[0] + by * p.tree.q[0]))
        assert failed(edited(runs["sampled"], beside)) == ["draft coins in their intervals"]
    nudged = of(with_coins, notes__coin=lambda p: put(p.notes.coin, 0, p.notes.low[0] + 1e-3 * p.tree.q[0]))
    found = edited(runs["sampled"], nudged)
    assert failed(found) == ["draft coins"]
    assert check(found, "draft coins").failed == 1


PLANTED = {  # the coins of drafts, what fails for certain, the operation, and what its place says
    "at every position": (
        lambda seed, stream, position, count: coins(seed, stream, 0, count),
        {"draft coins", "coins over steps"},
        "the coin of another position of the request",
    ),
    "of the verdict": (
        lambda seed, stream, position, count: coins(seed, Stream.VERIFY, position, count),
        {"draft coins", "coins unequal"},
        "the coin of another draw or trial of the same step",
    ),
    "of a step": (
        lambda seed, stream, position, count: np.full(count, coins(seed, stream, position, 1)[0]),
        {"draft coins", "coins unequal"},
        "the coin of another draw or trial of the same step",
    ),
    "of one seed, whatever the position": (
        lambda seed, stream, position, count: coins(3, stream, 0, count),
        {"draft coins", "coins over steps", "coins of requests"},
        "the coin of another position of the request",
    ),
}


@pytest.mark.parametrize("name", PLANTED)
def test_coins_that_are_used_again_are_seen_and_located(engines, monkeypatch, name):
    change, certain, words = PLANTED[name]
    monkeypatch.setattr(tree_builder, "coins", change)
    history = run(engines["draft tree"], **HOT)
    assert certain <= set(failed(history))
    (located,) = located_draws(case_of(history))
    assert located.operation.name == "draft coins"
    assert words in located.sentence
    assert 0 < located.explained <= located.differing
    assert located.unit == "draw"


@pytest.mark.parametrize("tree", ["3", "2x2", "3x1", "[(0,),(1,),(0,0),(0,1)]"])
@pytest.mark.parametrize("drawn", [Drawn.WITHOUT_REPLACEMENT, Drawn.WITH_REPLACEMENT])
def test_healthy_draws_of_another_engine_raise_no_alarm(drawn, tree):
    """Fixed seeds: of healthy runs one in a hundred may be accused by chance, so some seed of many is."""
    for seed in range(6):
        trial = judge(Synthetic(seed, tree, drawn, tells_draws=True).run(2, 25), source="x")
        assert [finding.name for finding in trial.failed] == []
        intervals = {finding.name: finding for finding in trial.checks}["draft coins in their intervals"]
        assert intervals.result is CheckResult.PASSED


@pytest.mark.parametrize(
    ("fault", "names"),
    [
        ("draft coins again", {"coins over steps", "coins in series"}),
        ("draft coins judge", {"coins unequal", "coins and draws"}),
        ("draws beside", {"draft coins in their intervals"}),
        ("draft coins low", {"coins uniform"}),
    ],
)
def test_a_mistake_of_another_engine_is_seen(fault, names):
    assert names <= set(failed(Synthetic(1, "2x2", Drawn.WITHOUT_REPLACEMENT, fault, tells_draws=True).run(3, 100)))
