"""x W^T + b on a processor, from weights in panels of 16 rows: [panels, in, 16], float16 or float32.

Up to six rows read each panel once, so that they take about as long as one. A weight in float16 is widened as it is
read; sums are made in float32.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property

import torch
from numba import carray, njit
from torch import Tensor

from specscope.kernels.cpu.team import compiled, me, members
from specscope.kernels.cpu.tiles import integers, product_tile

PANEL = 16
MOST = 6  # rows that a tile holds: 12 sums, two weights and a factor are 15 of 16 registers

_half = [product_tile(rows, 1, halves=True) for rows in range(1, MOST + 1)]
_half_pair = [product_tile(rows, 2, halves=True) for rows in (1, 2)]
_float = [product_tile(rows, 1, halves=False) for rows in range(1, MOST + 1)]
half1, half2, half3, half4, half5, half6 = _half
half_pair1, half_pair2 = _half_pair
float1, float2, float3, float4, float5, float6 = _float


@njit
def multiply_float(w, stride, x, x_stride, start, start_stride, y, y_stride, rows, length):
    """One panel of float32 by any number of rows; arguments as product_tile takes them."""
    at = 0
    while at < rows:
        left = rows - at
        many = 4 if left == 7 or left == 8 else min(left, MOST)
        a, b, c = x + 4 * at * x_stride, start + 4 * at * start_stride, y + 4 * at * y_stride
        if many == 1:
            float1(w, stride, 0, a, x_stride, b, start_stride, c, y_stride, length)
        elif many == 2:
            float2(w, stride, 0, a, x_stride, b, start_stride, c, y_stride, length)
        elif many == 3:
            float3(w, stride, 0, a, x_stride, b, start_stride, c, y_stride, length)
        elif many == 4:
            float4(w, stride, 0, a, x_stride, b, start_stride, c, y_stride, length)
        elif many == 5:
            float5(w, stride, 0, a, x_stride, b, start_stride, c, y_stride, length)
        else:
            float6(w, stride, 0, a, x_stride, b, start_stride, c, y_stride, length)
        at += many


@njit
def multiply_half(w, x, x_stride, start, start_stride, y, y_stride, rows, length):
    """One panel of float16 by any number of rows."""
    at = 0
    while at < rows:
        left = rows - at
        many = 4 if left == 7 or left == 8 else min(left, MOST)
        a, b, c = x + 4 * at * x_stride, start + 4 * at * start_stride, y + 4 * at * y_stride
        if many == 1:
            half1(w, PANEL, 0, a, x_stride, b, start_stride, c, y_stride, length)
        elif many == 2:
            half2(w, PANEL, 0, a, x_stride, b, start_stride, c, y_stride, length)
        elif many == 3:
            half3(w, PANEL, 0, a, x_stride, b, start_stride, c, y_stride, length)
        elif many == 4:
            half4(w, PANEL, 0, a, x_stride, b, start_stride, c, y_stride, length)
        elif many == 5:
            half5(w, PANEL, 0, a, x_stride, b, start_stride, c, y_stride, length)
        else:
            half6(w, PANEL, 0, a, x_stride, b, start_stride, c, y_stride, length)
        at += many


@njit
def multiply(w, halves, panels, first, last, x, x_stride, start, start_stride, y, y_stride, rows, length):
    """Panels first..last-1 of `panels` by `rows` rows. start: of the first panel of all, as y."""
    size = 2 if halves else 4
    apart = size * PANEL * length
    p = first
    while p < last:
        column = 4 * PANEL * p
        here, b, c = w + p * apart, start + column, y + column
        if not halves:
            multiply_float(here, PANEL, x, x_stride, b, start_stride, c, y_stride, rows, length)
        elif rows == 1 and p + 1 < last:  # two panels at once: with two sums alone, each would wait for the last one
            half_pair1(here, PANEL, apart, x, x_stride, b, start_stride, c, y_stride, length)
            p += 1
        elif rows == 2 and p + 1 < last:
            half_pair2(here, PANEL, apart, x, x_stride, b, start_stride, c, y_stride, length)
            p += 1
        else:
            multiply_half(here, x, x_stride, b, start_stride, c, y_stride, rows, length)
        p += 1


def _product(address):
    w, halves, panels, start, length, x, y, rows = carray(integers(address), 8)
    thread, threads = me(), members()
    first, last = panels * thread // threads, panels * (thread + 1) // threads
    multiply(w, halves != 0, panels, first, last, x, length, start, 0, y, panels * PANEL, rows, length)


_Words = ctypes.c_int64 * 8


@cache
def _run() -> Callable[[object], None]:
    return compiled(_product)


@dataclass(frozen=True)
class Panels:
    """A linear layer laid out for these kernels. Calling it gives x W^T + b."""

    numbers: Tensor  # [out / 16, in, 16], float16 or float32
    start: Tensor  # float32 [out] what sums begin with: the bias, or zeros

    @staticmethod
    def fits(weight: Tensor) -> bool:
        """Whether a weight [out, in] can be laid out so."""
        return weight.dtype is torch.float32 and weight.shape[0] % PANEL == 0

    @staticmethod
    def of(weight: Tensor, bias: Tensor | None, *, halves: bool) -> Panels:
        """`halves`: in float16. Raises what stands in the way of running it on this machine."""
        _run()
        numbers = weight.detach().unflatten(0, (-1, PANEL)).transpose(1, 2)
        start = weight.new_zeros(len(weight)) if bias is None else bias.detach().clone()
        return Panels(numbers.to(torch.float16 if halves else torch.float32).contiguous(), start)

    @property
    def in_features(self) -> int:
        """Numbers of a row of x."""
        return self.numbers.shape[1]

    @property
    def out_features(self) -> int:
        """Numbers of a row of what comes out."""
        return len(self.start)

    @cached_property
    def words(self) -> tuple[int, int, int, int, int]:
        """As the kernels are told of it: address, whether in float16, panels, address of the start, in_features."""
        halves = int(self.numbers.dtype is torch.float16)
        return self.numbers.data_ptr(), halves, len(self.numbers), self.start.data_ptr(), self.in_features

    def __call__(self, x: Tensor) -> Tensor:
        """x float32 [..., in]."""
        x = x.contiguous()
        y = x.new_empty(*x.shape[:-1], self.out_features)
        _run()(_Words(*self.words, x.data_ptr(), y.data_ptr(), x.numel() // self.in_features))
        return y
