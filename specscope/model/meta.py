"""Modules without memory, to be filled from a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn import init

INITIAL = ("normal_", "uniform_", "zeros_", "ones_", "constant_", "trunc_normal_", "kaiming_uniform_")


@contextmanager
def quick_meta() -> Iterator[None]:
    """Inside, tensors on the meta device get no initial values, and numbers in a row come from the CPU.

    The outcome is the same: such a tensor holds no values. But torch makes these in Python, through its compiler, whose
    import is a second and a half of a start.
    """
    arange = torch.arange

    def skip(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        @wraps(function)
        def skipping(tensor: Tensor, *given: Any, **named: Any) -> Tensor:  # noqa: ANN401
            return tensor if tensor.is_meta else function(tensor, *given, **named)

        return skipping

    def row(*given: Any, device: Any = None, **named: Any) -> Tensor:  # noqa: ANN401
        wanted = torch.device(device) if device is not None else torch.get_default_device()
        if wanted.type != "meta":
            return arange(*given, device=device, **named)
        return arange(*given, device="cpu", **named)

    with ExitStack() as stack:
        stack.enter_context(patch.object(torch, "arange", row))
        for name in INITIAL:
            stack.enter_context(patch.object(init, name, skip(getattr(init, name))))
        yield
