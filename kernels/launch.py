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

from specscope.kernels.tree_batch import LayerShape

LEAST_TILE = 16  # rows that a matrix unit takes at least
MOST_TILE = 64
MOST_SPLITS = 64  # parts of a context
LEAST_BLOCKS = 4  # blocks of keys in a part: less is not worth a program
BUFFERS = ((64, 3), (64, 2), (32, 3), (32, 2), (16, 3), (16, 2), (16, 1))  # (keys of a block, blocks on their way)


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


def tile_of(shape: LayerShape, fold: int, max_rows: int, itemsize: int, shared: int) -> tuple[int, tuple[int, int]]:
    """Rows of a tile where `fold` query heads share a key and a sequence feeds `max_rows`; (keys, blocks) of BUFFERS.

    The first of BUFFERS that a program's shared memory holds: a tile of the query and of the weights, and the keys and
    values on their way. What compilers really take is tested against each device's limit.
    """
    largest = MOST_TILE if itemsize < 4 else LEAST_TILE  # no matrix unit takes float32: large tiles compile for minutes
    tile = max(LEAST_TILE, min(largest, triton.next_power_of_2(max_rows * fold)), triton.next_power_of_2(fold))
    key, value = triton.next_power_of_2(shape.key_size), triton.next_power_of_2(shape.value_size)
    for keys, blocks in BUFFERS:
        if (tile * (key + keys) + blocks * keys * (key + value)) * itemsize <= shared:
            break
    return tile, (keys, blocks)


def splits_of(programs: int, longest: int, keys: int, multiprocessors: int) -> int:
    """Parts of the longest context: enough for two programs a multiprocessor. Shorter contexts fill fewer of them."""
    wanted = 2 * multiprocessors // max(programs, 1)
    return max(1, min(wanted, longest // (LEAST_BLOCKS * keys), MOST_SPLITS))


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
