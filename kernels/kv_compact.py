"""The accepted paths to the slots after their roots, in place, every layer of the cache in one launch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from specscope.kernels.launch import Launch

_NUMBER = {2: tl.int16, 4: tl.int32, 1: tl.int8}  # a move looks at no number, only at its size


class LayerPointers:
    """Where the rows of every layer lie; made once for a cache, whose tensors never move."""

    def __init__(self, layers: Sequence[Tensor]) -> None:
        first = layers[0]
        self.layers = list(layers)  # kept alive
        self.dtype = first.dtype
        device = first.device
        self.address = torch.tensor([rows.data_ptr() for rows in layers], dtype=torch.int64, device=device)
        self.width = torch.tensor([rows.shape[1] for rows in layers], dtype=torch.int64, device=device)
        self.widest = max(rows.shape[1] for rows in layers)


def kv_compact(layers: LayerPointers, source: Tensor, target: Tensor, first: Tensor) -> None:
    """rows[target[i]] = rows[source[i]] in every layer, as if all were loaded before any is stored.

    source and target int64 [n]: slots, of every request one after another; first int64 [B + 1]: where each request's
    begin. Within a request positions rise, and none moves to a later one: the i-th target is at most the i-th source,
    and so below the sources after it. Moving in order therefore overwrites nothing that is still to be read. Requests
    share none of these slots.
    """
    requests = len(first) - 1
    if requests == 0 or len(source) == 0:
        return
    variant = compact_launch(layers.widest, layers.dtype.itemsize)
    grid = (requests, len(layers.layers), triton.cdiv(layers.widest, variant.constants["BLOCK"]))
    variant(grid, layers.address, layers.width, source, target, first)


def compact_launch(widest: int, itemsize: int) -> Launch:
    """A request's rows in one layer, or a part of them."""
    return Launch(_kv_compact, {"NUMBER": _NUMBER[itemsize], "BLOCK": min(triton.next_power_of_2(widest), 512)})


def kv_compact_reference(layers: Sequence[Tensor], source: Tensor, target: Tensor) -> None:
    """What kv_compact must do."""
    for rows in layers:
        rows[target] = rows[source].clone()


def kv_compact_bytes(layers: LayerPointers, source: Tensor) -> int:
    """Bytes that kv_compact moves at least."""
    return 2 * len(source) * int(layers.width.sum()) * layers.dtype.itemsize


@triton.jit  # type: ignore[untyped-decorator]
def _kv_compact(  # type: ignore[no-untyped-def]
    address,
    widths,
    source,
    target,
    first,
    NUMBER: tl.constexpr,
    BLOCK: tl.constexpr,
):
    request, layer = tl.program_id(0), tl.program_id(1)
    width = tl.load(widths + layer)
    rows = tl.load(address + layer).to(tl.pointer_type(NUMBER))
    column = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    # One thread has the same columns of every row, so its own order of loads and stores is all that counts.
    for i in range(tl.load(first + request), tl.load(first + request + 1)):
        value = tl.load(rows + tl.load(source + i) * width + column, mask=inside)
        tl.store(rows + tl.load(target + i) * width + column, value, mask=inside)
