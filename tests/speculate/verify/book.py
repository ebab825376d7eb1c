"""The algebra of verification by the book, apart from the engine's: each operation gives a new distribution."""

from dataclasses import dataclass

import torch
from torch import Tensor

from specscope.speculate.draws import draw_margin


@dataclass(frozen=True)
class OneHot:
    """All probability at one token: the target's distribution at temperature 0."""

    token: int

    def prob(self, token):
        return 1.0 if token == self.token else 0.0


@dataclass(frozen=True, eq=False)
class Dense:
    """`probs` float [V] sums to 1."""

    probs: Tensor

    def prob(self, token):
        return float(self.probs[token])


Distribution = OneHot | Dense


def dense(rows):
    """The drafter's rows by node, as the engine has them: tensors [V]."""
    return {node: Dense(row) for node, row in rows.items()}


def without(p, token):
    """(The token zeroed and the rest renormalised, the mass before it was); unchanged where nothing else has mass."""
    if isinstance(p, OneHot):
        return p, 1.0 - p.prob(token)
    left = p.probs.clone()
    left[token] = 0
    return renormalised(p, left)


def residual(p, q):
    """(norm(max(p - q, 0)), the mass before it was); p itself where p <= q everywhere by rounding, never NaN."""
    if isinstance(p, OneHot):
        return p, max(1.0 - q.prob(p.token), 0.0)
    return renormalised(p, (p.probs - q.probs).clamp_(min=0))


def renormalised(p, left):
    mass = float(left.sum())
    return (Dense(left / mass), mass) if mass > 0 else (p, mass)


def draw(p, coin):
    """(The token at which the cumulative sum passes `coin`, in float64, the draw's margin)."""
    if isinstance(p, OneHot):
        return p.token, 1.0
    total = p.probs.double().cumsum(0)
    whole = float(total[-1])
    token = int(torch.searchsorted(total, coin * whole, right=True))
    if token == len(total):
        token = int(p.probs.nonzero()[-1])
    below, above = float(total[token]) - float(p.probs[token]), float(total[token])
    return token, draw_margin(coin, below / whole, above / whole)
