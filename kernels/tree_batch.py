"""What kernels must know of a ragged batch, as flat tensors: for tree attention the same for every layer, and for
verification its draft trees, laid end to end.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

BLOCK_SIZE = 16  # slots of a block of the cache
WORD = 64  # slots of the window that one word of the mask tells of


@dataclass(frozen=True)
class LayerShape:
    """What one layer keeps of a token: heads and the sizes of a key and of a value."""

    heads: int
    key_size: int
    value_size: int

    @property
    def width(self) -> int:
        """Numbers in a slot: the keys of every head, then their values."""
        return self.heads * (self.key_size + self.value_size)

    @property
    def parts(self) -> list[tuple[int, int]]:
        """Heads and size of what a processor keeps apart: keys and values are one part where they are of one size."""
        if self.key_size == self.value_size:
            return [(2 * self.heads, self.key_size)]
        return [(self.heads, self.key_size), (self.heads, self.value_size)]

    def split(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Slots [..., slots, width] as keys [..., heads, slots, key size] and values [..., heads, slots, value size].

        Both are views.
        """
        key, value = rows.tensor_split((self.heads * self.key_size,), dim=-1)
        return (
            key.unflatten(-1, (self.heads, self.key_size)).transpose(-3, -2),
            value.unflatten(-1, (self.heads, self.value_size)).transpose(-3, -2),
        )


@dataclass(frozen=True)
class Part:
    """One sequence's part of a batch: the rows that it feeds, and what they may see."""

    blocks: Sequence[int]  # its block table
    context: int  # slots that every row sees
    positions: NDArray[np.int64]  # [w] rotary position of each slot after those: the window. The fed rows come last
    mask: NDArray[np.bool_]  # [m, w] True where a fed row sees a slot of the window


@dataclass(frozen=True)
class FixedShape:
    """What a batch of a fixed shape holds for each sequence, so that every tensor and launch is that of all others."""

    window: int  # slots of a window
    blocks: int  # of a table


@dataclass(frozen=True)
class TreeBatch:
    """B sequences with N fed rows in all. Read by tree_attention; one for all layers."""

    table: Tensor  # int32 [B, blocks] block tables, padded with 0
    context: Tensor  # int32 [B] slots before each window
    first_row: Tensor  # int32 [B + 1] where each sequence's fed rows begin
    first_slot: Tensor  # int32 [B + 1] where each sequence's window begins in `positions`
    positions: Tensor  # int32 [windows end to end]
    reach: Tensor  # int32 [N] slots from the sequence's first to the last that the row sees
    mask: Tensor  # int64 [N, words] bit j of word k: whether the row sees slot 64 k + j of its window
    most: int  # fed rows of the sequence that feeds most
    longest: int  # slots that a sequence has or, where the batch's shape is fixed, may have

    @staticmethod
    def build(parts: Sequence[Part], device: torch.device) -> TreeBatch:
        """A batch of its own, in one copy."""
        arrays, sizes = TreeBatch.lay_out(parts)
        tensors: dict[str, Any] = {**Packed(arrays, device).put()}
        return TreeBatch(**tensors, **sizes)

    @staticmethod
    def lay_out(
        parts: Sequence[Part], room: FixedShape | None = None
    ) -> tuple[dict[str, NDArray[Any]], dict[str, Any]]:
        """The tensors' numbers and the sizes; with `room`, such as it and the rows of each part decide."""
        fed = np.array([len(part.mask) for part in parts], dtype=np.int64)
        windows = [len(part.positions) for part in parts]
        longest_table = max(len(part.blocks) for part in parts)
        table = np.zeros((len(parts), longest_table if room is None else room.blocks), dtype=np.int32)
        words = -(-(max(windows) if room is None else room.window) // WORD)
        bits = np.zeros((int(fed.sum()), words * WORD), dtype=np.bool_)
        for i, (part, start) in enumerate(zip(parts, np.cumsum([0, *fed]), strict=False)):
            rows, width = part.mask.shape
            table[i, : len(part.blocks)] = part.blocks
            bits[start : start + rows, :width] = part.mask
        unused = 0 if room is None else room.window * len(parts) - sum(windows)
        reach = np.concatenate([_reach(part) for part in parts]).astype(np.int32)
        arrays = {
            "table": table,
            "context": np.array([part.context for part in parts], dtype=np.int32),
            "first_row": np.cumsum([0, *fed], dtype=np.int32),
            "first_slot": np.cumsum([0, *windows], dtype=np.int32),
            "positions": np.concatenate([*(part.positions for part in parts), np.zeros(unused)]).astype(np.int32),
            "reach": reach,
            "mask": np.packbits(bits, axis=1, bitorder="little").view("<i8"),
        }
        longest = int(reach.max()) if room is None else room.blocks * BLOCK_SIZE
        return arrays, {"most": int(fed.max()), "longest": longest}


def _reach(part: Part) -> NDArray[np.int64]:
    """One past the last slot that each row sees: itself at least."""
    reach: NDArray[np.int64] = part.context + part.mask.shape[1] - part.mask[:, ::-1].argmax(1)
    return reach


ALIGNED = 16  # bytes: what a kernel's loads may rely on


def put(array: NDArray[Any], device: torch.device) -> Tensor:
    """The array as a tensor on the device; a GPU copies it from pinned memory while the host goes on."""
    host = torch.from_numpy(np.ascontiguousarray(array))
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host.to(device)


class Packed:
    """Arrays side by side in one buffer on the host, pinned for a GPU: one copy takes all of them to the device.

    torch hands out pinned memory again only when the copies from it are done, so a buffer may be dropped at once.
    """

    def __init__(self, arrays: Mapping[str, NDArray[Any]], device: torch.device) -> None:
        self.device = device
        self._places: dict[str, tuple[slice, torch.dtype, tuple[int, ...]]] = {}
        end = 0
        for name, array in arrays.items():
            kind = torch.from_numpy(array[:0]).dtype
            self._places[name] = slice(end, end + array.nbytes), kind, array.shape
            end += -(-array.nbytes // ALIGNED) * ALIGNED
        self.host = torch.empty(end, dtype=torch.uint8, pin_memory=device.type == "cuda")
        whole = self.host.numpy()
        for name, array in arrays.items():
            whole[self._places[name][0]].view(array.dtype)[:] = array.ravel()

    def put(self) -> dict[str, Tensor]:
        """The arrays on the device."""
        return self.views(self.host.to(self.device, non_blocking=True))

    def views(self, buffer: Tensor) -> dict[str, Tensor]:
        """The arrays in a buffer of the same size."""
        return {name: buffer[part].view(kind).view(shape) for name, (part, kind, shape) in self._places.items()}


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
