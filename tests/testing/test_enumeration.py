"""A rule of one's own is proved lossless, or found to be lossy, over every draw and coin."""

from functools import partial

import numpy as np
import pytest

from specscope.errors import UserError
from specscope.speculate.verify import host
from specscope.testing import lossless
from specscope.testing.enumeration import by_coins, total_variation
from specscope.trace.record.own_rule import OwnRule
from specscope.trace.record.tree import Drawn
from specscope.tree_shape import parse_tree

SAMPLED = Drawn.WITHOUT_REPLACEMENT


def ratio(trial):
    return min(1.0, trial.p / trial.q)


def tossed(trial):
    """The same, as many kernels have it: it tosses the coin itself."""
    return trial.coin * trial.q <= trial.p


@pytest.mark.every(2)
@pytest.mark.parametrize("rule", [ratio, tossed])
@pytest.mark.parametrize(("tree", "vocabulary"), [("1", 5), ("3x1", 4), ("2", 4), ("[(0,), (1,), (0, 0)]", 3)])
def test_the_standard_rule_is_lossless(rule, tree, vocabulary):
    found = lossless(rule, tree, vocabulary=vocabulary, seeds=2)
    assert found.largest < (1e-12 if rule is ratio else 1e-9)
    assert found.is_lossless
    assert found.cases == 6
    assert str(found).startswith(f"{rule.__name__} is lossless over 6 p and q; ")


LOSSY = {
    "typical": lambda trial: trial.p > min(0.09, 0.3 * np.exp(-trial.entropy)),
    "relaxed": lambda trial: trial.p > 0.5 * trial.choice_p,
    "lenient": lambda trial: min(1.0, 1.2 * trial.p / trial.q),
    "greater": lambda trial: trial.p > trial.q,
    "upside down": lambda trial: min(1.0, trial.q / trial.p) if trial.p else 1.0,
    "p alone": lambda trial: trial.p,
    "elder siblings forgotten": lambda trial: min(1.0, trial.p / trial.q) if not trial.elders else 1.0,
    "below the root": lambda trial: min(1.0, trial.p / trial.q) if trial.depth == 1 else trial.p > 0.2,
    "a coin used twice": lambda trial: trial.coin * trial.q * (1 + trial.coin) <= trial.p,
}


@pytest.mark.parametrize("name", LOSSY)
def test_a_lossy_rule_is_found(name):
    both = (lossless(LOSSY[name], tree, drawn=SAMPLED, seeds=3) for tree in ("2x1", "2"))
    found = next(each for each in both if each.largest > 0.01)
    assert not found.is_lossless
    assert "is not lossless over 3 p and q" in str(found)
    assert found.where in str(found)


def test_it_is_the_total_variation():
    """q is all at the token of which p has half, and everything is accepted."""
    p, q, everything = np.array([0.5, 0.3, 0.2]), np.array([1.0, 0.0, 0.0]), OwnRule("all", lambda trial: True)
    outcomes = by_coins(partial(host.verify, own=everything))
    assert total_variation(parse_tree("1"), lambda _: p, lambda _: q, SAMPLED, outcomes) == pytest.approx(0.5)


def test_coins_that_are_no_interval_and_a_probability_that_is_none_are_refused():
    with pytest.raises(UserError, match="accepts coins that are no interval from 0"):
        lossless(lambda trial: 0.3 < trial.coin < 0.6)
    with pytest.raises(UserError, match=r"returned 2\.0 for p = .* must return a probability"):
        lossless(lambda trial: 2.0)
