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

BLOCK = 4096


def probabilities(logits: Tensor, temperature: float, min_p: float = 0.0, block: int = BLOCK) -> Tensor:
    """softmax(logits / temperature) without tokens below min_p times the likeliest. Float32 [R, V].

    logits [R, V] of any float dtype, last stride 1; temperature above 0.
    """
    rows, vocabulary = logits.shape
    out = torch.empty(rows, vocabulary, dtype=torch.float32, device=logits.device)
    block = min(block, triton.next_power_of_2(vocabulary))
    _probabilities[(rows,)](
        *(logits, logits.stride(0), out, vocabulary, 1.0 / temperature, min_p), BLOCK=block, num_warps=16
    )
    return out


def probabilities_reference(logits: Tensor, temperature: float, min_p: float = 0.0) -> Tensor:
    """What probabilities must give, in float64."""
    scaled = logits.double() / temperature
    whole = scaled.softmax(-1)
    return scaled.masked_fill(whole < min_p * whole.max(-1, keepdim=True).values, -torch.inf).softmax(-1)


def probabilities_bytes(logits: Tensor) -> int:
    """Bytes that probabilities moves at least."""
    return logits.numel() * (logits.element_size() + torch.float32.itemsize)


@triton.jit
def _probabilities(logits, stride, out, vocabulary, sharpness, min_p, BLOCK: tl.constexpr):  # noqa: ANN001, ANN202
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, BLOCK)
    top = tl.full([BLOCK], -float("inf"), tl.float32)
    for at in range(0, vocabulary, BLOCK):
        x = at + lanes
        value = tl.load(logits + row * stride + x, mask=x < vocabulary, other=-float("inf")).to(tl.float32)
        top = tl.maximum(top, value)
    best = tl.max(top, 0)
    total = tl.zeros([BLOCK], tl.float32)
    for at in range(0, vocabulary, BLOCK):
        x = at + lanes
        value = tl.load(logits + row * stride + x, mask=x < vocabulary, other=-float("inf")).to(tl.float32)
        weight = tl.exp((value - best) * sharpness)  # of the likeliest: 1
        total += tl.where(weight >= min_p, weight, 0.0)
    whole = tl.sum(total, 0)
    for at in range(0, vocabulary, BLOCK):
        x = at + lanes
        value = tl.load(logits + row * stride + x, mask=x < vocabulary, other=-float("inf")).to(tl.float32)
        weight = tl.exp((value - best) * sharpness)
        tl.store(out + row * vocabulary + x, tl.where(weight >= min_p, weight, 0.0) / whole, mask=x < vocabulary)
