"""What the kernels for processors must know of a ragged batch, as flat arrays; the same for every layer."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

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
    rows: int  # N
    partial: int  # rows of one head over all parts
    segments: NDArray[np.int64]  # [S, SEGMENT]
    words: Any  # what is passed to the kernels, as int64
    keeps: tuple[object, ...]  # what addresses point to

    @staticmethod
    def slabs(parts: Sequence[Part], slots: NDArray[np.int64]) -> list[FlatBatch]:
        """A forward pass in batches of at most SLAB rows, to be run in this order: no row sees one that is fed later.
        Behind long contexts they are smaller: see FOUND. `slots`: where each row's key and value go, [N] in the order
        of the parts.
        """
        batches, waiting = list[FlatBatch](), list[Part]()
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
        segments, made, referenced = np.zeros((len(parts), SEGMENT), np.int64), list[tuple[int, ...]](), list[object]()
        row = partial = 0
        for index, part in enumerate(parts):
            blocks, positions = np.array(part.blocks, np.int64), np.ascontiguousarray(part.positions, np.int64)
            mask = np.ascontiguousarray(part.mask)
            fed, window = mask.shape
            end, addresses = part.context + window, [array.ctypes.data for array in (blocks, positions, mask)]
            segments[index] = (row, fed, part.context, window, *addresses, len(made))
            for start in range(0, end, PART):
                made.append((index, start, min(start + PART, end), partial))
                partial += fed
            referenced += [blocks, positions, mask]
            row += fed
        cuts, slots = np.array(made, np.int64), np.ascontiguousarray(slots)
        addresses = [segments.ctypes.data, len(segments), cuts.ctypes.data, len(cuts), slots.ctypes.data]
        words = (ctypes.c_int64 * 7)(*addresses, row, partial)
        return FlatBatch(first, row, partial, segments, words, (cuts, slots, *referenced))


def _cut(parts: Sequence[Part]) -> Iterator[Part]:
    """The same rows in parts of at most TALL, each without the slots that come after its last row."""
    for part in parts:
        fed, window = part.mask.shape
        for start in range(0, fed, TALL):
            stop = min(start + TALL, fed)
            end = window - fed + stop
            yield Part(part.blocks, part.context, part.positions[:end], part.mask[start:stop, :end])
