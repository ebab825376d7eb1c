"""What tree attention must know of a ragged batch, as flat tensors; the same for every layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specscope.kernels import place

BLOCK_SIZE = 16  # slots of a block of the cache
WORD = 64  # slots of the window that one word of the mask tells of


@dataclass(frozen=True)
class Part:
    """One sequence's part of a batch: the rows that it feeds, and what they may see."""

    blocks: Sequence[int]  # its block table
    context: int  # slots that every row sees
    positions: NDArray[np.int64]  # [w] rotary position of each slot after those: the window. The fed rows come last
    mask: NDArray[np.bool_]  # [m, w] True where a fed row sees a slot of the window


@dataclass(frozen=True)
class Room:
    """What a batch of a fixed shape holds for each sequence, so that every tensor and launch is that of all others."""

    window: int  # slots of a window
    blocks: int  # of a table


@dataclass(frozen=True)
class TreeBatch:
    """B sequences with N fed rows in all. Read by tree_attention."""

    table: Tensor  # int32 [B, blocks] block tables, padded with 0
    context: Tensor  # int32 [B] slots before each window
    first_row: Tensor  # int32 [B + 1] where each sequence's fed rows begin
    first_slot: Tensor  # int32 [B + 1] where each sequence's window begins in `positions`
    positions: Tensor  # int32 [windows end to end]
    mask: Tensor  # int64 [N, words] bit j of word k: whether the row sees slot 64 k + j of its window
    rows: NDArray[np.int64]  # [B] fed rows of each, for the host
    least: NDArray[np.int64]  # [N] rotary position of each row, for the host
    reach: NDArray[np.int64]  # [N] slots from the sequence's first to the last that the row sees, for the host
    longest: int  # slots that a sequence has or, where the batch's shape is fixed, may have
    _tiles: dict[int, Tensor] = field(default_factory=dict)  # by rows a tile: filled when attention first asks

    @staticmethod
    def build(parts: Sequence[Part], device: torch.device, room: Room | None = None) -> TreeBatch:
        """Lay the parts end to end; with `room`, in tensors of the shapes that it and the rows of each part decide."""
        fed = np.array([len(part.mask) for part in parts], dtype=np.int64)
        windows = [len(part.positions) for part in parts]
        longest_table = max(len(part.blocks) for part in parts)
        table = np.zeros((len(parts), longest_table if room is None else room.blocks), dtype=np.int32)
        words = -(-(max(windows) if room is None else room.window) // WORD)
        bits = np.zeros((int(fed.sum()), words * WORD), dtype=np.bool_)
        reach = []
        for i, (part, start) in enumerate(zip(parts, np.cumsum([0, *fed]), strict=False)):
            rows, width = part.mask.shape
            table[i, : len(part.blocks)] = part.blocks
            bits[start : start + rows, :width] = part.mask
            last = width - part.mask[:, ::-1].argmax(1)  # one past the last slot seen; each row sees itself at least
            reach.append(part.context + last)
        packed = np.packbits(bits, axis=1, bitorder="little").view("<i8")
        unused = 0 if room is None else room.window * len(parts) - sum(windows)
        put = lambda array, dtype: place.put(np.asarray(array).astype(dtype), device)  # noqa: E731
        return TreeBatch(
            table=put(table, np.int32),
            context=put(np.array([part.context for part in parts]), np.int32),
            first_row=put(np.cumsum([0, *fed]), np.int32),
            first_slot=put(np.cumsum([0, *windows]), np.int32),
            positions=put(np.concatenate([*(part.positions for part in parts), np.zeros(unused)]), np.int32),
            mask=put(packed, np.int64),
            rows=fed,
            least=np.concatenate([p.positions[len(p.positions) - len(p.mask) :] for p in parts]),
            reach=np.concatenate(reach),
            longest=int(max(map(max, reach))) if room is None else room.blocks * BLOCK_SIZE,
        )

    def copy_(self, other: TreeBatch) -> None:
        """Take the numbers of another batch of the same shape, in place."""
        for name in ("table", "context", "first_row", "first_slot", "positions", "mask"):
            getattr(self, name).copy_(getattr(other, name), non_blocking=True)
        for rows, tiles in self._tiles.items():
            tiles.copy_(other.tiles_on_device(rows), non_blocking=True)

    def tiles_on_device(self, rows: int) -> Tensor:
        """As `tiles`, where the kernels read it; made once for all layers."""
        if rows not in self._tiles:
            self._tiles[rows] = place.put(self.tiles(rows), self.table.device)
        return self._tiles[rows]

    def tiles(self, rows: int) -> NDArray[np.int32]:
        """Cut each sequence's rows into tiles of at most `rows`: int32 [T, 4].

        Sequence, the tile's first row in it, slots up to the last that any of its rows sees, its least position.
        """
        out, start = [], 0
        for sequence, count in enumerate(self.rows.tolist()):
            for row in range(0, count, rows):
                part = slice(start + row, start + min(row + rows, count))
                out.append((sequence, row, self.reach[part].max(), self.least[part].min()))
            start += count
        return np.array(out, dtype=np.int32).reshape(-1, 4)
