"""kv_write and kv_compact: what they move is where it belongs, and all else is as it was."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specscope.kernels import kv_compact, kv_write
from tests.kernels.cases import check_compact, check_write

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
SEEDS = st.integers(0, 2**32 - 1).map(np.random.default_rng)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 96, 1024, 1025, 1536])
def test_rows_of_any_width_are_written(dtype, width):
    check_write(kv_write, np.random.default_rng(width), dtype, width=width)


@settings(max_examples=25, deadline=None)
@given(SEEDS, st.integers(0, 20), st.integers(1, 200))
def test_any_slots_are_written(rng, n, width):
    check_write(kv_write, rng, n=n, width=width)


@pytest.mark.parametrize("dtype", DTYPES)
def test_layers_of_different_widths_are_compacted_together(dtype):
    check_compact(kv_compact, np.random.default_rng(1), dtype, widths=(96, 40, 600))


@settings(max_examples=40, deadline=None)
@given(SEEDS, st.integers(1, 4), st.integers(1, 10))
def test_any_accepted_path_is_compacted(rng, requests, depth):
    check_compact(kv_compact, rng, requests=requests, depth=depth, widths=(24,))


def test_nothing_accepted_moves_nothing():
    rows = torch.randn(32, 8)
    none = torch.zeros(0, dtype=torch.int64)
    kept = rows.clone()
    kv_compact.kv_compact(kv_compact.LayerPointers([rows]), none, none, torch.zeros(3, dtype=torch.int64))
    assert torch.equal(rows, kept)
