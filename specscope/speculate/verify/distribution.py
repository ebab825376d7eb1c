"""Distributions over the vocabulary, with the few operations that verification needs.

Two kinds behave alike: Dense holds every probability; Point is one-hot (greedy) and costs nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

SLACK = 1e-12  # of a sum of float64: so near to an end is at it


class Distribution(Protocol):
    """A distribution over token ids. Immutable: every operation gives a new one."""

    def prob(self, token: int) -> float:
        """Probability of a token."""

    def without(self, token: int) -> tuple[Distribution, float]:
        """The token's probability zeroed and the rest renormalised; with the mass before renormalising."""

    def residual(self, other: Dense) -> tuple[Distribution, float]:
        """norm(max(self - other, 0)), with the mass before renormalising."""

    def draw(self, coin: float) -> tuple[int, float]:
        """The token at which the cumulative sum passes `coin`, in (0, 1), and the draw's margin.

        The margin is how far the cumulative sum would have to move for another token; 1 where no other has mass.
        """


@dataclass(frozen=True)
class Point:
    """All probability at one token: the target's distribution at temperature 0."""

    token: int

    def prob(self, token: int) -> float:
        """1 at the token, 0 elsewhere."""
        return 1.0 if token == self.token else 0.0

    def without(self, token: int) -> tuple[Distribution, float]:
        """Unchanged: another token had probability zero here, and without the one nothing would be left."""
        return self, 1.0 - self.prob(token)

    def residual(self, other: Dense) -> tuple[Distribution, float]:
        """Unchanged but for its mass: what is left over lies at the one token."""
        return self, max(1.0 - other.prob(self.token), 0.0)

    def draw(self, coin: float) -> tuple[int, float]:
        """The token, whatever the coin."""
        return self.token, 1.0


@dataclass(frozen=True, eq=False)
class Dense:
    """`probs` float [V] sums to 1. It is the tensor really sampled from; it is never changed in place."""

    probs: Tensor

    def prob(self, token: int) -> float:
        """Probability of a token."""
        return float(self.probs[token])

    def without(self, token: int) -> tuple[Dense, float]:
        """The token zeroed and the rest renormalised; unchanged where nothing else has mass."""
        left = self.probs.clone()
        left[token] = 0
        return self._renormalise(left)

    def residual(self, other: Dense) -> tuple[Dense, float]:
        """norm(max(p - q, 0)); where p <= q everywhere by rounding, p itself: never NaN."""
        return self._renormalise((self.probs - other.probs).clamp_(min=0))

    def _renormalise(self, left: Tensor) -> tuple[Dense, float]:
        mass = float(left.sum())
        return (Dense(left / mass), mass) if mass > 0 else (self, mass)

    def draw(self, coin: float) -> tuple[int, float]:
        """Inverse of the cumulative sum, in float64. A token of probability zero is never drawn."""
        total = self.probs.double().cumsum(0)
        whole = float(total[-1])
        token = int(torch.searchsorted(total, coin * whole, right=True))
        if token == len(total):
            token = int(self.probs.nonzero()[-1])
        below, above = float(total[token]) - float(self.probs[token]), float(total[token])
        return token, draw_margin(coin, below / whole, above / whole)


def draw_margin(coin: float, below: float, above: float) -> float:
    """How far `coin` lies from the borders of (below, above), its token's part of the cumulative sum.

    The ends of the sum are no borders: nothing lies beyond them.
    """
    borders = [abs(coin - border) for border in (below, above) if SLACK < border < 1 - SLACK]
    return min(borders, default=1.0)
