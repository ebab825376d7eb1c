"""probabilities against float64, and against the engine's own sampling."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from specscope.kernels import sampling as kernel
from specscope.speculate import sampling
from specscope.trace.record.params import SamplingParams
from tests.kernels import DEVICE
from tests.kernels.cases import near


def each(rows, value):
    return torch.full((rows,), value, device=DEVICE)


@given(
    seed=st.integers(0, 1000),
    vocabulary=st.integers(1, 70),
    temperature=st.lists(st.floats(0.1, 3.0), min_size=3, max_size=3),
    min_p=st.lists(st.sampled_from([0.0, 0.05, 0.5]), min_size=3, max_size=3),
    block=st.sampled_from([8, 32, 128]),
)
def test_any_logits(seed, vocabulary, temperature, min_p, block):
    logits = (torch.randn(3, vocabulary, generator=torch.Generator().manual_seed(seed)) * 4).to(DEVICE)
    work = logits, torch.tensor(temperature, device=DEVICE), torch.tensor(min_p, device=DEVICE)
    near(kernel.probabilities(*work, block=block), kernel.probabilities_reference(*work), 1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_types(dtype):
    work = torch.randn(2, 300).to(dtype).to(DEVICE), each(2, 0.7), each(2, 0.0)
    near(kernel.probabilities(*work), kernel.probabilities_reference(*work), 1e-5)


def test_it_is_what_the_engine_samples_from():
    logits = torch.randn(4, 90).to(DEVICE)
    params = SamplingParams(temperature=0.8, min_p=0.1)
    wanted = sampling.probabilities(sampling.scaled(logits, 0.8), params)
    near(kernel.probabilities(logits, each(4, 0.8), each(4, 0.1)), wanted, 1e-6)


@pytest.mark.parametrize("temperature", [1e-7, 1e-30, 1e-38, 1e-45, 1e-50, 5e-324, 0.0])
@pytest.mark.parametrize("min_p", [0.0, 0.3])
def test_the_smallest_temperatures_leave_all_to_the_likeliest(temperature, min_p):
    logits = torch.tensor([[-torch.inf, 3.0, 2.9999, -1e30], [1e6, -1e6, 0.0, 1e6]], device=DEVICE)
    got = kernel.probabilities(logits, each(2, temperature), each(2, min_p))
    assert got.tolist() == [[0, 1, 0, 0], [0.5, 0, 0, 0.5]]
