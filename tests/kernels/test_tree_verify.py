"""tree_verify against the rules in float64, against the engine's own verification, and against enumeration."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from specscope.kernels import tree_verify
from specscope.kernels.flat_trees import DETERMINISTIC, WITH_REPLACEMENT, WITHOUT_REPLACEMENT, Forest, Planted

from specscope.speculate.verify.distribution import Dense
from specscope.speculate.verify.host import verify
from specscope.trace.records import FinalKind
from specscope.trace.tree import ROOT, DraftTree, Drawn
from tests.kernels import DEVICE
from tests.kernels.cases import check_verify

SEEDS = st.integers(0, 2**32 - 1).map(np.random.default_rng)
RULES = [DETERMINISTIC, WITHOUT_REPLACEMENT, WITH_REPLACEMENT]


@pytest.mark.parametrize("drawn", RULES)
@settings(max_examples=30, deadline=None)
@given(rng=SEEDS, vocabulary=st.integers(4, 70), nodes=st.integers(0, 12), block=st.sampled_from([4, 16, 64]))
def test_any_forest(drawn, rng, vocabulary, nodes, block):
    check_verify(tree_verify, rng, drawn, vocabulary=vocabulary, most_nodes=nodes, block=block)


def test_the_rules_have_the_engines_numbers():
    assert [DETERMINISTIC, WITHOUT_REPLACEMENT, WITH_REPLACEMENT] == [
        Drawn.DETERMINISTIC,
        Drawn.WITHOUT_REPLACEMENT,
        Drawn.WITH_REPLACEMENT,
    ]


def planted(rng, vocabulary, drawn):
    """Two children at the root and one below the first: (tree, its p, its q)."""
    q = {ROOT: rng.dirichlet(np.ones(vocabulary)), 0: rng.dirichlet(np.ones(vocabulary))}
    replace = drawn == Drawn.WITH_REPLACEMENT
    a, b = rng.choice(vocabulary, 2, replace=replace, p=q[ROOT])
    c = rng.choice(vocabulary, p=q[0])
    tree = DraftTree.build([int(a), int(b), int(c)], [ROOT, ROOT, 0], [q[ROOT][a], q[ROOT][b], q[0][c]], drawn)
    if drawn == Drawn.DETERMINISTIC:
        tree, q = DraftTree.build(tree.token.tolist(), tree.parent.tolist()), {}
    return tree, rng.dirichlet(np.ones(vocabulary), 4), q


@pytest.mark.parametrize("drawn", list(Drawn))
@settings(max_examples=40, deadline=None)
@given(rng=SEEDS)
def test_a_verdict_is_the_engines(drawn, rng):
    tree, p, q = planted(rng, 9, drawn)
    coin = rng.random(4)
    as_tensor = lambda row: torch.tensor(row, dtype=torch.float32)  # noqa: E731
    wanted = verify(tree, [Dense(as_tensor(row)) for row in p], {k: Dense(as_tensor(v)) for k, v in q.items()}, coin)
    q_row = np.array([0, 1, -1, -1]) if q else np.full(4, -1)
    forest = Forest.plant([Planted(tree.token, tree.parent, tree.drawn, coin, q_row)], DEVICE)
    q_rows = as_tensor(np.array(list(q.values()))).to(DEVICE) if q else None
    got = tree_verify.tree_verify(forest, as_tensor(p).to(DEVICE), q_rows, block=4)
    assert got.outcome[1:].tolist() == wanted.outcome.tolist()
    assert int(got.token[0]) == wanted.token
    assert bool(got.recovered[0]) == (wanted.kind is FinalKind.RECOVERED)
    for name in ("p_trial", "q_trial", "accept_prob", "residual_mass"):
        assert getattr(got, name)[1:].tolist() == pytest.approx(getattr(wanted, name).tolist(), abs=1e-5), name
    assert float(got.final_p[0]) == pytest.approx(wanted.final_p, abs=1e-5)


def test_all_mass_at_a_rejected_token_gives_it_nevertheless_and_never_nan():
    """A residual of all zeros falls back to p."""
    p = torch.zeros(2, 8, device=DEVICE)
    p[:, 3] = 1
    forest = Forest.plant(
        [
            Planted(
                np.array([3], np.int32),
                np.array([ROOT], np.int32),
                np.array([WITHOUT_REPLACEMENT], np.uint8),
                np.array([0.5, 1.0]),  # a coin that nothing passes
                np.array([0, -1]),
            )
        ],
        DEVICE,
    )
    got = tree_verify.tree_verify(forest, p, p[:1].clone(), block=4)
    assert float(got.residual_mass[1]) == 0
    assert (int(got.token[0]), float(got.final_p[0])) == (3, 1.0)


def test_the_coin_draws_the_final_token_by_the_cumulative_sum():
    """Over a grid of coins each token comes as often as it is likely; one of probability zero never."""
    p = torch.tensor([[0.0, 0.25, 0.0, 0.5, 0.25, 0.0]], device=DEVICE)
    coins = (np.arange(64) + 0.5) / 64
    nothing = np.zeros(0, np.int32)
    trees = [Planted(nothing, nothing, nothing.astype(np.uint8), np.array([coin]), np.array([-1])) for coin in coins]
    got = tree_verify.tree_verify(Forest.plant(trees, DEVICE), p.repeat(64, 1), block=4)
    assert torch.bincount(got.token.long(), minlength=6).tolist() == [0, 16, 0, 32, 16, 0]
    assert not got.recovered.any()
