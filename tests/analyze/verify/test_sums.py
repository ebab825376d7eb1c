"""The sums, their bounds and Holm's correction: how seldom what is healthy is convicted, and what is seen."""

import dataclasses
import math

import numpy as np
import pytest

from specscope.analyze.diagnose.causes import Cause
from specscope.analyze.diagnose.run import examine
from specscope.analyze.findings import CheckResult
from specscope.analyze.significance import holm
from specscope.analyze.verify.chance import Likeliest, Sum, drafted, surprisal
from specscope.analyze.verify.trial import judge
from tests.analyze.synthetic import Synthetic
from tests.analyze.verify.edits import check, failed

LEVEL = 0.01 / 14  # of each of so many checks, where the whole trial's is 1 %


def run(rng, n, kind, *, stated=1.0, taken=1.0, likeliest=0.0):
    """Drafts of a run whose rows are nearly flat, of all kinds of entropies, or have a favourite.

    `stated`, `taken`: temperatures; `likeliest`: the share of drafts that is not drawn.
    """
    spread = {"flat": 0.3, "mixed": rng.uniform(1, 4, (n, 1)), "peaked": 4.0}[kind]
    logits = rng.normal(0, 1, (n, 60 if kind == "flat" else 300)) * spread
    q, drawn_from = (np.exp(logits / t) / np.exp(logits / t).sum(1, keepdims=True) for t in (stated, taken))
    drawn = np.minimum((drawn_from.cumsum(1) < rng.random((n, 1))).sum(1), q.shape[1] - 1)
    token = np.where(rng.random(n) < likeliest, q.argmax(1), drawn)
    here, logs = q[np.arange(n), token], np.log(np.maximum(q, 1e-300))
    entropy = -(q * logs).sum(1)
    draws = surprisal(here, entropy, (q * logs**2).sum(1) - entropy**2, np.arange(n))
    return dataclasses.replace(draws, likeliest=Likeliest.of(here, q.argmax(1) == token))


def seldom(values):
    """A p-value is below x with a probability of x at most."""
    return all((np.array(values) <= level).mean() <= level for level in (0.3, 0.1, 0.01))


@pytest.mark.parametrize(
    ("kind", "n", "runs"), [("flat", 20, 900), ("mixed", 20, 700), ("peaked", 150, 400), ("mixed", 1000, 100)]
)
def test_healthy_drafters_are_not_convicted(kind, n, runs):
    rng = np.random.default_rng(4)
    values = [run(rng, n, kind).p_value for _ in range(runs)]
    assert seldom(values)
    assert min(values) > LEVEL


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
    assert examine(history).suspects[0].cause is Cause.Q_NOT_DRAWN
    assert failed(Synthetic(1, "1x1").run(1, 60)) == []


def test_under_a_rule_that_looks_ahead_only_the_roots_children_count():
    """Which inner nodes are accepted depends there on what is drawn below them: their children are no fair sample."""
    c = judge(Synthetic(2, "2x2").run(1, 50), source="x").evidence
    every = drafted(c)[0].count
    ahead = np.ones(len(c), bool)
    c.__dict__.update(ahead=ahead, walks=~ahead)
    assert 0 < drafted(c)[0].count < every


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
