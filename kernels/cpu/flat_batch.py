"""What the kernels for processors must know of a ragged batch, as flat arrays; the same for every layer."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from specscope.kernels.tree_batch import Part

PART = 128  # slots whose attention is computed together: their keys stay in the fastest cache
SEGMENT = 8  # numbers that tell of a sequence: see `_build`
CUT = 4  # and of a part of its slots
SLAB = 256  # rows that go through a layer together: what they leave between its products stays near the processor
FOUND = 8192  # times a row finds something in a part of its context: what is found there is kept in memory meanwhile
TALL = 64  # rows of a sequence that read its slots up to their own last one: a prompt's rows see ever more of it


@dataclass
class FlatBatch:
    """S sequences with N fed rows in all, and their contexts in parts of at most 128 slots."""

    first: int  # row of the forward pass
    segments: NDArray[np.int64]  # [S, SEGMENT]
    cuts: NDArray[np.int64]  # [P, CUT]
    slots: NDArray[np.int64]  # [N] where each row's key and value go
    rows: int  # N
    partial: int  # rows of one head over all parts
    keeps: tuple[object, ...]  # what the addresses in `segments` point to

    @staticmethod
    def slabs(parts: Sequence[Part], slots: NDArray[np.int64]) -> list[FlatBatch]:
        """A forward pass in batches of at most SLAB rows, to be run in this order: no row sees one that is fed later.

        Behind long contexts they are smaller: see FOUND.

        The fed rows lie in the order of the parts; `slots`: of each.
        """
        batches: list[FlatBatch] = []
        waiting: list[Part] = []
        first = rows = partial = 0
        for part in _cut(parts):
            fed, window = part.mask.shape
            more = fed * -(-(part.context + window) // PART)
            if waiting and (rows + fed > SLAB or partial + more > FOUND):
                batches.append(FlatBatch._build(waiting, slots[first : first + rows], first))
                waiting, first, rows, partial = [], first + rows, 0, 0
            waiting.append(part)
            rows, partial = rows + fed, partial + more
        return [*batches, FlatBatch._build(waiting, slots[first:], first)]

    @staticmethod
    def _build(parts: Sequence[Part], slots: NDArray[np.int64], first: int) -> FlatBatch:
        """One batch. `first`: its first row's place in the forward pass."""
        segments = np.zeros((len(parts), SEGMENT), np.int64)
        referenced: list[object] = []
        cuts: list[tuple[int, int, int, int]] = []
        row = partial = 0
        for index, part in enumerate(parts):
            blocks, positions = np.array(part.blocks, np.int64), np.ascontiguousarray(part.positions, np.int64)
            mask = np.ascontiguousarray(part.mask)
            fed, window = mask.shape
            end, cut = part.context + window, len(cuts)
            for start in range(0, end, PART):
                cuts.append((index, start, min(start + PART, end), partial))
                partial += fed
            addresses = [array.ctypes.data for array in (blocks, positions, mask)]
            segments[index] = (row, fed, part.context, window, *addresses, cut)
            referenced += [blocks, positions, mask]
            row += fed
        arrays = segments, np.array(cuts, np.int64), np.ascontiguousarray(slots)
        return FlatBatch(first, *arrays, row, partial, tuple(referenced))

    @cached_property
    def address(self) -> int:
        """The address of the numbers that describe the batch to the kernels."""
        arrays = (self.segments, self.cuts)
        numbers = [number for array in arrays for number in (array.ctypes.data, len(array))]
        self._numbers = (ctypes.c_int64 * 7)(*numbers, self.slots.ctypes.data, self.rows, self.partial)
        return ctypes.addressof(self._numbers)


def _cut(parts: Sequence[Part]) -> Iterator[Part]:
    """The same rows in parts of at most TALL, each without the slots that come after its last row."""
    for part in parts:
        fed, window = part.mask.shape
        for start in range(0, fed, TALL):
            stop = min(start + TALL, fed)
            end = window - fed + stop
            yield Part(part.blocks, part.context, part.positions[:end], part.mask[start:stop, :end])
