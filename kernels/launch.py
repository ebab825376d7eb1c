"""How kernels are launched: all that decides which variant of a kernel is compiled, in one place.

Triton compiles a kernel anew for other constants, argument types, warps and stages, and for an integer or a pointer
that happens to be a multiple of 16 (an integer that is 1 becomes a constant). So sizes that differ from step to step
are marked `do_not_specialize`, and what is launched is described by a Launch that one function of each kernel makes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import triton


@dataclass(frozen=True)
class Device:
    """What of a GPU decides how kernels are launched on it."""

    multiprocessors: int
    shared: int  # bytes of shared memory that one program may have


INTERPRETER = Device(1, 227 << 10)  # nothing is split for a device that runs one program after another


@lru_cache(maxsize=8)
def limits(device: torch.device) -> Device:
    """Of the device that a tensor is on; the interpreter's on a CPU."""
    if device.type != "cuda":
        return INTERPRETER
    index = torch.cuda.current_device() if device.index is None else device.index
    properties = triton.runtime.driver.active.utils.get_device_properties(index)  # what Triton itself checks against
    return Device(properties["multiprocessor_count"], properties["max_shared_mem"])


@dataclass(frozen=True)
class Launch:
    """A kernel with its constants; calling it launches it."""

    kernel: Any  # a triton.jit function
    constants: Mapping[str, Any]
    warps: int = 4
    stages: int = 3

    def __call__(self, grid: tuple[int, ...], *arguments: Any) -> None:  # noqa: ANN401
        """Launch so many programs; arguments in the kernel's order, constants left out."""
        self.kernel[grid](*arguments, **self.constants, num_warps=self.warps, num_stages=self.stages)


def interpreted() -> bool:
    """Whether kernels run under Triton's interpreter."""
    return bool(triton.knobs.runtime.interpret)
