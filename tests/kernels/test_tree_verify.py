"""tree_verify against the rule on the host, whatever the trees and however the work is cut."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specscope.kernels import tree_verify
from specscope.kernels.tree_batch import (
    DETERMINISTIC,
    WITH_REPLACEMENT,
    WITHOUT_REPLACEMENT,
    FlatTrees,
    Tree,
)
from specscope.trace.record.tree import ROOT
from tests.kernels import DEVICE
from tests.kernels.cases import check_verify

SEEDS = st.integers(0, 2**32 - 1).map(np.random.default_rng)
RULES = [DETERMINISTIC, WITHOUT_REPLACEMENT, WITH_REPLACEMENT]


NO_CHOICES = torch.zeros(0, dtype=torch.int64, device=DEVICE)


def read(*work):
    """What becomes of trees, four tokens of the vocabulary at a time."""
    return tree_verify.tree_verify(*work, block=4).to_host()


@pytest.mark.every(3)
@pytest.mark.parametrize("drawn", RULES)
@settings(max_examples=20, deadline=None)
@given(
    rng=SEEDS,
    vocabulary=st.integers(13, 70),  # no node has more children than there are tokens to draw
    nodes=st.integers(0, 12),
    block=st.sampled_from([4, 16, 64]),
    greedy=st.sampled_from([0, 0.5, 1]),
    forced=st.sampled_from([0, 0.5]),
)
def test_any_trees(drawn, rng, vocabulary, nodes, **how):
    check_verify(tree_verify, rng, drawn, vocabulary=vocabulary, most_nodes=nodes, **how)


def test_all_mass_at_a_rejected_token_gives_it_nevertheless_and_never_nan():
    """A residual of all zeros falls back to p."""
    p = torch.zeros(2, 8, device=DEVICE)
    p[:, 3] = 1
    tree = Tree(
        np.array([3], np.int32),
        np.array([ROOT], np.int32),
        np.array([WITHOUT_REPLACEMENT], np.uint8),
        np.array([0.5, 1.0]),  # a coin that nothing passes
        np.array([0, -1]),
    )
    got = read(FlatTrees.build([tree]).on(DEVICE), p, NO_CHOICES, p[:1].clone())
    assert float(got["residual_mass"][1]) == 0
    assert (int(got["token"][0]), float(got["final_p"][0])) == (3, 1.0)


def test_where_hardly_any_q_is_left_nothing_is_lost():
    """After the first sibling q's mass is beyond float32: a factor of 1e40, which must not meet a 0 in float32."""
    q = torch.zeros(1, 8, device=DEVICE)
    q[0, 1], q[0, 2] = 1.0, 1e-40
    p = torch.full((3, 8), 0.125, device=DEVICE)
    tree = Tree(
        np.array([1, 2], np.int32),
        np.array([ROOT, ROOT], np.int32),
        np.full(2, WITHOUT_REPLACEMENT, np.uint8),
        np.array([0.4, 0.9, 0.9]),
        np.array([0, -1, -1]),
    )
    work = FlatTrees.build([tree]).on(DEVICE), p, NO_CHOICES, q
    got = read(*work)
    assert got["outcome"].tolist() == [0, 2, 2]
    assert got["p_trial"].tolist() == pytest.approx([0, 0.125, 1 / 7], rel=1e-4)
    assert got["q_trial"].tolist() == pytest.approx([0, 1, 1], rel=1e-4)
    assert got["residual_mass"].tolist() == pytest.approx([0, 0.875, 6 / 7], rel=1e-4)
