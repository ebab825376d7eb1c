"""Norms and likeliest tokens against float64, whatever the width, rows and threads."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from specscope.kernels.cpu.rows import Norm, likeliest
from tests.kernels.cpu.threads import threads

WIDTHS = st.one_of(st.integers(1, 200), st.sampled_from([1023, 1024, 1025, 2048, 5000]))


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@given(st.integers(1, 9), st.integers(1, 200), st.integers(1, 3), st.sampled_from([1e-4, 1.0, 1e4]))
def test_a_norm_is_float64s(rows, width, count, scale):
    x, weight = random(rows, width) * scale, random(width, seed=1)
    wide = x.double()
    exact = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    with threads(count):
        got = Norm.of(weight, 1e-5)(x)
    assert torch.allclose(got.double(), exact, rtol=1e-5, atol=1e-7)


@given(st.integers(1, 6), WIDTHS, st.integers(1, 24), st.integers(1, 3), st.sampled_from([0.1, 3.0, 60.0]))
def test_the_likeliest_are_those_of_a_stable_sort_in_float64(rows, width, count, workers, scale):
    logits = (random(rows, width, seed=width) * scale).round(decimals=1)  # so that some are equal
    with threads(workers):
        tokens, values = likeliest(logits, count)
    wide = logits.double().numpy()
    order = np.argsort(-wide, axis=1, kind="stable")[:, :count]
    assert tokens.shape == values.shape == (rows, min(count, width))
    assert (tokens == order).all()
    exact = np.take_along_axis(wide, order, 1) - np.log(np.exp(wide).sum(1, keepdims=True))
    assert values == pytest.approx(exact, rel=1e-6, abs=2e-6)


@given(st.integers(2, 9))
def test_a_row_has_the_same_likeliest_alone_and_among_others(rows):
    logits = random(rows, 3000)
    alone = [likeliest(row[None], 5) for row in logits]
    for count in (1, 2, 3):
        with threads(count):
            tokens, values = likeliest(logits, 5)
        assert (tokens == np.concatenate([one[0] for one in alone])).all()
        assert (values == np.concatenate([one[1] for one in alone])).all()


def test_what_cannot_be_drawn_has_no_probability():
    logits = random(3, 2050)
    logits[0, :2047] = -torch.inf
    logits[1] = -torch.inf
    logits[2, 5] = torch.nan
    tokens, values = likeliest(logits, 4)
    assert sorted(tokens[0, :3]) == [2047, 2048, 2049]
    assert np.exp(values[0]).tolist() == pytest.approx([*logits[0, tokens[0, :3]].softmax(0).tolist(), 0.0])
    assert np.isneginf(values[1]).all()
    assert 5 not in tokens[2]
