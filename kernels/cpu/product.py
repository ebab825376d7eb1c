"""x W^T + b on a processor, from weights in panels of 16 rows: [panels, in, 16], float32, float16 or bfloat16.

Up to six rows read each panel once, so that they take about as long as one. A weight in 16 bits is widened as it is
read; sums are made in float32. Where the processor multiplies pairs of bfloat16 numbers, the panels of a weight in
bfloat16 are [panels, in / 2, 16, 2], x is rounded to bfloat16 too, and up to twelve rows share a read.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, cached_property

import torch
from numba import carray
from torch import Tensor

from specscope.kernels.cpu.team import compiled, machine_code, me, members
from specscope.kernels.cpu.tiles import (
    BFLOAT16,
    FLOAT16,
    FLOAT32,
    KINDS,
    PAIRED,
    PAIRS,
    PANEL,
    PRODUCT,
    WIDE,
    call_product,
    integers,
    jit,
    product_tile,
    size_of,
)

KIND_OF = {torch.float32: FLOAT32, torch.float16: FLOAT16, torch.bfloat16: BFLOAT16}
# Rows that share a read of some panels are as many as there are registers for: each panel of a row takes one of 32 with
# AVX-512, else two of 16, besides the weights and a factor. A sum waits for its last term, so that there should be at
# least eight at a time.
ROWS = 6
TOGETHER, FEW = (4, ROWS) if WIDE else (2, 2)
MORE = 2 * ROWS  # of pairs, which need no widening
one_panel = product_tile(1, 1, ROWS)
some_panels = product_tile(TOGETHER, 1, FEW)
two_panels = product_tile(2, ROWS, MORE, tuple(kind for kind in KINDS if kind == PAIRS), far=True)


def multiply(kind, first, last, w, w_stride, apart, x, x_stride, start, start_stride, y, y_stride, rows, length):
    """Panels first..last-1 by any number of rows.

    kind: of the weights. w: address of panel 0, its rows `w_stride` numbers apart, the next panel `apart` bytes behind;
    x, start and y: of the first row, rows so many floats apart; start and y of panel 0.
    """
    p = first
    while p < last:
        here, column = w + p * apart, 4 * PANEL * p
        panels, max_rows = 1, ROWS
        if kind == PAIRS and rows > ROWS and last - p >= 2:
            panels, max_rows = 2, MORE
        elif (WIDE or rows <= FEW) and last - p >= TOGETHER:
            panels = TOGETHER
        groups = (rows + max_rows - 1) // max_rows
        for group in range(groups):
            begin = rows * group // groups
            many = rows * (group + 1) // groups - begin
            a, c = x + 4 * begin * x_stride, y + column + 4 * begin * y_stride
            b = start + column + 4 * begin * start_stride
            if panels == 1:
                one_panel(kind, many, here, w_stride, apart, a, x_stride, b, start_stride, c, y_stride, length)
            elif max_rows == ROWS:
                some_panels(kind, many, here, w_stride, apart, a, x_stride, b, start_stride, c, y_stride, length)
            else:  # each group fetches its share of the panels that come next
                ahead, pace = 2 * apart + apart * group // groups, 4 * w_stride // groups
                two_panels(
                    kind, many, here, w_stride, apart, a, x_stride, b, start_stride, c, y_stride, length, ahead, pace
                )
        p += panels


@jit
def shape(kind, width):
    """(terms of a sum of `width` products, bytes of a panel) of weights of that kind."""
    if kind == PAIRS:
        return width // 2, 2 * PANEL * width
    return width, size_of(kind) * PANEL * width


@cache
def multiply_at() -> int:
    """The address of `multiply`, compiled."""
    return int(machine_code(multiply, PRODUCT - 1).address)


def _product(address):
    function, kind, w, panels, start, width, x, y, rows = carray(integers(address), 9)
    thread, threads = me(), members()
    first, last = panels * thread // threads, panels * (thread + 1) // threads
    length, apart = shape(kind, width)
    call_product(function, kind, first, last, w, PANEL, apart, x, length, start, 0, y, panels * PANEL, rows, length)


@dataclass(frozen=True)
class Panels:
    """A linear layer laid out for these kernels. Calling it gives x W^T + b."""

    numbers: Tensor  # [out / 16, in, 16], float32, float16 or bfloat16; in pairs [out / 16, in / 2, 16, 2]
    start: Tensor  # float32 [out] what is added to the sums: the bias, or zeros
    in_features: int  # numbers of a row of x
    rounds: bool = True  # what comes out to the dtype of x; else it is float32

    @staticmethod
    def fits(weight: Tensor) -> bool:
        """Whether a weight [out, in] can be laid out so."""
        return weight.dtype in (torch.float32, torch.bfloat16) and weight.shape[0] % PANEL == 0

    @staticmethod
    def of(weight: Tensor, bias: Tensor | None, dtype: torch.dtype, *, pairs: bool = PAIRED) -> Panels:
        """`dtype`: that the weight is kept in; `pairs`: whether in pairs where that is bfloat16.

        Raises what stands in the way of running it on this machine.
        """
        compiled(_product)
        numbers = weight.detach().to(dtype).unflatten(0, (-1, PANEL)).transpose(1, 2)
        width = weight.shape[1]
        if pairs and dtype is torch.bfloat16 and width % 2 == 0:
            numbers = numbers.unflatten(1, (-1, 2)).transpose(2, 3)
        start = torch.zeros(len(weight), dtype=torch.float32, device="cpu")
        return Panels(numbers.contiguous(), start if bias is None else start + bias.detach(), width)

    @property
    def pairs(self) -> bool:
        """Whether weights are in pairs, and x must be."""
        return self.numbers.dim() == 4

    @property
    def out_features(self) -> int:
        """Numbers in a row of the output."""
        return len(self.start)

    @cached_property
    def words(self) -> tuple[int, int, int, int, int]:
        """What is passed to the kernels: kind, address, panels, address of the start, in_features."""
        kind = PAIRS if self.pairs else KIND_OF[self.numbers.dtype]
        return kind, self.numbers.data_ptr(), len(self.numbers), self.start.data_ptr(), self.in_features

    def __call__(self, x: Tensor) -> Tensor:
        """x float32 or bfloat16 [..., in]."""
        given = (x.bfloat16() if self.pairs else x.float()).contiguous()
        y = torch.empty(*x.shape[:-1], self.out_features, dtype=torch.float32, device="cpu")
        rows = x.numel() // self.in_features
        compiled(_product)(multiply_at(), *self.words, given.data_ptr(), y.data_ptr(), rows)
        return y.to(x.dtype) if self.rounds else y
