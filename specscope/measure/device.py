"""Timing on a device, and its memory bandwidth, against which kernels are measured."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch

COPY_BYTES = 1 << 30
REPEATS = 30


def device_info(device: torch.device) -> dict[str, str]:
    import triton

    on_gpu = device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(device) if on_gpu else platform.processor() or platform.machine(),
        "cuda": f"CUDA {torch.version.cuda}" if on_gpu else "no CUDA",
        "torch": f"torch {torch.__version__}",
        "triton": f"triton {triton.__version__}",
    }


def seconds(work: Callable[[], object], device: torch.device, repeats: int | None = None) -> float:
    """Median time of a call, on the device's own clock where it has one, after three uncounted calls."""
    repeats = REPEATS if repeats is None else repeats
    for _ in range(3):
        work()
    if device.type != "cuda":
        times = []
        for _ in range(repeats):
            start = time.perf_counter()
            work()
            times.append(time.perf_counter() - start)
        return median(times)
    marks = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
    for before, after in marks:
        before.record()
        work()
        after.record()
    torch.cuda.synchronize(device)
    return float(median(before.elapsed_time(after) for before, after in marks)) / 1e3


def copy_bandwidth(device: torch.device, size: int = COPY_BYTES) -> float:
    """Bytes per second that a copy reads and writes together."""
    source = torch.empty(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * size / seconds(lambda: target.copy_(source), device)


def random_model(shape: dict[str, Any], dtype: torch.dtype, device: torch.device) -> Any:  # noqa: ANN401
    """A model of a given shape whose weights are made on the device."""
    from transformers import AutoConfig, AutoModelForCausalLM

    shape = dict(shape)
    config = AutoConfig.for_model(shape.pop("model_type"), **shape)
    with device:
        return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
