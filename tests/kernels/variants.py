"""What of a launch makes Triton compile a kernel anew: the variants of a run, seen without a GPU."""

from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from specscope.kernels.launch import Device, Launch

A100, H100, B200 = Device(108, 163 << 10), Device(132, 227 << 10), Device(148, 227 << 10)
_TYPES = {
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float32: "fp32",
    torch.float64: "fp64",
    torch.int32: "i32",
    torch.int64: "i64",
}


@dataclass(frozen=True)
class CompiledKernel:
    """One compiled form of a kernel: what the compiler is given."""

    kernel: str  # module and name
    arguments: tuple[tuple[str, str], ...]  # each one's type; ":16" where the compiler may rely on a multiple, "=1"
    constants: tuple[tuple[str, Any], ...]  # a type of numbers by its name
    warps: int
    stages: int


def variant(launch, arguments):
    """What is compiled for these arguments."""
    fn, loose = launch.kernel.fn, _not_specialised(launch.kernel)
    names = [name for name in launch.kernel.arg_names if name not in launch.constants]
    return CompiledKernel(
        kernel=f"{fn.__module__.rpartition('.')[2]}.{fn.__name__}",
        arguments=tuple((n, _type(a, n not in loose)) for n, a in zip(names, arguments, strict=True)),
        constants=tuple(launch.constants.items()),
        warps=launch.warps,
        stages=launch.stages,
    )


@contextmanager
def watched(*, dry=False):
    """Every variant that is launched meanwhile; where it is `dry`, none is."""
    seen, call = set(), Launch.__call__

    def note(self, grid, *arguments):
        seen.add(variant(self, arguments))
        if not dry:
            call(self, grid, *arguments)

    with patch.object(Launch, "__call__", note):
        yield seen


def _not_specialised(kernel):
    """Names of the arguments whose values the compiler may not look at."""
    if hasattr(kernel, "params"):
        return {p.name for p in kernel.params if p.do_not_specialize or p.do_not_specialize_on_alignment}
    given = kernel.kwargs  # of the interpreter's
    return {*(given.get("do_not_specialize") or ()), *(given.get("do_not_specialize_on_alignment") or ())}


def _type(value, specialised):
    if isinstance(value, Tensor):
        return f"*{_TYPES[value.dtype]}" + (":16" if specialised and value.data_ptr() % 16 == 0 else "")
    if isinstance(value, float):
        return "fp32"
    if specialised and value == 1:
        return "=1"
    return ("i32" if -(2**31) <= value < 2**31 else "i64") + (":16" if specialised and value % 16 == 0 else "")
