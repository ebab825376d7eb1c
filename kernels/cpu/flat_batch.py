"""What the kernels for processors must know of a ragged batch, as flat arrays; the same for every layer."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specscope.kernels.tree_batch import Part

PART = 128  # slots whose attention is computed together: their keys stay in the fastest cache
SEGMENT = 8  # numbers that tell of a sequence: see `build`
CUT = 4  # and of a part of its slots


@dataclass
class FlatBatch:
    """S sequences with N fed rows in all, and their contexts in parts of at most 128 slots."""

    segments: NDArray[np.int64]  # [S, SEGMENT]
    cuts: NDArray[np.int64]  # [P, CUT]
    slots: NDArray[np.int64]  # [N] where each row's key and value go
    rows: int  # N
    partial: int  # rows of one head over all parts
    keeps: tuple[object, ...]  # what the addresses in `segments` point to
    _scratch: dict[int, Tensor] = field(default_factory=dict)

    @staticmethod
    def build(parts: Sequence[Part], slots: NDArray[np.int64]) -> FlatBatch:
        """The fed rows lie in the order of the parts; `slots`: of each."""
        segments = np.zeros((len(parts), SEGMENT), np.int64)
        kept: list[object] = []
        cuts: list[tuple[int, int, int, int]] = []
        row = partial = 0
        for at, part in enumerate(parts):
            blocks, positions = np.array(part.blocks, np.int64), np.ascontiguousarray(part.positions, np.int64)
            mask = np.ascontiguousarray(part.mask)
            fed, window = mask.shape
            end, first = part.context + window, len(cuts)
            for start in range(0, end, PART):
                cuts.append((at, start, min(start + PART, end), partial))
                partial += fed
            addresses = [one.ctypes.data for one in (blocks, positions, mask)]
            segments[at] = (row, fed, part.context, window, *addresses, first)
            kept += [blocks, positions, mask]
            row += fed
        return FlatBatch(segments, np.array(cuts, np.int64), np.ascontiguousarray(slots), row, partial, tuple(kept))

    @cached_property
    def address(self) -> int:
        """Of the numbers that tell the kernels of it."""
        arrays = (self.segments, self.cuts)
        numbers = [number for array in arrays for number in (array.ctypes.data, len(array))]
        self._numbers = (ctypes.c_int64 * 7)(*numbers, self.slots.ctypes.data, self.rows, self.partial)
        return ctypes.addressof(self._numbers)

    def scratch(self, numbers: int) -> int:
        """The address of so many floats, for one layer after the other."""
        if numbers not in self._scratch:
            self._scratch[numbers] = torch.empty(numbers, dtype=torch.float32, device="cpu")
        return self._scratch[numbers].data_ptr()
