"""The algebra of verification by the book, apart from the engine's: each operation gives a new distribution."""

import torch

from specscope.speculate.draws import draw_margin
from specscope.speculate.verify.distribution import Dense, OneHot


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
