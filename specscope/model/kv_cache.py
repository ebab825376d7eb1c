"""The paged KV cache: blocks of 16 slots, a block table a sequence, reference counts.

BlockPool and BlockTable are bookkeeping without tensors; KVCache holds the tensors of one model.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specscope.kernels.tree_batch import BLOCK_SIZE, LayerShape, put
from specscope.model.places import Backend

__all__ = ["BLOCK_SIZE", "BlockPool", "BlockTable", "KVCache", "LayerShape", "OutOfBlocksError"]


class OutOfBlocksError(Exception):
    """The pool has too few free blocks; nothing was allocated."""


class BlockPool:
    """Which blocks are free, and how many tables hold each of the others."""

    def __init__(self, blocks: int) -> None:
        self.blocks = blocks
        self.refs = [0] * blocks
        self._free = list(range(blocks))  # in order
        self._lanes: range = range(0)  # where sequences begin, as long as these blocks are free

    def keep_apart(self, sequences: int, part: int = 0, parts: int = 1) -> None:
        """Let so many sequences begin far apart: as they grow, the blocks of each lie side by side.

        Engines that share the pool have a part of it each, so that their sequences do not lie between each other's.
        """
        lane = self.blocks // (sequences * parts)
        first = part * sequences * lane
        self._lanes = range(first, first + sequences * lane, lane) if lane else range(0)

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def used(self) -> int:
        return self.blocks - self.free

    def take(self, count: int, after: int | None = None) -> list[int]:
        """`count` free blocks, each now held once. Raises OutOfBlocksError and takes none where there are too few.

        Those that follow the block `after`, or for a new sequence (None) that a lane holds those where one begins; else
        the first of all.
        """
        if count > self.free:
            raise OutOfBlocksError(f"{count} KV blocks wanted, {self.free} free")
        wanted = (after + 1,) if after is not None else self._lanes if count <= self._lanes.step else ()
        start = next((index for first in wanted if (index := self._at(first, count)) is not None), 0)
        taken = self._free[start : start + count]
        del self._free[start : start + count]
        for block in taken:
            self.refs[block] = 1
        return taken

    def _at(self, first: int, count: int) -> int | None:
        """Where in the free blocks `first` and those that follow it are, `count` in all; None where one is taken."""
        index = bisect_left(self._free, first)
        free = self._free[index : index + count]
        return index if free and free[0] == first and len(free) == count and free[-1] == first + count - 1 else None

    def share(self, block: int) -> None:
        assert self.refs[block] > 0, "a free block was shared"
        self.refs[block] += 1

    def drop(self, block: int) -> None:
        assert self.refs[block] > 0, "a free block was dropped"
        self.refs[block] -= 1
        if self.refs[block] == 0:
            insort(self._free, block)


@dataclass
class BlockTable:
    """The blocks of one sequence, in order. Position t lies in slot blocks[t // 16] * 16 + t % 16."""

    blocks: list[int] = field(default_factory=list)

    def slots(self, start: int, end: int) -> NDArray[np.int64]:
        """Slots of positions start..end-1."""
        positions, first = np.arange(start, end), start // BLOCK_SIZE
        blocks = np.asarray(self.blocks[first : -(-end // BLOCK_SIZE)], dtype=np.int64)
        return blocks[positions // BLOCK_SIZE - first] * BLOCK_SIZE + positions % BLOCK_SIZE


class KVCache:
    """Keys and values of every layer in paged slots: key[i] and value[i] are [heads, slots, size].

    For the kernels a slot is one row, rows[i] [slots, width]: a step writes each layer once. The torch backend keeps
    the slots of a head together, so that blocks side by side are a matrix that a processor multiplies where it lies,
    and all layers of one shape in one tensor.
    """

    def __init__(
        self,
        layers: list[LayerShape],
        blocks: int,
        dtype: torch.dtype,
        device: torch.device,
        backend: Backend = Backend.TORCH,
    ) -> None:
        slots = (blocks + 1) * BLOCK_SIZE
        self.pool = BlockPool(blocks)
        self.spare = blocks  # one more block than the pool has: rows of padding are written there, and it is never read
        self.layers = layers
        self.dtype, self.device, self.backend = dtype, device, backend
        self.rows: list[Tensor] = []
        self.stores: list[Tensor]  # [layers, heads, slots, size] of each kind of part (LayerShape.parts), or of rows
        self.parts: list[list[Tensor]]  # of each layer, [heads, slots, size]
        if backend is Backend.TRITON:
            self.rows = [_zeros((slots, shape.width), dtype, device) for shape in layers]
            self.stores = [rows[None, None] for rows in self.rows]
            self.parts = [[rows[None]] for rows in self.rows]
            pairs = [shape.split(rows) for shape, rows in zip(layers, self.rows, strict=True)]
        else:
            counts = Counter(part for shape in layers for part in shape.parts)
            stores = {part: _zeros((count, part[0], slots, part[1]), dtype, device) for part, count in counts.items()}
            free = {part: iter(store) for part, store in stores.items()}
            self.stores = list(stores.values())
            self.parts = [[next(free[part]) for part in shape.parts] for shape in layers]
            of = zip(layers, self.parts, strict=True)
            pairs = [(parts[0][: shape.heads], parts[-1][-shape.heads :]) for shape, parts in of]
        self.key, self.value = [key for key, _ in pairs], [value for _, value in pairs]
        self._by_slot = [[part.transpose(0, 1) for part in parts] for parts in self.parts]

    @staticmethod
    def block_bytes(layers: list[LayerShape], dtype: torch.dtype) -> int:
        return BLOCK_SIZE * dtype.itemsize * sum(shape.width for shape in layers)

    def write(self, layer: int, slots: Tensor, key: Tensor, value: Tensor) -> None:
        """Store new keys and values, [heads, n, size] each, at `slots` int64 [n]."""
        self.write_rows(layer, slots, torch.cat([x.transpose(0, 1).flatten(1) for x in (key, value)], dim=1))

    def write_rows(self, layer: int, slots: Tensor, rows: Tensor) -> None:
        """Store new rows [n, width]: each the keys of every head, then their values."""
        start = 0
        for part in self._by_slot[layer]:
            _, heads, size = part.shape
            part.index_copy_(0, slots, rows.narrow(1, start, heads * size).view(len(rows), heads, size))
            start += heads * size

    def reserve(self, table: BlockTable, length: int, written_from: int) -> None:
        """Make room for `length` positions, of which those from `written_from` on may be written.

        Shared blocks in that range are copied first (copy on write). Raises OutOfBlocksError and changes nothing.
        """
        first = written_from // BLOCK_SIZE
        shared = [i for i in range(first, len(table.blocks)) if self.pool.refs[table.blocks[i]] > 1]
        missing = max(-(-length // BLOCK_SIZE) - len(table.blocks), 0)
        fresh = self.pool.take(len(shared) + missing, table.blocks[-1] if table.blocks else None)
        for index in shared:
            block = fresh.pop(0)
            a, b = table.blocks[index] * BLOCK_SIZE, block * BLOCK_SIZE
            for store in self.stores:
                store[:, :, b : b + BLOCK_SIZE] = store[:, :, a : a + BLOCK_SIZE]
            self.pool.drop(table.blocks[index])
            table.blocks[index] = block
        table.blocks += fresh

    def truncate(self, table: BlockTable, length: int) -> None:
        """Give back the blocks past the first `length` positions, the last one first."""
        keep = -(-length // BLOCK_SIZE)
        for block in reversed(table.blocks[keep:]):
            self.pool.drop(block)
        del table.blocks[keep:]

    def fork(self, table: BlockTable) -> BlockTable:
        """A second table over the same blocks; the first to write to one of them copies it."""
        for block in table.blocks:
            self.pool.share(block)
        return BlockTable(list(table.blocks))

    def move(self, paths: Sequence[tuple[NDArray[np.int64], NDArray[np.int64]]]) -> None:
        """Copy slots (source, target) of each sequence in every layer, as if all were loaded before any is stored.

        Within a sequence they are in the order of its positions, and none moves to a later one.
        """
        src, dst = (put(np.concatenate(part), self.device) for part in zip(*paths, strict=True))
        for store in self.stores:
            store.index_copy_(2, dst, store.index_select(2, src))


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros whose memory the system hands out on first use: torch.zeros would touch all of it at start."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.from_numpy(np.zeros(int(np.prod(shape)) * dtype.itemsize, np.uint8)).view(dtype).view(shape)
