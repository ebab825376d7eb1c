"""The paged KV cache: blocks of 16 slots, a block table a sequence, reference counts.

BlockPool and BlockTable are bookkeeping without tensors; KVCache holds the tensors of one model.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

BLOCK_SIZE = 16


class OutOfBlocksError(Exception):
    """The pool has too few free blocks; nothing was allocated."""


class BlockPool:
    """Which blocks are free, and how many tables hold each of the others."""

    def __init__(self, blocks: int) -> None:
        self.blocks = blocks
        self.refs = [0] * blocks
        self._free = list(range(blocks))  # a heap: low blocks first, so that tables tend to be contiguous

    @property
    def free(self) -> int:
        """Blocks that nobody holds."""
        return len(self._free)

    @property
    def used(self) -> int:
        """Blocks that at least one table holds."""
        return self.blocks - len(self._free)

    def take(self, count: int) -> list[int]:
        """`count` free blocks, each now held once. Raises OutOfBlocksError and takes none where there are too few."""
        if count > len(self._free):
            raise OutOfBlocksError(f"{count} KV blocks wanted, {len(self._free)} free")
        taken = [heapq.heappop(self._free) for _ in range(count)]
        for block in taken:
            self.refs[block] = 1
        return taken

    def share(self, block: int) -> None:
        """Hold a block once more."""
        self.refs[block] += 1

    def drop(self, block: int) -> None:
        """Hold a block once less; it is free when nobody holds it."""
        assert self.refs[block] > 0, "a free block was dropped"
        self.refs[block] -= 1
        if self.refs[block] == 0:
            heapq.heappush(self._free, block)


@dataclass
class BlockTable:
    """The blocks of one sequence, in order. Position t lies in slot blocks[t // 16] * 16 + t % 16."""

    blocks: list[int] = field(default_factory=list)

    @property
    def capacity(self) -> int:
        """Positions that the table can hold."""
        return len(self.blocks) * BLOCK_SIZE

    def slots(self, start: int, end: int) -> NDArray[np.int64]:
        """Slots of positions start..end-1."""
        positions = np.arange(start, end)
        return np.asarray(self.blocks, dtype=np.int64)[positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE


@dataclass(frozen=True)
class LayerShape:
    """What one layer keeps of a token: heads and the sizes of a key and of a value."""

    heads: int
    key_size: int
    value_size: int


class KVCache:
    """Keys and values of every layer in paged slots: key[i] is [heads, slots, size] of layer i.

    Heads come first so that a gathered context is one contiguous batch for a batched product.
    """

    def __init__(self, layers: list[LayerShape], blocks: int, dtype: torch.dtype, device: torch.device) -> None:
        slots = blocks * BLOCK_SIZE
        self.pool = BlockPool(blocks)
        self.key = [_zeros((s.heads, slots, s.key_size), dtype, device) for s in layers]
        self.value = [_zeros((s.heads, slots, s.value_size), dtype, device) for s in layers]
        self.device = device

    @staticmethod
    def block_bytes(layers: list[LayerShape], dtype: torch.dtype) -> int:
        """Bytes of one block over all layers."""
        return BLOCK_SIZE * dtype.itemsize * sum(s.heads * (s.key_size + s.value_size) for s in layers)

    def write(self, layer: int, slots: Tensor, key: Tensor, value: Tensor) -> None:
        """Store new keys and values, [heads, n, size] each, at `slots` int64 [n]."""
        self.key[layer].index_copy_(1, slots, key)
        self.value[layer].index_copy_(1, slots, value)

    def reserve(self, table: BlockTable, length: int, written_from: int) -> None:
        """Make room for `length` positions, of which those from `written_from` on may be written.

        Shared blocks in that range are copied first (copy on write). Raises OutOfBlocksError and changes nothing.
        """
        first = written_from // BLOCK_SIZE
        shared = [i for i in range(first, len(table.blocks)) if self.pool.refs[table.blocks[i]] > 1]
        missing = max(-(-length // BLOCK_SIZE) - len(table.blocks), 0)
        fresh = self.pool.take(len(shared) + missing)
        for at in shared:
            block = fresh.pop(0)
            self._copy_block(table.blocks[at], block)
            self.pool.drop(table.blocks[at])
            table.blocks[at] = block
        table.blocks += fresh

    def truncate(self, table: BlockTable, length: int) -> None:
        """Give back the blocks past the first `length` positions."""
        keep = -(-length // BLOCK_SIZE)
        for block in table.blocks[keep:]:
            self.pool.drop(block)
        del table.blocks[keep:]

    def fork(self, table: BlockTable) -> BlockTable:
        """A second table over the same blocks; the first to write to one of them copies it."""
        for block in table.blocks:
            self.pool.share(block)
        return BlockTable(list(table.blocks))

    def move(self, source: NDArray[np.int64], target: NDArray[np.int64]) -> None:
        """Copy slots to slots in every layer. All are loaded before any is stored, so they may overlap."""
        src = torch.from_numpy(source).to(self.device)
        dst = torch.from_numpy(target).to(self.device)
        for store in (*self.key, *self.value):
            store.index_copy_(1, dst, store.index_select(1, src))

    def _copy_block(self, source: int, target: int) -> None:
        a, b = source * BLOCK_SIZE, target * BLOCK_SIZE
        for store in (*self.key, *self.value):
            store[:, b : b + BLOCK_SIZE] = store[:, a : a + BLOCK_SIZE]


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros whose memory the system hands out on first use: torch.zeros would touch all of it at start."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.from_numpy(np.zeros(int(np.prod(shape)) * dtype.itemsize, np.uint8)).view(dtype).view(shape)
