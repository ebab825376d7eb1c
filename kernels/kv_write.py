"""New keys and values into their paged slots: one launch, each number read and written once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specscope.kernels.launch import Launch


def kv_write(rows: Tensor, slots: Tensor, new: Tensor) -> None:
    """rows[slots[i]] = new[i]. rows [slots, width], slots int64 [n], all different; new [n, width], last stride 1."""
    n, width = new.shape
    if n == 0:
        return
    variant = write_launch(width)
    grid = (n, triton.cdiv(width, variant.constants["BLOCK"]))
    variant(grid, rows, slots, new, rows.stride(0), new.stride(0) if n > 1 else width, width)


def write_launch(width: int) -> Launch:
    """One row, or a part of it."""
    return Launch(_kv_write, {"BLOCK": min(triton.next_power_of_2(width), 1024)})


def kv_write_reference(rows: Tensor, slots: Tensor, new: Tensor) -> None:
    """What kv_write must do."""
    rows[slots] = new.to(rows.dtype)


def kv_write_bytes(rows: Tensor, new: Tensor) -> int:
    """Bytes that kv_write moves at least."""
    return new.numel() * (new.element_size() + rows.element_size()) + len(new) * torch.int64.itemsize


@triton.jit  # type: ignore[untyped-decorator]
def _kv_write(rows, slots, new, rows_stride, new_stride, width, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    slot = tl.load(slots + token)
    value = tl.load(new + token * new_stride + column, mask=inside)
    tl.store(rows + slot * rows_stride + column, value.to(rows.dtype.element_ty), mask=inside)
