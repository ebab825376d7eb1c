"""Entropies of what is left of a row, against float64."""

import numpy as np
import pytest

from specscope.trace.record.notes import spread, spread_without


def row(seed, off):
    """A likely token 7, and a float32 softmax that adds up to 1 + off."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(0, 3, 20_000)
    logits[7] += rng.uniform(6, 16)
    weights = np.exp(logits - logits.max())
    return (weights / weights.sum() * (1 + off)).astype(np.float32)


@pytest.mark.parametrize("off", [0.0, -1e-5, 1e-5])
def test_what_is_left_has_its_own_entropy_whatever_the_row_adds_up_to(off):
    known = 0
    for seed in range(60):
        p = row(seed, off)
        found = spread_without(spread(p), float(p[7]), float(p.sum()))
        if found is None:
            continue
        left = p.astype(np.float64)
        left[7] = 0
        left = left[left > 0] / left.sum()
        entropy = -(left * np.log(left)).sum()
        varentropy = (left * np.log(left) ** 2).sum() - entropy**2
        assert found == (pytest.approx(entropy, rel=1e-5), pytest.approx(varentropy, rel=1e-3))
        known += 1
    assert known > 20


def test_where_little_is_left_nothing_is_said():
    p = np.array([0.95, 0.03, 0.02], np.float32)
    assert spread_without(spread(p), 0.95, 1.0) is None
