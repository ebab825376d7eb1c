"""From the host to where kernels read."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def put(array: NDArray[Any], device: torch.device) -> Tensor:
    """The array as a tensor on the device; a GPU copies it from pinned memory while the host goes on."""
    host = torch.from_numpy(np.ascontiguousarray(array))
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host.to(device)
