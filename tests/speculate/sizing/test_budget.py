"""Budgets: the nodes of most worth, of one request and of a batch."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specscope.speculate.sizing.acceptance import MIDDLES, Curve
from specscope.speculate.sizing.budget import Budget, share_out

scores = st.lists(st.floats(-8, 0), max_size=20).map(lambda xs: sorted(xs, reverse=True))


@given(scores, st.lists(st.floats(0, 0.5), min_size=12, max_size=12))
def test_the_best_nodes_are_those_of_most_worth(found, steps):
    prices = np.cumsum([0.0, *steps])
    budget = Budget(4, 12, prices, np.zeros(4), np.ones(4), Curve(np.array(MIDDLES)), "")
    count, value = budget.best(found)
    worth = [budget.curve.at(found[:n]).sum() - prices[n] for n in range(min(len(found), 12) + 1)]
    assert value == pytest.approx(max(worth))
    assert worth[count] == pytest.approx(max(worth))


falling = st.lists(st.floats(0, 1), max_size=3).map(lambda xs: np.array(sorted(xs, reverse=True)))


@given(st.lists(falling, min_size=1, max_size=4), st.lists(st.floats(0, 0.6), min_size=12, max_size=12), st.booleans())
def test_a_batch_verifies_the_nodes_that_are_worth_most_together(chances, steps, last_is_free):
    price = np.cumsum([0.0, *steps])
    priced = Budget(4, 3, np.zeros(4), np.zeros(4), np.ones(4), Curve(np.array(MIDDLES)), "", price)
    budgets = [priced] * len(chances)
    if last_is_free:
        budgets[-1] = priced.with_free_rows(3)
    counts = share_out(budgets, chances)
    if last_is_free:
        assert chances[-1][: counts[-1]].sum() == pytest.approx(chances[-1].sum())
        counts, chances = counts[:-1], chances[:-1]

    def worth(counts):
        return sum(one[:n].sum() for one, n in zip(chances, counts, strict=True)) - price[sum(counts)]

    every = itertools.product(*(range(len(one) + 1) for one in chances))
    assert worth(counts) == pytest.approx(max(map(worth, every)), abs=1e-9)
