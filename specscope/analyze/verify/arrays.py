"""Numbers over all nodes of many steps, and how they hang together."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from specscope.trace.record.tree import Ints

Indices = NDArray[np.int64]


def levels(above: Indices) -> Indices:
    """How many steps up, by `above`, lead out of the array (-1): 1 for those at the top."""
    level, at = np.zeros(len(above), np.int64), np.arange(len(above))
    while (inside := at >= 0).any():
        level += inside
        at = np.where(inside, above[at], -1)
    return level


def places(sorted_keys: NDArray[np.generic]) -> Ints:
    """The place of each element among those that equal it, in an array where equal ones lie together."""
    n = len(sorted_keys)
    new = np.ones(n, np.bool_)
    new[1:] = sorted_keys[1:] != sorted_keys[:-1]
    at = np.arange(n)
    return (at - np.maximum.accumulate(np.where(new, at, 0))).astype(np.int32)
