"""Linear layers on the CPU: those over one input as one product, their weight laid out for the fastest library.

What a step of few rows costs is reading the weights. Float32 weights that were published in 16 bits can be kept so and
lose no more than float32 rounds away. Which library lays them out is no matter of timing, so that every start on a
machine computes the same numbers: the first of PATHS is used whose numbers are the plain product's on a small weight,
and plain torch where each raises or differs. SPECSCOPE_DISABLE switches paths off by name.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from specscope.errors import UserError, first_line

VARIABLE = "SPECSCOPE_DISABLE"
NUMBA, ONEDNN = "numba", "onednn"  # of the first, whole layers are made too (decoder.py)
FUSE = "fuse"  # cheaper norms and layers (fuse.py), which are tried on the model itself
TRIAL_ROWS = (1, 5, 33)  # libraries choose other code for one row and for many

Product = Callable[[Tensor], Tensor]


def _onednn(weight: Tensor, bias: Tensor | None) -> Product:
    layout = torch.ops.mkldnn._reorder_linear_weight(weight)
    multiply = torch.ops.mkldnn._linear_pointwise.default
    return lambda x: multiply(x, layout, bias, "none", [], "")


def _numba(weight: Tensor, bias: Tensor | None) -> Product:
    """Our own kernel, likewise float32 by weights in 16 bits: several rows take about as long as one."""
    from specscope.kernels.cpu.layer import prepare  # numba is imported only where it runs
    from specscope.kernels.cpu.product import Panels

    prepare()  # whole layers too: all kernels can be used, or none
    return Panels.of(weight, bias, torch.float16 if weight.dtype is torch.float32 else weight.dtype)


def must_compile(dtype: torch.dtype) -> bool:
    """Whether our own kernels will be compiled when they are first tried, which takes a while."""
    if dtype not in (torch.float32, torch.bfloat16) or NUMBA in disabled():
        return False
    try:
        from specscope.kernels.cpu import team
    except (ImportError, OSError):  # then they will not be used
        return False
    return team.must_compile()


def is_half(weight: Tensor) -> bool:
    """Whether float16 holds a weight to the accuracy of float32: no row changes by more than its rounding.

    A weight that was published in bfloat16 has numbers below 2^-14, of which float16 keeps fewer digits. There are few,
    and beside the others of their row they count for less than the order in which a sum is made.
    """
    exact = weight.float()
    lost = (exact.half().float() - exact).norm(dim=-1)
    return bool((lost <= torch.finfo(torch.float32).eps * exact.norm(dim=-1)).all())


# By name, as SPECSCOPE_DISABLE takes it: (weight, bias) to x -> x W^T + b. On most processors the first is the fastest
# (benchmarks/notes/2026-11.md has figures).
PATHS: dict[str, Callable[[Tensor, Tensor | None], Product]] = {NUMBA: _numba, ONEDNN: _onednn}
DTYPES = (torch.float32, torch.bfloat16)
NAMES = (*PATHS, FUSE)


def disabled() -> frozenset[str]:
    """The paths that the user switched off. Raises UserError for a name that is none of them."""
    names = frozenset(name.strip().lower() for name in os.environ.get(VARIABLE, "").split(",")) - {""}
    unknown = sorted(names - set(NAMES))
    if unknown:
        raise UserError(f"{VARIABLE}: unknown fast path {unknown[0]!r}: use {', '.join(NAMES)}, with commas")
    return names


def usable(dtype: torch.dtype) -> list[str]:
    """The paths for weights of a dtype that work here and are not switched off."""
    off = disabled()
    return [name for name in PATHS if dtype in DTYPES and name not in off and failure(name, dtype) is None]


@cache
def failure(name: str, dtype: torch.dtype) -> str | None:
    """Why a path cannot be used here; None where its numbers are the plain product's. Tried once in a process."""
    generator = torch.Generator().manual_seed(0)
    random = lambda *shape: torch.randn(*shape, generator=generator).bfloat16().to(dtype)  # noqa: E731
    weight = random(64, 48)
    try:
        for bias in (None, random(64)):
            product = PATHS[name](weight, bias)
            for rows in TRIAL_ROWS:
                x = random(rows, 48)
                if not same_numbers(functional.linear(x, weight, bias), product(x)):
                    return "its results differ"
    except Exception as error:  # a library says in its own way that it is not there, or cannot use this CPU
        return first_line(error)
    return None


def same_numbers(expected: Tensor, got: Tensor) -> bool:
    """Equality to the accuracy of the dtype, and of sums in another order. NaN equals nothing."""
    tolerance = 1e-5 + 2 * torch.finfo(expected.dtype).eps
    return bool((expected.float() - got.float()).norm() <= tolerance * expected.float().norm())


@cache
def has_bfloat16() -> bool:
    """Whether the CPU multiplies in bfloat16, found out by a product of numbers that are too small for it.

    Instructions for bfloat16 (AVX-512, AMX, Arm) take a denormal number for zero. Where there are none, a product is
    made in float32, which keeps it, and bfloat16 would gain little or nothing.
    """
    try:
        denormal = torch.full((16, 64), 2.0**-130, dtype=torch.bfloat16)
        product = functional.linear(denormal, torch.full((64, 64), 2.0**100, dtype=torch.bfloat16))
    except Exception:  # no product at all
        return False
    return not bool(product.any())


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
        layouts: list[Any] = _layouts(self.weight.detach(), self.bias) if pack else []
        if wide and len(layouts) == 1 and hasattr(layouts[0], "rounds"):  # our own, of however many rows
            layouts = [replace(layouts[0], rounds=False)]
        self._layouts: list[Product] = layouts  # for few rows, for many

    @property
    def panels(self) -> Panels:
        """The layout for the compiled layer's products; it may be the one that this layer uses."""
        from specscope.kernels.cpu.product import Panels  # numba is imported only where it runs

        if (panels := next((x for x in self._layouts if isinstance(x, Panels)), None)) is not None:
            return panels
        weight = self.weight.detach()
        halves = weight.dtype is torch.float32 and is_half(weight)
        return Panels.of(weight, self.bias, torch.float16 if halves else weight.dtype)

    def forward(self, x: Tensor) -> Tensor:
        if self._layouts:
            return self._layouts[-1 if x.numel() > FEW * self.in_features else 0](x)
        if x.dim() == 2 and self.bias is None:
            return torch.mm(x, self._transposed)  # what linear comes to, without its way there
        return functional.linear(x, self.weight, self.bias)


def _layouts(weight: Tensor, bias: Tensor | None) -> list[Product]:
    """x -> x W^T + b with a repacked weight: the best that works, and where that is for few rows, the next."""
    layouts: list[Product] = []
    for name in usable(weight.dtype):
        fits = len(weight) % 16 == 0 and (weight.dtype is torch.bfloat16 or is_half(weight))
        if name != NUMBA or fits:
            with suppress(Exception):  # what a small weight's trial did not show, such as memory running out
                layouts.append(PATHS[name](weight, bias))
                if name != NUMBA or compiled_rows(weight.dtype) > FEW:
                    break
    return layouts


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
    names = usable(dtype)
    if NUMBA not in names:
        return 0
    from specscope.kernels.cpu.tiles import PAIRED, TILED  # numba is imported only where it runs

    lack = TILED or (has_bfloat16() and not PAIRED)
    return FEW if lack and dtype is torch.bfloat16 and ONEDNN in names else sys.maxsize


def may_pack(model: nn.Module) -> bool:
    """Whether the weights of a model can be repacked, and memory has room for them twice."""
    weights = [module.weight for module in model.modules() if isinstance(module, nn.Linear)]
    known = all(usable(dtype) for dtype in {weight.dtype for weight in weights})
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return known and sum(weight.nbytes for weight in weights) <= memory * PACKED_SHARE
