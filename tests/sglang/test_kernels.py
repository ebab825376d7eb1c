"""The models of SGLang's kernels, against enumeration: over all coins, tokens come out with the target's p."""

import itertools

import numpy as np
import pytest
import torch

from tests.sglang import kernels

GRID = 60  # coins a dimension, at the middle of as many equal parts
COINS = (np.arange(GRID) + 0.5) / GRID
CHILDREN = {  # candidates behind the root, the first child of each slot, the next sibling
    "a chain": ([1, 2], [1, 2, -1], [-1, -1, -1]),
    "two children": ([1, 2], [1, -1, -1], [-1, 2, -1]),
    "two children and a grandchild": ([1, 2, 0], [1, -1, 3, -1], [-1, 2, -1, -1]),
    "no draft": ([], [-1], [-1]),
}


def rows(count, tokens, seed):
    return torch.rand(count, tokens, generator=torch.Generator().manual_seed(seed)).softmax(-1)


def verified(function, drafts, first, sibling, coins, p, q, depth, **more):
    """(Tokens that came out) of one request a set of coins. `coins` [C, slots + 1]: the last one is the final one."""
    batch, n = len(coins), len(first)
    predict, index = torch.zeros(batch * n, dtype=torch.int32), torch.full((batch, depth), -1, dtype=torch.int32)
    count = torch.zeros(batch, dtype=torch.int32)
    candidates = torch.tensor([0, *drafts]).repeat(batch, 1)
    links = [
        torch.arange(batch * n).view(batch, n),
        *(torch.tensor(link).repeat(batch, 1) for link in (first, sibling)),
    ]
    coins = torch.tensor(coins, dtype=torch.float32)
    function(
        predicts=predict,
        accept_index=index,
        accept_token_num=count,
        candidates=candidates,
        retrive_index=links[0],
        retrive_next_token=links[1],
        retrive_next_sibling=links[2],
        uniform_samples=coins[:, :n].contiguous(),
        uniform_samples_for_final_sampling=coins[:, n].contiguous(),
        target_probs=p.repeat(batch, 1, 1),
        draft_probs=q.repeat(batch, 1, 1).contiguous(),
        threshold_single=1.0,
        threshold_acc=1.0,
        deterministic=True,
        **more,
    )
    return [predict[index[b, : count[b] + 1].long()].tolist() for b in range(batch)]


@pytest.mark.parametrize("shape", CHILDREN)
def test_the_first_token_of_a_tree_follows_p_over_all_coins(shape):
    drafts, first, sibling = CHILDREN[shape]
    n, p = len(first), rows(len(first), 4, seed=3)
    grid = np.full((GRID * GRID, n + 1), 0.5)
    grid[:, 0], grid[:, n] = np.array(list(itertools.product(COINS, COINS))).T  # the root's and the final one
    out = verified(kernels.target_only, drafts, first, sibling, grid, p, torch.zeros(n, 4), 3)
    share = np.bincount([tokens[0] for tokens in out], minlength=4) / len(out)
    np.testing.assert_allclose(share, p[0], atol=2 / GRID)


def test_the_second_token_of_a_tree_follows_p_behind_the_first():
    drafts, first, sibling = CHILDREN["two children and a grandchild"]
    p, grid = rows(4, 4, seed=5), np.full((GRID * GRID, 5), 0.5)
    grid[:, 2], grid[:, 4] = np.array(list(itertools.product(COINS, COINS))).T
    grid[:, 0] = float(p[0, 1] + p[0, 2] / 2)  # on the second child
    out = verified(kernels.target_only, drafts, first, sibling, grid, p, torch.zeros(4, 4), 3)
    assert all(tokens[0] == 2 for tokens in out)
    share = np.bincount([tokens[1] for tokens in out], minlength=4) / len(out)
    np.testing.assert_allclose(share, p[2], atol=2 / GRID)


@pytest.mark.parametrize("block", [False, True], ids=["standard", "block"])
def test_the_first_token_of_a_chain_follows_p_over_all_coins_and_drafts(block):
    """Each chain counts by its probability in q."""
    p, q = rows(3, 3, seed=7), rows(2, 3, seed=8)
    few = 12
    coins = list(itertools.product(*[(np.arange(few) + 0.5) / few] * 3))
    grid = np.full((len(coins), 4), 0.5)
    grid[:, 0], grid[:, 1], grid[:, 3] = np.array(coins).T
    share = np.zeros(3)
    for drafts in itertools.product(range(3), repeat=2):
        out = verified(
            kernels.chain,
            drafts,
            [1, 2, -1],
            [-1] * 3,
            grid,
            p,
            q,
            3,
            **({"block_verification": True} if block else {}),
        )
        weight = float(q[0, drafts[0]] * q[1, drafts[1]])
        share += weight * np.bincount([tokens[0] for tokens in out], minlength=3) / len(out)
    np.testing.assert_allclose(share, p[0], atol=1.5 / few)


def test_a_token_that_is_several_children_comes_out_as_often_as_there_are_of_it():
    """SGLang's n-gram trees are filled up with token 0 below the root: with k of them it comes with k times its p."""
    p = torch.tensor([[0.1, 0.5, 0.4]]).repeat(4, 1)
    grid = np.full((GRID * GRID, 5), 0.5)
    grid[:, 0], grid[:, 4] = np.array(list(itertools.product(COINS, COINS))).T
    out = verified(kernels.target_only, [0] * 3, [1, -1, -1, -1], [-1, 2, 3, -1], grid, p, torch.zeros(4, 3), 4)
    share = np.bincount([tokens[0] for tokens in out], minlength=3) / len(out)
    np.testing.assert_allclose(share, [0.3, 0.7 * 5 / 9, 0.7 * 4 / 9], atol=2 / GRID)


def test_a_draft_without_mass_is_never_accepted_not_by_a_coin_of_0_either():
    p = torch.tensor([[0.5, 0.0, 0.5]]).repeat(2, 1)
    (out,) = verified(kernels.target_only, [1], [1, -1], [-1, -1], np.zeros((1, 3)), p, torch.zeros(2, 3), 2)
    assert out == [0]
