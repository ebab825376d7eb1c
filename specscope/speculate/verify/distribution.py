"""A distribution over the vocabulary as it was sampled from, and what is left of it while children are tried."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from specscope.speculate.draws import draw
from specscope.trace.record.notes import spread


class DrafterRow:
    """What is left of q at a node while its children are tried."""

    def __init__(self, row: Tensor) -> None:
        self.row = row

    def without(self, token: int) -> DrafterRow:
        """The token zeroed and the rest renormalised; unchanged where nothing else has mass."""
        row = self.row.clone()
        row[token] = 0
        mass = float(row.sum())
        return DrafterRow(row.div_(mass)) if mass > 0 else self


@dataclass(frozen=True)
class Chosen:
    """A greedy target: all of p is at one token, and stays there."""

    token: int

    def prob(self, token: int) -> float:
        """1 at the token, 0 elsewhere."""
        return 1.0 if token == self.token else 0.0

    def reject(self, token: int, q: DrafterRow | None, scale: float = 1.0) -> tuple[Chosen, float]:
        """What is left, and the mass that it had before it was renormalised. `scale`: of p."""
        taken = scale * self.prob(token) if q is None else float(q.row[self.token])
        return self, max(scale - taken, 0.0)

    def figures(self) -> tuple[float, float]:
        """Its entropy and its largest probability."""
        return 0.0, 1.0

    def draw(self, coin: float) -> tuple[int, float, float]:
        """The token, whatever the coin; its probability, and the draw's margin."""
        return self.token, 1.0, 1.0


class Residual:
    """What is left of p [V] at a node while its children are tried. Its row is never changed in place."""

    def __init__(self, row: Tensor) -> None:
        self.row = row

    def prob(self, token: int) -> float:
        """Probability of a token, after renormalising."""
        return float(self.row[token])

    def reject(self, token: int, q: DrafterRow | None, scale: float = 1.0) -> tuple[Residual, float]:
        """What is left, and the mass that it had before it was renormalised; all of it where that would be nothing.

        `scale`: of p, by the ratio of the path where that counts.
        """
        left = self.row.clone() if scale == 1 else self.row * scale
        if q is None:
            left[token] = 0
        else:
            left = left.sub_(q.row).clamp_(min=0)
        mass = float(left.sum())
        return (Residual(left.div_(mass)) if mass > 0 else self), mass

    def figures(self) -> tuple[float, float]:
        """Its entropy and its largest probability, both as float32: so the evidence holds them."""
        row = self.row.numpy()
        return float(np.float32(spread(row)[0])), float(np.float32(row.max()))

    def draw(self, coin: float) -> tuple[int, float, float]:
        """The token at which the cumulative sum passes the coin, its probability, and the draw's margin."""
        return draw(self.row, coin)


Left = Chosen | Residual


def rejected(
    p: Left, q: DrafterRow | None, token: int, *, gone: bool, scale: float = 1.0
) -> tuple[Left, DrafterRow | None, float]:
    """What is left of p and of q after a child was rejected, and the residual's mass before it was renormalised.

    `gone`: whether the child's token leaves q: it was drawn without replacement, and a sibling follows. `scale`: of p.
    """
    left, mass = p.reject(token, q, scale)
    return left, q.without(token) if gone and q is not None else q, mass
