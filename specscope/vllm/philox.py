"""The coins of vLLM's V2 runner: Triton's `tl.rand(seed, position)`, which is Philox 4x32 with ten rounds, in numpy."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from specscope.trace.record.tree import Floats

LEAST = np.float32(4.6566127342e-10)  # 2^-31: one step of the coin, and vLLM's least coin
MULTIPLIERS = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
KEY_STEPS = np.uint64(0x9E3779B9), np.uint64(0xBB67AE85)
LOW, HALF = np.uint64(0xFFFFFFFF), np.uint64(32)


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
    """Block verification tosses each draft's coin with a seed of its own: vLLM's `spec_step_seed`."""
    return seeds ^ (step << 32)
