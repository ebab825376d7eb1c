"""A curve: how long a piece of work takes at growing sizes, and the exponent fitted to it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

ROUNDS = 5  # over all sizes of a curve, so that what else the machine does hits all alike
REPEATS = 4  # of the work in a round; the least time counts


@dataclass(frozen=True)
class Curve:
    """One row: what is measured at each size."""

    name: str
    unit: str  # what a size counts
    sizes: Sequence[int]
    seconds: Callable[[int], float]
    most: float = 1.3  # the exponent that is wanted, at most: linear, with room for what caches do


def best(work: Callable[[], object]) -> float:
    """The least seconds of a few runs."""
    least = math.inf
    for _ in range(REPEATS):
        start = time.perf_counter()
        work()
        least = min(least, time.perf_counter() - start)
    return least


def exponent(sizes: Sequence[int], seconds: Sequence[float]) -> float:
    """k of seconds = c * size^k, by least squares of the logarithms."""
    return float(np.polyfit(np.log(sizes), np.log(seconds), 1)[0])


def measure(curve: Curve) -> list[float]:
    """Seconds at each size, the least over all rounds."""
    rounds = [[curve.seconds(size) for size in curve.sizes] for _ in range(ROUNDS)]
    return [min(column) for column in zip(*rounds, strict=True)]
