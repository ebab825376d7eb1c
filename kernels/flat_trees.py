"""Draft trees of a batch laid end to end: what verification walks, on the host and on a device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specscope.kernels.tree_batch import Packed

NOBODY = -1
DETERMINISTIC, WITHOUT_REPLACEMENT, WITH_REPLACEMENT = 0, 1, 2
UNTRIED, ACCEPTED, REJECTED = 0, 1, 2  # what becomes of a node


@dataclass(frozen=True)
class Tree:
    """One request's tree. n nodes, parents before children; a node's parent is -1 below the root.

    The children of a node are all drawn in one way.
    """

    token: NDArray[np.int32]  # [n]
    parent: NDArray[np.int32]  # [n]
    drawn: NDArray[np.uint8]  # [n] DETERMINISTIC, ...
    coin: NDArray[np.float64]  # [n + 1] coin[0] draws the final token, coin[i + 1] is node i's
    q_row: NDArray[np.int64]  # [n + 1] row of q with the drafter's distribution at the root and each node, or -1
    forced: NDArray[np.uint8] | None = None  # [n] ACCEPTED or REJECTED where that is given, UNTRIED where it is judged
    final: int = NOBODY  # the final token where it is given
    greedy: bool = False  # whether p is one-hot: of such a tree only the target's choices are known


@dataclass(frozen=True)
class FlatTrees:
    """B trees with R = sum(n + 1) rows: each root, then its nodes. Rows are numbered over the whole batch."""

    root: NDArray[np.int32]  # [B + 1] each tree's first row, and R
    parent: NDArray[np.int32]  # [R] the parent's row; -1 at roots
    token: NDArray[np.int32]  # [R]; 0 at roots
    drawn: NDArray[np.int32]  # [R]
    coin: NDArray[np.float64]  # [R]; the final token's at roots
    p_row: NDArray[np.int32]  # [R] row of p; in a greedy tree, of the choices
    q_row: NDArray[np.int32]  # [R] row of q, or -1
    forced: NDArray[np.int32]  # [R] as in Tree
    greedy: NDArray[np.bool_]  # [B]
    final: NDArray[np.int32]  # [B] the final token where it is given, or -1

    @staticmethod
    def build(trees: Sequence[Tree]) -> FlatTrees:
        """Lay trees end to end. Rows of p and of the choices are numbered in the trees' order."""
        sizes = np.array([len(tree.coin) for tree in trees], dtype=np.int32)
        root = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32)
        rows = int(root[-1])
        greedy = np.array([tree.greedy for tree in trees], dtype=np.bool_)
        parent, token, drawn, forced = np.zeros((4, rows), np.int32)
        parent[root[:-1]] = NOBODY
        for start, tree in zip(root.tolist(), trees, strict=False):
            nodes = slice(start + 1, start + len(tree.coin))
            parent[nodes], token[nodes], drawn[nodes] = start + 1 + tree.parent, tree.token, tree.drawn
            if tree.forced is not None:
                forced[nodes] = tree.forced
        by_row = np.repeat(greedy, sizes)
        return FlatTrees(
            root=root,
            parent=parent,
            token=token,
            drawn=drawn,
            coin=_join([tree.coin for tree in trees], np.float64),
            p_row=(np.where(by_row, np.cumsum(by_row), np.cumsum(~by_row)) - 1).astype(np.int32),
            q_row=_join([tree.q_row for tree in trees], np.int32),
            forced=forced,
            greedy=greedy,
            final=np.array([tree.final for tree in trees], dtype=np.int32),
        )

    def children(self) -> list[list[int]]:
        """The rows of each row's children, in draw order."""
        below: list[list[int]] = [[] for _ in self.parent]
        for row, above in enumerate(self.parent.tolist()):
            if above != NOBODY:
                below[above].append(row)
        return below

    def on(self, device: torch.device) -> TreeTensors:
        """The same where a kernel reads it, in one copy."""
        child, sibling = np.full((2, len(self.parent)), NOBODY, np.int32)
        for row, children in enumerate(self.children()):
            if children:
                child[row] = children[0]
                sibling[children[:-1]] = children[1:]
        by_row = [self.parent, child, sibling, self.token, self.drawn, self.p_row, self.q_row, self.forced]
        by_tree = [self.root[:-1], self.root[1:], self.greedy, self.final]
        arrays = {"by_tree": np.stack(by_tree).astype(np.int32), "by_row": np.stack(by_row).astype(np.int32)}
        return TreeTensors(**Packed({**arrays, "coin": self.coin}, device).put())


def _join(parts: Sequence[NDArray[Any]], dtype: type) -> NDArray[Any]:
    return np.concatenate(parts, dtype=dtype, casting="unsafe") if parts else np.zeros(0, dtype)


@dataclass(frozen=True)
class TreeTensors:
    """FlatTrees on a device, as `on` puts them there."""

    by_tree: Tensor  # int32 [4, B] first row, the row after the last, greedy, final
    by_row: Tensor  # int32 [8, R] parent, child, sibling, token, drawn, p_row, q_row, forced
    coin: Tensor  # float64 [R]


# Of each row: zero at roots and, but for p, at untried nodes. p is the target's probability of the token at its parent;
# p_trial and q_trial, target's and drafter's, are as it was tried; residual_mass is what was left of p at a rejection.
BY_ROW = ("outcome", "p", "p_trial", "q_trial", "accept_prob", "residual_mass")
# Of each tree: the final token, the probability it was drawn with, how far the cumulative sum would have to move for
# another token, and whether it was drawn from a residual
BY_TREE = ("token", "final_p", "final_margin", "recovered")


@dataclass(frozen=True)
class Verdicts:
    """What became of B trees with R rows. All of it lies in one tensor, so that one copy takes it to the host."""

    numbers: Tensor  # float64 [6 R + 4 B]
    rows: int  # R

    @staticmethod
    def empty(count: int, rows: int, device: torch.device) -> Verdicts:
        """Untried everywhere."""
        size = len(BY_ROW) * rows + len(BY_TREE) * count
        return Verdicts(torch.zeros(size, dtype=torch.float64, device=device), rows)

    def to_host(self) -> dict[str, NDArray[np.float64]]:
        """The numbers on the host, by name: the one read. From a GPU through pinned memory, behind all launches."""
        host = self.numbers
        if self.numbers.device.type == "cuda":
            host = torch.empty(self.numbers.shape, dtype=torch.float64, pin_memory=True)
            host.copy_(self.numbers, non_blocking=True)
            torch.cuda.current_stream(self.numbers.device).synchronize()
        read = host.numpy().copy()  # pinned memory is not kept
        by_row, by_tree = np.split(read, [len(BY_ROW) * self.rows])
        rows, trees = by_row.reshape(len(BY_ROW), -1), by_tree.reshape(len(BY_TREE), -1)
        return dict(zip(BY_ROW + BY_TREE, (*rows, *trees), strict=True))
