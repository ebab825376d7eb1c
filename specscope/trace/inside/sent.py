"""Sent: tensors on their way from a device to the host, in one copy that nothing waits for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Generic, TypeVar

import torch
from numpy.typing import NDArray
from torch import Tensor

Key = TypeVar("Key")


def to_host(packed: Tensor) -> tuple[Tensor, Any]:
    """(The tensor on the host, the event that says that it has come; None where it was there)."""
    if packed.device.type != "cuda":
        return packed, None
    host = torch.empty(packed.shape, dtype=packed.dtype, pin_memory=True)
    host.copy_(packed, non_blocking=True)
    arrived: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
    arrived.record()
    return host, arrived


class Sent(Generic[Key]):
    """The copy is queued behind the work that is queued there, and goes into pinned memory."""

    def __init__(self, tensors: Mapping[Key, Tensor]) -> None:
        # Widest numbers first: each tensor then begins where its type may begin
        ordered = sorted(tensors.items(), key=lambda item: -item[1].element_size())
        self._kinds = [(key, tensor.dtype, tensor.shape, tensor.nbytes) for key, tensor in ordered]
        packed = torch.cat([tensor.contiguous().flatten().view(torch.uint8) for _, tensor in ordered])
        self._host, self._arrived = to_host(packed)
        self.bytes = packed.nbytes

    def ready(self) -> bool:
        """Whether they have come."""
        return self._arrived is None or bool(self._arrived.query())

    def wait(self) -> None:
        """Wait until they have come."""
        if self._arrived is not None:
            self._arrived.synchronize()

    def read(self) -> dict[Key, NDArray[Any]]:
        """When they have come."""
        arrays, start = {}, 0
        for key, dtype, shape, size in self._kinds:
            arrays[key] = self._host[start : start + size].view(dtype).view(shape).numpy()
            start += size
        return arrays
