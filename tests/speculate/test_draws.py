"""Draws from rows, against the cumulative sum itself."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from specscope.speculate.verify.distribution import BLOCK, Residual, draw_margin, draw_siblings

WIDTHS = st.sampled_from([1, 2, 30, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK, 1000])
SMALLEST, LARGEST = 2.0**-54, 1 - 2.0**-53  # what coins() gives at least and at most


def by_sum(row, coin):
    """(The token at which the whole cumulative sum passes the coin, in float64, the draw's margin)."""
    total = row.double().cumsum(0)
    whole = float(total[-1])
    token = int(torch.searchsorted(total, coin * whole, right=True))
    if token == len(total):
        token = int(row.nonzero()[-1])
    below, above = float(total[token]) - float(row[token]), float(total[token])
    return token, draw_margin(coin, below / whole, above / whole)


@given(st.integers(0, 10_000), WIDTHS, st.sampled_from([0.5, 4.0, 60.0]), st.floats(SMALLEST, LARGEST))
def test_a_draw_is_that_of_the_cumulative_sum(seed, width, spread, coin):
    row = (torch.randn(width, generator=torch.Generator().manual_seed(seed)) * spread).softmax(-1)
    token, prob, margin = Residual(row).draw(coin)
    wanted, far = by_sum(row, coin)
    assert row[token] > 0
    between = row.double()[min(token, wanted) + 1 : max(token, wanted) + 1].sum()
    assert token == wanted or between < 1e-12  # at a border the last digit of a sum decides
    assert prob == pytest.approx(float(row[token]), rel=1e-6)
    assert token != wanted or margin == pytest.approx(far, abs=1e-12)


@given(st.integers(0, 10_000), WIDTHS, st.integers(1, 6))
def test_siblings_are_drawn_without_replacement(seed, width, count):
    """As from distributions of which each drawn token is taken out, until nothing is left."""
    rng = np.random.default_rng(seed)
    rows = rng.random((4, width)) * (rng.random((4, width)) < rng.choice([0.02, 1.0]))
    rows[:, rng.integers(width)] += 1e-3
    rows = torch.tensor(rows / rows.sum(1, keepdims=True), dtype=torch.float32)
    coins = rng.random((4, count))
    for row, draws, own in zip(rows, draw_siblings(rows, coins.tolist()), coins.tolist(), strict=True):
        left = row
        assert len(draws) == min(count, int((row > 0).sum()))
        for draw_, coin in zip(draws, own, strict=False):
            wanted, far = by_sum(left, coin)
            assert draw_.margin == pytest.approx(far, abs=1e-6)
            if far < 1e-6:
                break  # each renormalises in float32, we never do
            assert (draw_.token, draw_.prob) == (wanted, float(row[wanted]))
            assert draw_.low == pytest.approx(float(left.double()[:wanted].sum()), abs=1e-5)
            assert draw_.low <= coin < draw_.low + float(left[wanted]) + 1e-5
            left = left.clone()
            left[wanted] = 0
            left = left / left.sum() if left.sum() else left
