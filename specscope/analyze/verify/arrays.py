"""Arrays of many steps, end to end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Indices = NDArray[np.int64]


def join(arrays: Sequence[NDArray[Any]], dtype: type) -> NDArray[Any]:
    """Arrays one after the other."""
    return np.concatenate(arrays).astype(dtype) if arrays else np.zeros(0, dtype)


def stack(arrays: Sequence[NDArray[Any]], dtype: type) -> NDArray[Any]:
    """Arrays of [k, t] one below the other, t the largest: filled with tokens -1, or probabilities 0."""
    width = max((array.shape[1] for array in arrays), default=0)
    out = np.full((sum(len(array) for array in arrays), width), -1 if dtype is np.int64 else 0, dtype)
    for t in {array.shape[1] for array in arrays}:
        rows = np.repeat([array.shape[1] == t for array in arrays], [len(array) for array in arrays])
        out[rows, :t] = np.concatenate([array for array in arrays if array.shape[1] == t])
    return out


def levels(above: Indices) -> Indices:
    """How many steps up, by `above`, lead out of the array (-1): 1 for those at the top."""
    level, at = np.zeros(len(above), np.int64), np.arange(len(above))
    while (inside := at >= 0).any():
        level += inside
        at = np.where(inside, above[at], -1)
    return level
