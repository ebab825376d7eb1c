"""How kernels are launched: all that decides which variant of a kernel is compiled, in one place.

Triton compiles a kernel anew for other constants, argument types, warps and stages, and for an integer or a pointer
that happens to be a multiple of 16 (an integer that is 1 becomes a constant). So sizes that differ from step to step
are marked `do_not_specialize`, and what is launched is described by a Launch that one function of each kernel makes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import triton
from torch import Tensor

_TYPES = {
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float32: "fp32",
    torch.float64: "fp64",
    torch.int32: "i32",
    torch.int64: "i64",
}


@dataclass(frozen=True)
class Device:
    """What of a GPU decides how kernels are launched on it."""

    multiprocessors: int
    shared: int  # bytes of shared memory that one program may have


A100, H100, B200 = Device(108, 163 << 10), Device(132, 227 << 10), Device(148, 227 << 10)
INTERPRETER = Device(1, H100.shared)  # nothing is split for a device that runs one program after another


@lru_cache(maxsize=8)
def limits(device: torch.device) -> Device:
    """Of the device that a tensor is on; the interpreter's on a CPU."""
    if device.type != "cuda":
        return INTERPRETER
    index = torch.cuda.current_device() if device.index is None else device.index
    properties = triton.runtime.driver.active.utils.get_device_properties(index)  # what Triton itself checks against
    return Device(properties["multiprocessor_count"], properties["max_shared_mem"])


@dataclass(frozen=True)
class CompiledKernel:
    """One compiled form of a kernel: what the compiler is given."""

    kernel: str  # module and name
    arguments: tuple[tuple[str, str], ...]  # each one's type; ":16" where the compiler may rely on a multiple, "=1"
    constants: tuple[tuple[str, Any], ...]  # a type of numbers by its name
    warps: int
    stages: int


@dataclass(frozen=True)
class Launch:
    """A kernel with its constants; calling it launches it."""

    kernel: Any  # a triton.jit function
    constants: Mapping[str, Any]
    warps: int = 4
    stages: int = 3

    def __call__(self, grid: tuple[int, ...], *arguments: Any) -> None:  # noqa: ANN401
        """Launch so many programs; arguments in the kernel's order, constants left out."""
        for seen in _watching:
            seen.add(self.variant(arguments))
        self.kernel[grid](*arguments, **self.constants, num_warps=self.warps, num_stages=self.stages)

    def variant(self, arguments: tuple[Any, ...]) -> CompiledKernel:
        """What is compiled for these arguments."""
        fn = self.kernel.fn
        loose = _not_specialised(self.kernel)
        names = [name for name in self.kernel.arg_names if name not in self.constants]
        return CompiledKernel(
            kernel=f"{fn.__module__.rpartition('.')[2]}.{fn.__name__}",
            arguments=tuple((n, _type(a, n not in loose)) for n, a in zip(names, arguments, strict=True)),
            constants=tuple(self.constants.items()),
            warps=self.warps,
            stages=self.stages,
        )


_watching: list[set[CompiledKernel]] = []


@contextmanager
def watch_variants() -> Iterator[set[CompiledKernel]]:
    """Every variant that is launched meanwhile."""
    seen: set[CompiledKernel] = set()
    _watching.append(seen)
    try:
        yield seen
    finally:
        _watching.remove(seen)


def interpreted() -> bool:
    """Whether kernels run under Triton's interpreter."""
    return bool(triton.knobs.runtime.interpret)


def _not_specialised(kernel: Any) -> set[str]:  # noqa: ANN401
    """Names of the arguments whose values the compiler may not look at."""
    if hasattr(kernel, "params"):
        return {p.name for p in kernel.params if p.do_not_specialize or p.do_not_specialize_on_alignment}
    given = kernel.kwargs  # of the interpreter's
    return {*(given.get("do_not_specialize") or ()), *(given.get("do_not_specialize_on_alignment") or ())}


def _type(value: Any, specialised: bool) -> str:  # noqa: ANN401
    if isinstance(value, Tensor):
        return f"*{_TYPES[value.dtype]}" + (":16" if specialised and value.data_ptr() % 16 == 0 else "")
    if isinstance(value, float):
        return "fp32"
    if specialised and value == 1:
        return "=1"
    return ("i32" if -(2**31) <= value < 2**31 else "i64") + (":16" if specialised and value % 16 == 0 else "")
