"""Where a model runs and in which numbers: what the user asks for, tried before anything is loaded."""

from __future__ import annotations

import torch
from torch.nn import functional

from specscope.errors import UserError, first_line
from specscope.model.fast.linear import has_bfloat16
from specscope.model.places import check_device

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def pick_device(name: str) -> torch.device:
    """`auto` is CUDA where there is one. Raises UserError for a device that is not there or not supported."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    check_device(name)
    device = torch.device(name)
    if device.type == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise UserError("found no CUDA device: use --device cpu (specscope doctor shows what was found)")
    count = torch.cuda.device_count()
    if not 0 <= (device.index or 0) < count:
        raise UserError(f"no device {name}: this machine has {count}, counted from cuda:0")
    try:
        torch.zeros(1, device=device)
    except RuntimeError as error:
        raise UserError(f"device {name} cannot be used: {first_line(error)}") from error
    return device


def pick_dtype(name: str, device: torch.device) -> torch.dtype:
    """`auto` is bfloat16 where the device computes in it, float32 elsewhere. Raises UserError for what it cannot do."""
    if name == "auto":
        cuda = device.type == "cuda"
        fast = torch.cuda.is_bf16_supported(including_emulation=False) if cuda else has_bfloat16()
        return torch.bfloat16 if fast else torch.float32
    if name not in DTYPES:
        raise UserError(f"unknown dtype {name!r}: use auto, {', '.join(DTYPES)}")
    try:  # to multiply and attend once, on small tensors
        x = torch.ones(1, 1, 16, 16, dtype=DTYPES[name], device=device)
        functional.scaled_dot_product_attention(functional.linear(x, x[0, 0]), x, x)
    except (RuntimeError, NotImplementedError) as error:
        why = f"the device {device} does not support it ({first_line(error)})"
        raise UserError(f"--dtype {name}: {why}: use --dtype float32") from error
    return DTYPES[name]
