"""tree_attention against float64: any mixture of chunks, tokens and trees, and every variant of a layer."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specscope.kernels import tree_attention
from specscope.kernels.tree_batch import LayerShape, TreeBatch
from tests.kernels import DEVICE
from tests.kernels.cases import check_attention, near, on_host, part

SEEDS = st.integers(0, 2**32 - 1).map(np.random.default_rng)


@settings(max_examples=16, deadline=None)
@given(
    rng=SEEDS,
    requests=st.integers(1, 4),
    window=st.sampled_from([None, None, 1, 7, 40]),
    softcap=st.sampled_from([None, None, 5.0]),
    sinks=st.booleans(),
    splits=st.sampled_from([1, 1, 2, 4]),
    keys=st.sampled_from([16, 32, 64]),
    wrong=st.sampled_from([None, float("nan"), float("inf")]),
)
def test_any_batch(rng, requests, **how):
    check_attention(tree_attention, rng, requests=requests, **how)


@pytest.mark.every(3)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("how", [{}, {"splits": 2}, {"window": 9}, {"softcap": 20.0}, {"sinks": True}])
def test_half_types_sum_in_float32(dtype, how):
    for seed in range(3):
        check_attention(tree_attention, np.random.default_rng(seed), dtype, **how)


@pytest.mark.slow
@pytest.mark.parametrize("splits", [1, 4, 16])
def test_long_contexts(splits):
    check_attention(
        tree_attention, np.random.default_rng(splits), most_context=3000, requests=2, splits=splits, keys=64
    )


def test_tiles_reach_no_further_than_their_rows_see():
    """Of a chunk of 40 rows in tiles of 16, the first tile reads no slot that only later rows see: those hold NaN."""
    rng, heads = np.random.default_rng(0), LayerShape(1, 16, 16)
    parts = [part(rng, 10, 40, 0, 40, list(range(4)))]
    batch = TreeBatch.build(parts, DEVICE)
    query, rows = torch.randn(40, 4, 16, device=DEVICE), torch.randn(64, 32, device=DEVICE)
    wanted = on_host(query, rows, heads, parts, 0.2)
    seen = torch.arange(26)
    slots = batch.table[0].cpu().long()[seen // 16] * 16 + seen % 16
    poisoned = torch.full_like(rows, torch.nan)
    poisoned[slots] = rows[slots]
    got = tree_attention.tree_attention(query, poisoned, heads, batch, scale=0.2, keys=16)
    near(got[:16], wanted[:16], 3e-6)
    assert got[16:].isnan().any(-1).all()
