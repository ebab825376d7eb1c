"""Linear layers on the CPU: those over one input as one product, their weight laid out for the fastest library.

What a step of few rows costs is reading the weights. Float32 weights that were published in bfloat16 or float16 can be
kept in 16 bits and lose no more than float32 rounds away. Which library lays them out is no matter of timing: the first
one in fast_paths.py that works here, so that every start on a machine computes the same numbers at the same speed.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from specscope.model.fast.fast_paths import NUMBA, ONEDNN, FastPath, Product, has_bfloat16, is_half, usable

if TYPE_CHECKING:
    from specscope.kernels.cpu.product import Panels

FEW = 8  # rows that our own kernels multiply about as fast as a library that has instructions which they lack
PACKED_SHARE = 1 / 4  # of the machine's memory: weights that take more are not laid out again


class PackedLinear(nn.Module):
    """One or more linear layers over one input; gives their outputs side by side.

    Packed, bfloat16 weights are read at up to three times the speed, and float32 ones at up to twice.
    """

    def __init__(self, linears: Sequence[nn.Linear], *, pack: bool, wide: bool = False) -> None:
        """`wide`: outputs may stay in float32, in which sums are made, whatever the weight's dtype."""
        super().__init__()
        first = linears[0]
        self.weight, self.bias = first.weight, first.bias  # one layer: tied embeddings stay tied
        if len(linears) > 1:
            self.weight = _join([linear.weight for linear in linears])
            self.bias = None if first.bias is None else _join([linear.bias for linear in linears])
        self.out_features, self.in_features = self.weight.shape
        self._transposed = self.weight.detach().t()
        self._layouts = _layouts(self.weight.detach(), self.bias) if pack else {}
        product: Any = _chosen(self._layouts, self.weight)
        if wide and len(self._layouts) == 1 and hasattr(product, "rounds"):  # our own, of however many rows
            product = replace(product, rounds=False)
        self._product: Product | None = product

    @property
    def panels(self) -> Panels:
        """The layout for the compiled layer's products; it may be the one that this layer uses."""
        from specscope.kernels.cpu.product import Panels  # numba is imported only where it runs

        if (panels := next((x for x in self._layouts.values() if isinstance(x, Panels)), None)) is not None:
            return panels
        weight = self.weight.detach()
        halves = weight.dtype is torch.float32 and is_half(weight)
        return Panels.of(weight, self.bias, torch.float16 if halves else weight.dtype)

    def forward(self, x: Tensor) -> Tensor:
        """x W^T + b."""
        if self._product is not None:
            return self._product(x)
        if x.dim() == 2 and self.bias is None:
            return torch.mm(x, self._transposed)  # what linear comes to, without its way there
        return functional.linear(x, self.weight, self.bias)


def _layouts(weight: Tensor, bias: Tensor | None) -> dict[FastPath, Product]:
    """x -> x W^T + b with a repacked weight, by path: the best that works, and where that is for few rows, the next."""
    layouts: dict[FastPath, Product] = {}
    for path in usable(weight.dtype):
        if path.fits(weight):
            with suppress(Exception):  # what a small weight's trial did not show, such as memory running out
                layouts[path] = path.lay_out(weight, bias)
                if path.name != NUMBA or compiled_rows(weight.dtype) > FEW:
                    break
    return layouts


def _chosen(layouts: Mapping[FastPath, Product], weight: Tensor) -> Product | None:
    """One product out of those for few and for many rows; None where there is none."""
    if len(layouts) < 2:
        return next(iter(layouts.values()), None)
    few_rows, many_rows = layouts.values()
    limit = FEW * weight.shape[1]
    return lambda x: few_rows(x) if x.numel() <= limit else many_rows(x)


def _join(parts: Sequence[Tensor]) -> nn.Parameter:
    """One parameter out of several. Each becomes a view of it, so that memory holds the numbers once."""
    whole = torch.cat([part.detach() for part in parts])
    for part, view in zip(parts, whole.split([len(part) for part in parts]), strict=True):
        part.data = view
    return nn.Parameter(whole, requires_grad=False)


def compiled_rows(dtype: torch.dtype) -> int:
    """Up to how many rows whole layers of our own kernels are the fastest here; 0 where they cannot be used.

    They are for any number of rows, unless the processor multiplies bfloat16 numbers by instructions that they lack.
    """
    names = {path.name for path in usable(dtype)}
    if NUMBA not in names:
        return 0
    from specscope.kernels.cpu.tiles import PAIRED, TILED  # numba is imported only where it runs

    lack = TILED or (has_bfloat16() and not PAIRED)
    return FEW if lack and dtype is torch.bfloat16 and ONEDNN in names else sys.maxsize


def may_pack(model: nn.Module) -> bool:
    """Whether the weights of a model can be repacked, and memory has room for them twice."""
    weights = [module.weight for module in model.modules() if isinstance(module, nn.Linear)]
    known = all(usable(dtype) for dtype in {weight.dtype for weight in weights})
    try:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):  # not every system tells
        return False
    return known and sum(weight.nbytes for weight in weights) <= memory * PACKED_SHARE
