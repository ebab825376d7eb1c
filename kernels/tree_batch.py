"""What tree attention must know of a ragged batch, as flat tensors; the same for every layer."""

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
