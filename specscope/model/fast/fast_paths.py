"""Products that are faster than plain torch's on the CPU. Each is tried once on a small weight before it is used.

What a CPU is called, and which libraries say that they are there, decides nothing: a path is used where its numbers
are the plain product's, and the next one, in the end plain torch, where it raises or differs. SPECSCOPE_DISABLE
switches paths off by name.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor
from torch.nn import functional

from specscope.errors import UserError, first_line

VARIABLE = "SPECSCOPE_DISABLE"
NUMBA, ONEDNN = "numba", "onednn"  # of the first, whole layers are made too (decoder.py)
FUSE = "fuse"  # cheaper norms and layers (fuse.py), which are tried on the model itself
TRIAL_ROWS = (1, 5, 33)  # libraries choose other code for one row and for many

Product = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class FastPath:
    """One way to multiply by a repacked weight."""

    name: str  # as SPECSCOPE_DISABLE takes it
    dtype: torch.dtype
    lay_out: Callable[[Tensor, Tensor | None], Product]  # (weight, bias) to x -> x W^T + b
    fits: Callable[[Tensor], bool] = lambda weight: True


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


# Those of a dtype that are faster on most processors come first (benchmarks/notes/2026-11.md has figures).
PATHS = (
    FastPath(NUMBA, torch.float32, _numba, fits=lambda weight: len(weight) % 16 == 0 and is_half(weight)),
    FastPath(NUMBA, torch.bfloat16, _numba, fits=lambda weight: len(weight) % 16 == 0),
    FastPath(ONEDNN, torch.float32, _onednn),
    FastPath(ONEDNN, torch.bfloat16, _onednn),
)
NAMES = (*dict.fromkeys(path.name for path in PATHS), FUSE)


def disabled() -> frozenset[str]:
    """The paths that the user switched off. Raises UserError for a name that is none of them."""
    names = frozenset(name.strip().lower() for name in os.environ.get(VARIABLE, "").split(",")) - {""}
    unknown = sorted(names - set(NAMES))
    if unknown:
        raise UserError(f"{VARIABLE}: unknown fast path {unknown[0]!r}: use {', '.join(NAMES)}, with commas")
    return names


def usable(dtype: torch.dtype) -> list[FastPath]:
    """The paths for weights of a dtype that work here and are not switched off."""
    off = disabled()
    return [path for path in PATHS if path.dtype is dtype and path.name not in off and failure(path) is None]


@cache
def failure(path: FastPath) -> str | None:
    """Why a path cannot be used here; None where its numbers are the plain product's. Tried once in a process."""
    generator = torch.Generator().manual_seed(0)
    random = lambda *shape: torch.randn(*shape, generator=generator).bfloat16().to(path.dtype)  # noqa: E731
    weight = random(64, 48)
    try:
        for bias in (None, random(64)):
            product = path.lay_out(weight, bias)
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
