"""A distribution over the vocabulary as it was sampled from, what is left of it while children are tried, and draws.

A draw is by the inverse of the cumulative sum. Over the whole vocabulary that sum is slow, and most of it is never
looked at. So a row is summed in blocks: the block at which the sums pass the coin's share is found first, then the
token within it. All sums are float64.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specscope.trace.record.notes import spread
from specscope.trace.record.tree import Doubles

SLACK = 1e-12  # of a sum of float64: so near to an end is at it
BLOCK = 256  # tokens
BELOW_ONE = 1 - 2.0**-52  # keeps the largest coin's share of a sum below the sum, whatever is rounded


class Draw(NamedTuple):
    """A token drawn by a coin: that which has the coin in its interval of the cumulative sum, as a share of the sum."""

    token: int
    prob: float  # its probability; 0 where there was nothing to draw
    margin: float  # draw_margin
    low: float  # the lower end of its interval
    coin: float


def block_sums(rows: Tensor) -> Tensor:
    """Sums over each BLOCK tokens of [F, V]: float64 [F, V / BLOCK, rounded up]."""
    whole = rows.shape[1] // BLOCK * BLOCK
    sums: Tensor = rows[:, :whole].unflatten(1, (-1, BLOCK)).sum(-1, dtype=torch.float64)
    if whole == rows.shape[1]:
        return sums
    return torch.cat([sums, rows[:, whole:].sum(-1, keepdim=True, dtype=torch.float64)], dim=1)


class Urn:
    """A row of probabilities on the host, to draw from with or without putting back. The row is never changed."""

    def __init__(self, row: NDArray[Any], sums: Doubles) -> None:
        """row [V] of any float dtype, not negative; sums: its block sums, which change as tokens are taken out."""
        self.row, self.sums = row, sums
        self.taken: list[int] = []

    def draw(self, coin: float) -> Draw:
        """The token at which the cumulative sum passes `coin`, in (0, 1); its probability is its share of the sum.

        Never one of probability zero, but where nothing is left.
        """
        ends = self.sums.cumsum()
        whole = float(ends[-1])
        if whole <= 0:
            return Draw(0, 0.0, 1.0, 0.0, coin)
        share = coin * BELOW_ONE * whole
        block = int(ends.searchsorted(share, "right"))
        inside = self._inside(block)
        before = float(ends[block - 1]) if block else 0.0
        up_to = inside.cumsum() + before
        place = int(up_to.searchsorted(share, "right"))
        if place == len(up_to):  # the sums within fall short of the block's by rounding
            place = int(inside.nonzero()[0][-1])
        mass, above = float(inside[place]), float(up_to[place])
        low = (above - mass) / whole
        return Draw(block * BLOCK + place, mass / whole, draw_margin(coin, low, above / whole), low, coin)

    def remove(self, token: int) -> None:
        """Take a token out; of the rest each keeps its share."""
        self.taken.append(token)
        self.sums[token // BLOCK] = self._inside(token // BLOCK).sum()

    def _inside(self, block: int) -> Doubles:
        """A block's probabilities, 0 where nothing is any more."""
        inside = self.row[block * BLOCK : (block + 1) * BLOCK].astype(np.float64)
        for token in self.taken:
            if token // BLOCK == block:
                inside[token % BLOCK] = 0
        return inside


def draw_margin(coin: float, below: float, above: float) -> float:
    """How far `coin` lies from the borders of (below, above), its token's part of the cumulative sum.

    The ends of the sum are no borders: nothing lies beyond them.
    """
    borders = [abs(coin - border) for border in (below, above) if SLACK < border < 1 - SLACK]
    return min(borders, default=1.0)


def draw_siblings(rows: Tensor, coins: Sequence[Sequence[float]]) -> list[list[Draw]]:
    """Tokens drawn from each row without replacement, one by each of its coins, as far as it has tokens to give.

    rows [F, V] of any float dtype, not negative. The probability of a draw is that in the row, whatever was drawn
    before; margin and lower end are of what was left, renormalised. A device is read once.
    """
    rows = rows.cpu()
    drawn: list[list[Draw]] = []
    for row, sums, own in zip(rows.numpy(), block_sums(rows).numpy(), coins, strict=True):
        urn, draws = Urn(row, sums), list[Draw]()
        for coin in own:
            one = urn.draw(coin)
            if one.prob <= 0:
                break
            draws.append(one._replace(prob=float(row[one.token])))
            if len(draws) < len(own):
                urn.remove(one.token)
        drawn.append(draws)
    return drawn


def without(q: Tensor, token: int) -> Tensor:
    """q [V] with the token zeroed and the rest renormalised; unchanged where nothing else has mass."""
    row = q.clone()
    row[token] = 0
    mass = float(row.sum())
    return row.div_(mass) if mass > 0 else q


@dataclass(frozen=True)
class Chosen:
    """A greedy target: all of p is at one token, and stays there."""

    token: int

    def prob(self, token: int) -> float:
        return 1.0 if token == self.token else 0.0

    def reject(self, token: int, q: Tensor | None, scale: float = 1.0) -> tuple[Chosen, float]:
        """What is left, and the mass that it had before it was renormalised. `scale`: of p."""
        taken = scale * self.prob(token) if q is None else float(q[self.token])
        return self, max(scale - taken, 0.0)

    def figures(self) -> tuple[float, float]:
        return 0.0, 1.0

    def draw(self, coin: float) -> tuple[int, float, float]:
        return self.token, 1.0, 1.0


class Residual:
    """What is left of p [V] at a node while its children are tried. Its row is never changed in place."""

    def __init__(self, row: Tensor) -> None:
        self.row = row

    def prob(self, token: int) -> float:
        return float(self.row[token])

    def reject(self, token: int, q: Tensor | None, scale: float = 1.0) -> tuple[Residual, float]:
        """What is left, and the mass that it had before it was renormalised; all of it where that would be nothing.

        `scale`: of p, by the ratio of the path where that counts.
        """
        left = self.row.clone() if scale == 1 else self.row * scale
        if q is None:
            left[token] = 0
        else:
            left = left.sub_(q).clamp_(min=0)
        mass = float(left.sum())
        return (Residual(left.div_(mass)) if mass > 0 else self), mass

    def figures(self) -> tuple[float, float]:
        """Its entropy and its largest probability, both as float32: so the evidence holds them."""
        row = self.row.numpy()
        return float(np.float32(spread(row)[0])), float(np.float32(row.max()))

    def draw(self, coin: float) -> tuple[int, float, float]:
        return Urn(self.row.numpy(), block_sums(self.row[None])[0].numpy()).draw(coin)[:3]


Left = Chosen | Residual


def rejected(
    p: Left, q: Tensor | None, token: int, *, gone: bool, scale: float = 1.0
) -> tuple[Left, Tensor | None, float]:
    """What is left of p and of q after a child was rejected, and the residual's mass before it was renormalised.

    `gone`: whether the child's token leaves q: it was drawn without replacement, and a sibling follows. `scale`: of p.
    """
    left, mass = p.reject(token, q, scale)
    return left, without(q, token) if gone and q is not None else q, mass
