"""How requests arrive: at a rate, whatever becomes of them, or so many at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Load:
    """One of the two."""

    rate: float | None = None  # requests a second, on average
    concurrency: int | None = None  # requests at once: the next one is sent when one is answered

    @property
    def name(self) -> str:
        """In words."""
        return f"rate {self.rate:g}/s" if self.rate is not None else f"concurrency {self.concurrency}"

    @property
    def size(self) -> float:
        """The number that a sweep varies."""
        return self.rate if self.rate is not None else float(self.concurrency or 0)


def arrivals(count: int, rate: float, burstiness: float, seed: int) -> Sequence[float]:
    """Seconds from the start at which requests are sent, so that `count` of them take count / rate seconds.

    The gaps have a gamma distribution with the shape `burstiness`: 1 is a Poisson process, less comes in bursts, more
    is evener. They are scaled so that the last request comes at count / rate, as in vLLM's bench: the rate is then
    the same for every seed.
    """
    gaps = np.random.default_rng(seed).gamma(burstiness, 1 / (rate * burstiness), count)
    at = np.cumsum(gaps)
    scaled: list[float] = (at * (count / rate / at[-1])).tolist()
    return scaled
