"""The batches of `python -m benchmarks scale`, and what was measured of each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from specscope.measure.paired import median_interval

BATCHES, CONTEXTS = (1, 2, 4, 8, 16, 32, 64), (128, 512, 1024, 2048, 4096, 7500)
SHORT, SHORTS, LONGS = 128, 7, (1024, 2048, 4096, 7500)  # tokens and number of the short ones of a mixed batch
OWN, PEER, VLLM = "specscope", "transformers", "vLLM"


@dataclass
class ScalePoint:
    """One batch: how long its requests' contexts are, and what was measured."""

    curve: str
    size: int  # where on the curve it lies
    lengths: Sequence[int]
    rates: dict[str, list[float]] = field(default_factory=dict)  # tokens/s by side and round
    context: float = 0.0  # seconds that the contexts add to a step
    reading: float = 0.0  # seconds that the keys and values of a step take to read

    @property
    def name(self) -> str:
        """In words."""
        if len(set(self.lengths)) > 1:
            return f"{SHORTS} x {self.lengths[0]:,} + {self.lengths[-1]:,}"
        return f"{len(self.lengths)} x {self.lengths[0]:,}"

    def ratios(self, side: str) -> list[float]:
        """Of this engine's tokens/s over a side's, by round."""
        return [own / other for own, other in zip(self.rates[OWN], self.rates[side], strict=True)]

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        others = [side for side in self.rates if side != OWN]
        return {
            "curve": self.curve,
            "size": self.size,
            "name": self.name,
            "lengths": list(self.lengths),
            "rates": {side: [round(rate, 2) for rate in rates] for side, rates in self.rates.items()},
            "ratios": {side: median(self.ratios(side)) for side in others},
            "intervals": {side: median_interval(self.ratios(side)) for side in others},
            "context_ms": self.context * 1e3,
            "reading_ms": self.reading * 1e3,
            "context_over_its_bytes": self.context / self.reading,
        }


def points(most: int) -> list[ScalePoint]:
    """Of all three curves, for contexts of up to `most` tokens."""
    short = min(SHORT, most)
    wanted = [ScalePoint("batch", batch, [short] * batch) for batch in BATCHES]
    wanted += [ScalePoint("context", context, [context]) for context in CONTEXTS if context <= most]
    return wanted + [ScalePoint("mixed", long, [short] * SHORTS + [long]) for long in LONGS if short < long <= most]
