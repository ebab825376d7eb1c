"""Counter-based randomness: every coin is a pure function of what it decides.

A coin follows from (request seed, stream, position of the step's root in the request, draw number) by Philox
4x64 (Salmon et al. 2011, as numpy.random.Philox), so it does not matter who else is in the batch, whether the
request was preempted, or whether the step is run again.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np

from specscope.trace.tree import Doubles


class Stream(IntEnum):
    """Drafting and verifying never share a coin."""

    DRAFT = 0
    VERIFY = 1


def coins(seed: int, stream: Stream, position: int, count: int) -> Doubles:
    """Draws 0..count-1 at one position: float64 [count] in the open interval (0, 1).

    53 random bits k give (k + 1/2) / 2^53, which is never 0 (it would accept a token of probability zero) and,
    the largest k aside, below 1; that one is stepped down from 1 (it would overrun a cumulative sum).
    """
    generator = np.random.Philox(
        key=np.array([seed, stream], np.uint64), counter=np.array([0, position, 0, 0], np.uint64)
    )
    bits = generator.random_raw(count) >> np.uint64(11)
    uniform = (bits.astype(np.float64) + 0.5) * 2.0**-53
    return np.minimum(uniform, np.nextafter(1.0, 0.0))
