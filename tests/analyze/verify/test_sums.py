"""The sums, their bounds and Holm's correction: how seldom what is healthy is convicted, and what is seen."""

import dataclasses
import math

import numpy as np
import pytest

from specscope.analyze.diagnose.causes import Cause
from specscope.analyze.diagnose.run import examine
from specscope.analyze.findings import CheckResult
from specscope.analyze.significance import holm
from specscope.analyze.verify.chance import drafted
from specscope.analyze.verify.sums import Likeliest, Sum
from specscope.analyze.verify.trial import judge
from specscope.trace.record.notes import ParentsBuilder
from tests.analyze.synthetic import Synthetic
from tests.analyze.verify.edits import check, failed

LEVEL = 0.01 / 14  # of each of so many checks, where the whole trial's is 1 %


def softmax(logits, temperature=1.0):
    weights = np.exp((logits - logits.max(1, keepdims=True)) / temperature)
    return weights / weights.sum(1, keepdims=True)


def likely(rng, n, kind):
    """Logits [n, V] of nearly flat rows, of rows of all kinds of entropies, and of rows with a favourite."""
    if kind == "flat":
        return rng.normal(0, 0.3, (n, 60))
    return rng.normal(0, 1, (n, 300)) * (rng.uniform(1, 4, (n, 1)) if kind == "mixed" else 4)


def drawn(rng, q):
    return np.minimum((q.cumsum(1) < rng.random((len(q), 1))).sum(1), q.shape[1] - 1)


def draws(q, token):
    here = q[np.arange(len(q)), token]
    logs = np.log(np.maximum(q, 1e-300))
    entropy = -(q * logs).sum(1)
    varentropy = (q * logs**2).sum(1) - entropy**2
    difference = -np.log(here) - entropy
    surprisal = Sum.of(difference, varentropy, float(np.abs(difference).max(initial=1.0)), np.arange(len(q)))
    return dataclasses.replace(surprisal, likeliest=Likeliest.of(here, q.argmax(1) == token))


def run(rng, n, kind, *, stated=1.0, taken=1.0, likeliest=0.0):
    """Drafts of a run. `stated`, `taken`: temperatures; `likeliest`: the share of drafts that is not drawn."""
    logits = likely(rng, n, kind)
    q = softmax(logits, stated)
    token = np.where(rng.random(n) < likeliest, q.argmax(1), drawn(rng, softmax(logits, taken)))
    return draws(q, token)


@pytest.mark.parametrize(
    ("kind", "n", "runs"), [("flat", 20, 900), ("mixed", 20, 700), ("peaked", 150, 400), ("mixed", 1000, 100)]
)
def test_healthy_drafters_are_not_convicted(kind, n, runs):
    """2,100 runs, short and long: a p-value is below x with a probability of x at most."""
    rng = np.random.default_rng(4)
    values = np.array([run(rng, n, kind).p_value for _ in range(runs)])
    for level in (0.3, 0.1, 0.01):
        assert (values <= level).mean() <= level
    assert (values > LEVEL).all()


def test_a_drafter_whose_rows_follow_from_its_own_draws_is_not_convicted():
    """What comes next may depend on what was drawn, and a run may end where it likes: here, when it looks worst."""
    rng = np.random.default_rng(5)
    worst = []
    for _ in range(300):
        q, hit, largest = [], [], 0.0
        for _ in range(60):
            top = 0.2 if hit and hit[-1] else 0.6
            hit.append(rng.random() < top)
            q.append(top if hit[-1] else 0.01)
            largest = min(largest, Likeliest.of(np.array(q), np.array(hit)).log_chance)
        worst.append(largest)
    for level in (0.3, 0.1, 0.01):
        assert np.mean(np.array(worst) <= math.log(level)) <= level


@pytest.mark.parametrize(
    ("fault", "kind", "n"),
    [
        ({"likeliest": 1.0}, "flat", 20),
        ({"likeliest": 1.0}, "mixed", 20),
        ({"likeliest": 1.0}, "peaked", 60),
        ({"likeliest": 0.5}, "flat", 60),
        ({"taken": 0.7}, "mixed", 250),
        ({"stated": 0.7}, "mixed", 250),
        ({"taken": 0.7}, "flat", 3000),
    ],
)
def test_another_way_to_draft_is_seen(fault, kind, n):
    rng = np.random.default_rng(6)
    found = [run(rng, n, kind, **fault) for _ in range(20)]
    assert sum(one.p_value <= LEVEL for one in found) >= 19
    assert sum(one.takes_likeliest for one in found) == (20 if "likeliest" in fault else 0)


def test_always_the_likeliest_has_the_chance_of_the_product_of_its_probabilities():
    q = np.array([0.25, 0.1, 0.5])
    found = Likeliest.of(q, np.ones(3, bool))
    assert q.prod() <= found.p_value <= 5 * q.prod()  # it is over the mean of five shares
    assert Likeliest.of(np.ones(9), np.ones(9, bool)).p_value == 1.0  # all of q lay there
    assert Likeliest.of(np.zeros(0), np.zeros(0, bool)).p_value == 1.0
    assert Likeliest.of(np.full(500, 0.1), np.ones(500, bool)).log_chance < -1000
    assert "10^-499" in Likeliest.of(np.full(500, 0.1), np.ones(500, bool)).words


def test_of_several_likeliest_tokens_one_has_rank_1():
    """So the chance of rank 1 is its q, in a flat row too."""
    notes = ParentsBuilder(3, 1)
    notes.drawn(0, np.array([0.1, 0.3, 0.3, 0.3], np.float32), np.arange(3), np.array([3, 1, 0]))
    assert notes.node["q_rank"].tolist() == [2, 1, 4]


class TakesLikeliest(Synthetic):
    """Of each row the likeliest token, said to be drawn."""

    def _siblings(self, q, count, noise, coin):
        return np.argsort(-q)[:count].tolist()


def test_a_drafter_that_takes_the_likeliest_is_convicted_and_named():
    history = TakesLikeliest(1, "1x1").run(1, 60)
    found = check(history, "drafted surprisal")
    assert found.result is CheckResult.FAILED
    assert found.unit == "draw"
    assert f"{found.tested} of {found.tested} are the likeliest" in found.detail
    assert examine(history, trial=judge(history, source="x")).suspects[0].cause is Cause.Q_NOT_DRAWN
    assert failed(Synthetic(1, "1x1").run(1, 60)) == []


def test_under_a_rule_that_looks_ahead_only_the_roots_children_count():
    """Which inner nodes are accepted depends there on what is drawn below them: their children are no fair sample."""
    c = judge(Synthetic(2, "2x2").run(1, 50), source="x").evidence
    every = drafted(c)[0].count
    ahead = np.ones(len(c), bool)
    c.__dict__.update(ahead=ahead, walks=~ahead)
    assert 0 < drafted(c)[0].count < every


def total(rng, chance, count):
    a = np.full(count, chance)
    found = (rng.random(count) < a) - a
    return Sum.of(found, a * (1 - a), 1.0, np.arange(count))


@pytest.mark.parametrize(("chance", "count"), [(0.5, 20), (0.01, 50), (0.002, 2000), (0.9, 400)])
def test_the_bound_holds(chance, count):
    """P(p-value <= x) <= x, for few and for rare ones too."""
    rng = np.random.default_rng(1)
    values = np.array([total(rng, chance, count).p_value for _ in range(4000)])
    for level in (0.3, 0.1, 0.01):
        assert (values <= level).mean() <= level


def test_holm():
    """Holm 1979: the smallest against alpha / m, the next against alpha / (m - 1)."""
    assert holm([0.01, 0.04, 0.03, 0.005], 0.05) == [True, False, False, True]
    assert holm([], 0.05) == []
    assert holm([0.06], 0.05) == [False]


def test_the_distance_of_uniform_numbers():
    rng = np.random.default_rng(3)
    values = [Sum.uniform(rng.random(200)).p_value for _ in range(1000)]
    assert np.mean(np.array(values) <= 0.05) <= 0.05 + 3 * math.sqrt(0.05 / 1000)  # the bound is all but exact
    assert Sum.uniform(rng.random(200) ** 2).p_value < 1e-6
    assert not Sum.uniform(np.zeros(0)).judged
