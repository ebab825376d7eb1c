"""probabilities against float64, and against the engine's own sampling."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from specscope.kernels import sampling as kernel

from specscope.speculate import sampling
from specscope.trace.params import SamplingParams
from tests.kernels import DEVICE
from tests.kernels.cases import near


@given(
    seed=st.integers(0, 1000),
    vocabulary=st.integers(1, 70),
    temperature=st.floats(0.1, 3.0),
    min_p=st.sampled_from([0.0, 0.05, 0.5]),
    block=st.sampled_from([8, 32, 128]),
)
def test_any_logits(seed, vocabulary, temperature, min_p, block):
    logits = (torch.randn(3, vocabulary, generator=torch.Generator().manual_seed(seed)) * 4).to(DEVICE)
    got = kernel.probabilities(logits, temperature, min_p, block)
    near(got, kernel.probabilities_reference(logits, temperature, min_p), 1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_types(dtype):
    logits = torch.randn(2, 300).to(dtype).to(DEVICE)
    near(kernel.probabilities(logits, 0.7), kernel.probabilities_reference(logits, 0.7), 1e-5)


def test_it_is_what_the_engine_samples_from():
    logits = torch.randn(4, 90).to(DEVICE)
    params = SamplingParams(temperature=0.8, min_p=0.1)
    near(kernel.probabilities(logits, 0.8, 0.1), sampling.probabilities(logits / 0.8, params), 1e-6)
