"""What V2's sampler decides by: its coins, and what block verification accepts each draft of a chain by.

The coins are Triton's `tl.rand(seed, position)`, which is Philox 4x32 with ten rounds, here in numpy.

Block verification (Sun et al., 2024): the ratio of a prefix is the product of p / q of its drafts, never above 1 on
the way. A prefix is accepted with h = mass / (mass + 1 - ratio), where the mass is what p has beyond q, with p scaled
by the ratio, one position on.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specscope.trace.record.tree import Doubles, Floats
from specscope.vllm.call import Rows

LEAST = np.float32(4.6566127342e-10)  # 2^-31: one step of the coin, and vLLM's least coin
MULTIPLIERS = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
KEY_STEPS = np.uint64(0x9E3779B9), np.uint64(0xBB67AE85)
LOW, HALF = np.uint64(0xFFFFFFFF), np.uint64(32)


def ratios(rows: Rows, p: Tensor, q: Tensor | None, longest: int) -> Tensor:
    """[R] the ratio of the prefix that ends with each row's draft.

    `p`, `q` [R]: of the drafts; `longest`: the most drafts of a chain.
    """
    of_one = p if q is None else p / q
    place = torch.arange(len(p), device=p.device) - rows.first[rows.request]
    ratio = of_one.clamp_max(1)
    for position in range(1, longest):
        ratio = torch.where(place == position, (ratio.roll(1) * of_one).clamp_max(1), ratio)
    return ratio


def before(rows: Rows, ratio: Tensor) -> Tensor:
    """[R] the ratio of the prefix before each row: 1 at a request's first."""
    is_first = torch.arange(len(ratio), device=ratio.device) == rows.first[rows.request]
    return torch.where(is_first, 1, ratio.roll(1))


def masses(rows: Rows, scale: Tensor, step: int) -> Tensor:
    """[R] the mass that scaled p has beyond q at each row."""
    assert rows.probs is not None
    parts = []
    for low in range(0, len(scale), step):
        high = min(low + step, len(scale))
        left = rows.probs(low, high) * scale[low:high, None]
        if rows.q is not None:
            parts.append((left - rows.q(low, high)).clamp_min(0).sum(1))
        else:  # all of q is at the draft
            token = rows.tokens[low:high].clamp_min(0)[:, None]
            parts.append(left.scatter(1, token, 0).sum(1))
    return torch.cat(parts) if parts else scale


def thresholds(ratio: Doubles, mass: Doubles) -> Doubles:
    """[n] what each draft of a chain is accepted by: h, and the ratio itself where nothing follows."""
    h = ratio.copy()
    below = mass[1:] + 1 - ratio[:-1]
    h[:-1] = np.where(below <= 0, 1, mass[1:] / np.where(below > 0, below, 1))
    h[:-1][np.isnan(below)] = np.nan
    return h


def uniform(seeds: NDArray[np.int64], positions: NDArray[np.int64]) -> Floats:
    """[n] a coin in (0, 1] for each seed and position."""
    key, counter = seeds.astype(np.uint64), positions.astype(np.uint64)
    k0, k1 = key & LOW, key >> HALF
    c0, c1 = counter & LOW, counter >> HALF
    c2, c3 = np.zeros_like(c0), np.zeros_like(c0)
    for _ in range(10):
        a, b = MULTIPLIERS[0] * c0, MULTIPLIERS[1] * c2
        c0, c1, c2, c3 = (b >> HALF) ^ c1 ^ k0, b & LOW, (a >> HALF) ^ c3 ^ k1, a & LOW
        k0, k1 = (k0 + KEY_STEPS[0]) & LOW, (k1 + KEY_STEPS[1]) & LOW
    signed = c0.astype(np.uint32).view(np.int32)
    folded = np.where(signed < 0, -(signed + 1), signed).astype(np.float32)
    coins: Floats = np.maximum(folded * LEAST, LEAST)
    return coins


def of_step(seeds: NDArray[np.int64], step: NDArray[np.int64]) -> NDArray[np.int64]:
    """Since 0.33 block verification tosses each draft's coin with a seed of its own: vLLM's `spec_step_seed`."""
    return seeds ^ (step << 32)
