"""A distribution over the vocabulary as it was sampled from: every probability, or the one token of a greedy target.

left.py holds what is left of it while children are tried.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class OneHot:
    """All probability at one token: the target's distribution at temperature 0."""

    token: int

    def prob(self, token: int) -> float:
        """1 at the token, 0 elsewhere."""
        return 1.0 if token == self.token else 0.0


@dataclass(frozen=True, eq=False)
class Dense:
    """`probs` float [V] sums to 1. It is the tensor really sampled from; it is never changed in place."""

    probs: Tensor

    def prob(self, token: int) -> float:
        """Probability of a token."""
        return float(self.probs[token])


Distribution = OneHot | Dense
