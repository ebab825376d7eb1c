"""Draft trees of a batch laid end to end: what verification walks, on the host and on a device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
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
        below = self.children()
        for row, children in enumerate(below):
            if children:
                child[row] = children[0]
                sibling[children[:-1]] = children[1:]
        by_row = [self.parent, child, sibling, self.token, self.drawn, self.p_row, self.q_row, self.forced]
        by_tree = [self.root[:-1], self.root[1:], self.greedy, self.final]
        arrays = {"by_tree": np.stack(by_tree).astype(np.int32), "by_row": np.stack(by_row).astype(np.int32)}
        return TreeTensors(**Packed({**arrays, "coin": self.coin}, device).put(), most_passes=self.most_passes(below))

    def most_passes(self, below: Sequence[Sequence[int]]) -> int:
        """Passes over the vocabulary that the longest walk may take: one a rejection, or one to draw behind a leaf.

        A greedy tree whose nodes are deterministic takes none: its p is one number. `below`: children.
        """
        passes = np.ones(len(self.parent), np.int64)  # of a walk that ends by rejecting the row, or at it
        for row, children in enumerate(below):
            for earlier, child in enumerate(children):
                passes[child] = passes[row] + earlier
        sampled = np.logical_or.reduceat(self.drawn != DETERMINISTIC, self.root[:-1])
        return int((passes * np.repeat(~self.greedy | sampled, np.diff(self.root))).max(initial=0))


def _join(parts: Sequence[NDArray[Any]], dtype: type) -> NDArray[Any]:
    return np.concatenate(parts, dtype=dtype, casting="unsafe") if parts else np.zeros(0, dtype)


@dataclass(frozen=True)
class TreeTensors:
    """FlatTrees on a device. `child` and `sibling` say in which order children are tried."""

    by_tree: Tensor  # int32 [4, B]
    by_row: Tensor  # int32 [8, R]
    coin: Tensor  # float64 [R]
    most_passes: int  # over the vocabulary that a walk may take
    first: Tensor = field(init=False)  # [B] each tree's first row: its root
    end: Tensor = field(init=False)  # [B] the row after its last
    greedy: Tensor = field(init=False)  # [B] 1 or 0
    final: Tensor = field(init=False)  # [B]
    parent: Tensor = field(init=False)  # [R]
    child: Tensor = field(init=False)  # [R] the row of its first child, or -1
    sibling: Tensor = field(init=False)  # [R] the row of the next child of its parent, or -1
    token: Tensor = field(init=False)  # [R]
    drawn: Tensor = field(init=False)  # [R]
    p_row: Tensor = field(init=False)  # [R]
    q_row: Tensor = field(init=False)  # [R]
    forced: Tensor = field(init=False)  # [R]

    def __post_init__(self) -> None:
        names = ("first", "end", "greedy", "final", "parent", "child", "sibling", "token", "drawn", "p_row", "q_row")
        for name, part in zip((*names, "forced"), (*self.by_tree, *self.by_row), strict=True):
            object.__setattr__(self, name, part)


BY_ROW = ("outcome", "p", "p_trial", "q_trial", "accept_prob", "residual_mass")
BY_TREE = ("token", "final_p", "final_margin", "final_row", "recovered")


@dataclass(frozen=True)
class Verdicts:
    """What became of the trees. All of it is float64 and lies in one tensor, so that one copy takes it to the host.

    [R] each, zero at roots and, but for p, at untried nodes.
    """

    numbers: Tensor  # [6 R + 5 B]
    rows: int  # R
    outcome: Tensor = field(init=False)  # UNTRIED, ACCEPTED or REJECTED
    p: Tensor = field(init=False)  # the target's probability of the token at its parent
    p_trial: Tensor = field(init=False)  # as it was tried
    q_trial: Tensor = field(init=False)  # the drafter's, as it was tried
    accept_prob: Tensor = field(init=False)
    residual_mass: Tensor = field(init=False)  # at rejected nodes: what was left of p before it was renormalised
    token: Tensor = field(init=False)  # [B] the final token
    final_p: Tensor = field(init=False)  # [B] the probability it was drawn with
    final_margin: Tensor = field(init=False)  # [B] how far the cumulative sum would have to move for another token
    final_row: Tensor = field(init=False)  # [B] the row at whose distribution it was drawn
    recovered: Tensor = field(init=False)  # [B] whether from a residual

    def __post_init__(self) -> None:
        split = len(BY_ROW) * self.rows
        by_row, by_tree = self.numbers[:split].view(len(BY_ROW), -1), self.numbers[split:].view(len(BY_TREE), -1)
        for name, part in zip(BY_ROW + BY_TREE, (*by_row, *by_tree), strict=True):
            object.__setattr__(self, name, part)

    @staticmethod
    def empty(trees: TreeTensors) -> Verdicts:
        """Untried everywhere."""
        rows, count = len(trees.parent), len(trees.first)
        numbers = torch.zeros(
            len(BY_ROW) * rows + len(BY_TREE) * count, dtype=torch.float64, device=trees.parent.device
        )
        return Verdicts(numbers, rows)

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
