"""tree_attention against float64: any mixture of chunks, tokens and trees, and every variant of a layer."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specscope.kernels import tree_attention
from specscope.kernels.tree_batch import TreeBatch
from tests.kernels import DEVICE
from tests.kernels.cases import check_attention, part

SEEDS = st.integers(0, 2**32 - 1).map(np.random.default_rng)


@pytest.fixture(autouse=True)
def poisoned():
    """Tensors that nobody filled hold NaN."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@settings(max_examples=60, deadline=None)
@given(
    rng=SEEDS,
    requests=st.integers(1, 4),
    window=st.sampled_from([None, None, 1, 7, 40]),
    softcap=st.sampled_from([None, None, 5.0]),
    sinks=st.booleans(),
    splits=st.sampled_from([1, 1, 2, 4]),
    keys=st.sampled_from([16, 32, 64]),
)
def test_any_batch(rng, requests, **how):
    check_attention(tree_attention, rng, requests=requests, **how)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("how", [{}, {"splits": 2}, {"window": 9}, {"softcap": 20.0}, {"sinks": True}])
def test_half_types_sum_in_float32(dtype, how):
    for seed in range(3):
        check_attention(tree_attention, np.random.default_rng(seed), dtype, **how)


@pytest.mark.parametrize("size", [64, 80, 96, 128, 192, 256])
def test_head_sizes(size):
    check_attention(tree_attention, np.random.default_rng(size), size=size, most_context=40, requests=2)


def test_values_may_be_narrower_than_keys():
    check_attention(tree_attention, np.random.default_rng(0), size=96, value_size=64)


@pytest.mark.parametrize("fold", [1, 3, 5, 8, 20])
def test_any_number_of_query_heads_share_a_key_head(fold):
    check_attention(tree_attention, np.random.default_rng(fold), fold=fold)


@pytest.mark.parametrize("nodes", [1, 63, 64, 65, 200])
def test_trees_of_more_nodes_than_a_word_has_bits(nodes):
    check_attention(tree_attention, np.random.default_rng(nodes), most_nodes=nodes, most_context=20, requests=2)


@pytest.mark.slow
@pytest.mark.parametrize("splits", [1, 4, 16])
def test_long_contexts(splits):
    check_attention(
        tree_attention, np.random.default_rng(splits), most_context=3000, requests=2, splits=splits, keys=64
    )


def test_tiles_reach_no_further_than_their_rows_see():
    rng = np.random.default_rng(0)
    batch = TreeBatch.build([part(rng, 10, 6, 0, 6, list(range(9))), part(rng, 0, 1, 2, 3, list(range(9)))], DEVICE)
    assert batch.tiles(4)[:, :3].tolist() == [[0, 0, 14], [0, 4, 16], [1, 0, 3]]
    assert batch.tiles(4)[:, 3].tolist() == [10, 14, 0]
