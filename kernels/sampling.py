"""Logits to the probabilities that are sampled from, in one launch: temperature, min-p and softmax.

torch makes six passes over the vocabulary of it (scale, maximum, compare, fill, and two of softmax). This reads the
logits three times, from the device's cache after the first, and writes once. Top-k and top-p need an order of the
tokens and stay torch's.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specscope.kernels.launch import Launch
from specscope.kernels.place import ALIGNED

BLOCK = 4096
LEAST: tl.constexpr = tl.constexpr(2.0**-126)  # the least temperature: float32 divides by no smaller number well


def probabilities(
    logits: Tensor, temperature: Tensor, min_p: Tensor, out: Tensor | None = None, block: int = BLOCK
) -> Tensor:
    """softmax(logits / temperature) without tokens below min_p times the likeliest. Float32 [R, V], in `out` if given.

    logits [R, V] of any float dtype, last stride 1; temperature, not negative, and min_p: float32 [R], of each row.
    """
    rows, vocabulary = logits.shape
    if out is None:
        out = torch.empty(rows, vocabulary, dtype=torch.float32, device=logits.device)
    strides = [x.stride(0) if rows > 1 else vocabulary for x in (logits, out)]
    aligned = all(x.element_size() * n % ALIGNED == 0 for x, n in zip((logits, out), strides, strict=True))
    sampling_launch(vocabulary, block, aligned=aligned)(
        (rows,), logits, strides[0], out, strides[1], vocabulary, temperature, min_p
    )
    return out


def sampling_launch(vocabulary: int, block: int, *, aligned: bool) -> Launch:
    """One row. `aligned`: whether every row begins where the first one may."""
    kernel = _probabilities if aligned else _unaligned_probabilities
    return Launch(kernel, {"BLOCK": min(block, triton.next_power_of_2(vocabulary))}, warps=16)


def probabilities_reference(logits: Tensor, temperature: Tensor, min_p: Tensor) -> Tensor:
    """What probabilities must give, in float64."""
    moved = logits.double() - logits.double().amax(-1, keepdim=True)
    weight = (moved / temperature.double().clamp(min=LEAST.value)[:, None]).exp()
    weight = weight.masked_fill(weight < min_p[:, None], 0)
    return weight / weight.sum(-1, keepdim=True)


def probabilities_bytes(logits: Tensor) -> int:
    """Bytes that probabilities moves at least."""
    return logits.numel() * (logits.element_size() + torch.float32.itemsize)


@triton.jit
def _weight(logits_row, x, vocabulary, best, temperature):  # type: ignore[no-untyped-def]
    """exp of logits at tokens x over the temperature, of the likeliest 1. Nothing overflows but to exp(-inf)."""
    value = tl.load(logits_row + x, mask=x < vocabulary, other=-float("inf")).to(tl.float32)
    return tl.exp((value - best) / temperature)


def _rows(logits, stride, out, out_stride, vocabulary, temperatures, min_ps, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, BLOCK)
    logits_row, out_row = logits + row * stride, out + row * out_stride
    temperature = tl.maximum(tl.load(temperatures + row), LEAST)
    min_p = tl.load(min_ps + row)
    top = tl.full([BLOCK], -float("inf"), tl.float32)
    for begin in range(0, vocabulary, BLOCK):
        x = begin + lanes
        value = tl.load(logits_row + x, mask=x < vocabulary, other=-float("inf")).to(tl.float32)
        top = tl.maximum(top, value)
    best = tl.max(top, 0)
    total = tl.zeros([BLOCK], tl.float32)
    for begin in range(0, vocabulary, BLOCK):
        weight = _weight(logits_row, begin + lanes, vocabulary, best, temperature)
        total += tl.where(weight >= min_p, weight, 0.0)
    whole = tl.sum(total, 0)
    for begin in range(0, vocabulary, BLOCK):
        x = begin + lanes
        weight = _weight(logits_row, x, vocabulary, best, temperature)
        tl.store(out_row + x, tl.where(weight >= min_p, weight, 0.0) / whole, mask=x < vocabulary)


_probabilities = triton.jit(_rows, do_not_specialize_on_alignment=["temperatures", "min_ps"])
_unaligned_probabilities = triton.jit(
    _rows, do_not_specialize_on_alignment=["temperatures", "min_ps", "logits", "out"]
)  # where a row may begin anywhere, the rows that are given begin now here, now there
