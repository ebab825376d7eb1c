"""Which code moves and attends to the KV cache: torch's operators, or this project's Triton kernels."""

from __future__ import annotations

import os
from enum import StrEnum

import torch

from specscope.errors import UserError

BACKENDS = ("auto", "torch", "triton")


class Backend(StrEnum):
    """torch runs everywhere and is the reference; triton is for GPUs."""

    TORCH = "torch"
    TRITON = "triton"


def pick_backend(name: str, device: torch.device) -> Backend:
    """A name of BACKENDS as a backend; auto is triton on a CUDA GPU. Raises UserError where it cannot run."""
    if name == "auto":
        return Backend.TRITON if device.type == "cuda" else Backend.TORCH
    backend = Backend(name)
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if backend is Backend.TRITON and device.type != "cuda" and not interpreted:
        raise UserError("the triton backend needs a CUDA GPU (TRITON_INTERPRET=1 emulates one, slowly, for tests)")
    return backend
