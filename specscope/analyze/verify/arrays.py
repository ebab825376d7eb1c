"""Numbers over all nodes of many steps, and how they hang together."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Indices = NDArray[np.int64]


def levels(above: Indices) -> Indices:
    """How many steps up, by `above`, lead out of the array (-1): 1 for those at the top."""
    level, at = np.zeros(len(above), np.int64), np.arange(len(above))
    while (inside := at >= 0).any():
        level += inside
        at = np.where(inside, above[at], -1)
    return level
