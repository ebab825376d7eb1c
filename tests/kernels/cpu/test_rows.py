"""Norms against float64, whatever the width, rows and threads."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from specscope.kernels.cpu.layer import Norm
from tests.kernels.cpu.threads import threads


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
