"""Draft trees of a batch as flat tensors: what tree_verify walks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from specscope.kernels import place
from torch import Tensor

NOBODY = -1
DETERMINISTIC, WITHOUT_REPLACEMENT, WITH_REPLACEMENT = 0, 1, 2


@dataclass(frozen=True)
class Planted:
    """One request's tree. n nodes, parents before children; a node's parent is -1 below the root."""

    token: NDArray[np.int32]  # [n]
    parent: NDArray[np.int32]  # [n]
    drawn: NDArray[np.uint8]  # [n] DETERMINISTIC, ...
    coin: NDArray[np.float64]  # [n + 1] coin[0] draws the final token, coin[i + 1] is node i's
    q_row: NDArray[np.int64]  # [n + 1] row of q with the drafter's distribution at the root and each node, or -1


@dataclass(frozen=True)
class Forest:
    """B trees with R = sum(n + 1) rows: each root, then its nodes. Rows are numbered over the whole batch."""

    root: Tensor  # int32 [B] each tree's first row
    child: Tensor  # int32 [R] the row of its first child, or -1
    sibling: Tensor  # int32 [R] the row of the next child of its parent, or -1
    parent: Tensor  # int32 [R] the parent's row, or -1
    token: Tensor  # int32 [R]; 0 at roots
    drawn: Tensor  # int32 [R]
    coin: Tensor  # float64 [R]; the final token's at roots
    q_row: Tensor  # int32 [R]

    @staticmethod
    def plant(trees: Sequence[Planted], device: torch.device) -> Forest:
        """Lay trees end to end."""
        roots = np.cumsum([0] + [len(tree.coin) for tree in trees])
        rows = int(roots[-1])
        child, sibling, last = (np.full(rows, NOBODY, np.int32) for _ in range(3))
        parent = np.full(rows, NOBODY, np.int32)
        token, drawn = np.zeros(rows, np.int32), np.zeros(rows, np.int32)
        for root, tree in zip(roots, trees, strict=False):
            own = slice(root + 1, root + len(tree.coin))
            parent[own], token[own], drawn[own] = root + 1 + tree.parent, tree.token, tree.drawn
            for row in range(own.start, own.stop):
                above = parent[row]
                if last[above] == NOBODY:
                    child[above] = row
                else:
                    sibling[last[above]] = row
                last[above] = row
        q_row = np.concatenate([tree.q_row for tree in trees]).astype(np.int32)
        coin = np.concatenate([tree.coin for tree in trees])
        put = lambda array: place.put(array, device)  # noqa: E731
        return Forest(
            root=put(roots[:-1].astype(np.int32)),
            child=put(child),
            sibling=put(sibling),
            parent=put(parent),
            token=put(token),
            drawn=put(drawn),
            coin=put(coin),
            q_row=put(q_row),
        )


@dataclass(frozen=True)
class Verdicts:
    """What became of a forest. The first six are [R], zero at roots and at untried nodes."""

    outcome: Tensor  # uint8: 0 untried, 1 accepted, 2 rejected
    p_trial: Tensor  # float32 the target's probability of the token, as it was tried
    q_trial: Tensor  # float32 the drafter's, as it was tried
    accept_prob: Tensor  # float64
    residual_mass: Tensor  # float64 at rejected nodes: what was left of p before it was renormalised
    token: Tensor  # int32 [B] the final token
    final_p: Tensor  # float32 [B] the probability it was drawn with
    final_margin: Tensor  # float64 [B] how far the cumulative sum would have to move for another token
    final_row: Tensor  # int32 [B] the row at whose distribution it was drawn
    recovered: Tensor  # uint8 [B] whether from a residual

    @staticmethod
    def empty(forest: Forest) -> Verdicts:
        """Untried everywhere."""
        rows, trees, device = len(forest.child), len(forest.root), forest.child.device
        zeros = lambda count, dtype: torch.zeros(count, dtype=dtype, device=device)  # noqa: E731
        return Verdicts(
            outcome=zeros(rows, torch.uint8),
            p_trial=zeros(rows, torch.float32),
            q_trial=zeros(rows, torch.float32),
            accept_prob=zeros(rows, torch.float64),
            residual_mass=zeros(rows, torch.float64),
            token=zeros(trees, torch.int32),
            final_p=zeros(trees, torch.float32),
            final_margin=zeros(trees, torch.float64),
            final_row=zeros(trees, torch.int32),
            recovered=zeros(trees, torch.uint8),
        )
