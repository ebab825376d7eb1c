"""From the host to where kernels read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

ALIGNED = 16  # bytes: what a kernel's loads may rely on


def put(array: NDArray[Any], device: torch.device) -> Tensor:
    """The array as a tensor on the device; a GPU copies it from pinned memory while the host goes on."""
    host = torch.from_numpy(np.ascontiguousarray(array))
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host.to(device)


class Packed:
    """Arrays side by side in one buffer on the host, pinned for a GPU: one copy takes all of them to the device.

    torch hands out pinned memory again only when the copies from it are done, so a buffer may be dropped at once.
    """

    def __init__(self, arrays: Mapping[str, NDArray[Any]], device: torch.device) -> None:
        self.device = device
        self._places: dict[str, tuple[slice, torch.dtype, tuple[int, ...]]] = {}
        end = 0
        for name, array in arrays.items():
            kind = torch.from_numpy(array[:0]).dtype
            self._places[name] = slice(end, end + array.nbytes), kind, array.shape
            end += -(-array.nbytes // ALIGNED) * ALIGNED
        self.host = torch.empty(end, dtype=torch.uint8, pin_memory=device.type == "cuda")
        whole = self.host.numpy()
        for name, array in arrays.items():
            whole[self._places[name][0]].view(array.dtype)[:] = array.ravel()

    def put(self) -> dict[str, Tensor]:
        """The arrays on the device."""
        return self.views(self.host.to(self.device, non_blocking=True))

    def views(self, buffer: Tensor) -> dict[str, Tensor]:
        """The arrays in a buffer of the same size."""
        return {name: buffer[part].view(kind).view(shape) for name, (part, kind, shape) in self._places.items()}
