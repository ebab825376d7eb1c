"""Draws from rows of probabilities by the inverse of their cumulative sums; on a device, without a read.

A cumulative sum over the whole vocabulary is slow, and most of it is never looked at. So a row is summed in blocks:
the block at which the sums pass the coin's share is found first, then the token within it. All sums are float64. On a
device all rows are drawn from together; a processor is faster row by row, in numpy, than with as many operators.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specscope.kernels.tree_batch import put
from specscope.trace.record.tree import Doubles

SLACK = 1e-12  # of a sum of float64: so near to an end is at it
BLOCK = 256  # tokens
Figures = list[list[float]]  # [F][k]
Siblings = tuple[list[list[int]], Figures, Figures, Figures]  # tokens, and as Draw: probabilities, margins, lower ends
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


def draw(row: Tensor, coin: float) -> tuple[int, float, float]:
    """One token from a row [V] on the host, as Urn.draw: it, its probability, and the draw's margin."""
    return Urn(row.numpy(), block_sums(row[None])[0].numpy()).draw(coin)[:3]


def draw_margin(coin: float, below: float, above: float) -> float:
    """How far `coin` lies from the borders of (below, above), its token's part of the cumulative sum.

    The ends of the sum are no borders: nothing lies beyond them.
    """
    borders = [abs(coin - border) for border in (below, above) if SLACK < border < 1 - SLACK]
    return min(borders, default=1.0)


def draw_siblings(rows: Tensor, coins: Doubles) -> Siblings:
    """Tokens drawn from each row without replacement, and figures of each draw, as Draw has them.

    rows [F, V] of any float dtype, not negative; coins [F, k]. The probability is that in the row, whatever was drawn
    before; 0 from where on it has no further token to give. Margins and lower ends are of what was left, renormalised.
    A device is read once.
    """
    if rows.device.type == "cpu":
        return _on_host(rows, coins)
    tokens, probs, margins, lows = torch.stack(_on_device(rows, put(coins, rows.device))).cpu()
    return tokens.long().tolist(), probs.tolist(), margins.tolist(), lows.tolist()


def _on_host(rows: Tensor, coins: Doubles) -> Siblings:
    tokens = [[0] * coins.shape[1] for _ in coins]
    probs = [[0.0] * coins.shape[1] for _ in coins]
    margins = [[1.0] * coins.shape[1] for _ in coins]
    lows = [[0.0] * coins.shape[1] for _ in coins]
    each = zip(rows.numpy(), block_sums(rows).numpy(), coins.tolist(), tokens, probs, margins, lows, strict=True)
    for row, sums, row_coins, row_tokens, row_probs, row_margins, row_lows in each:
        urn = Urn(row, sums)
        for child, coin in enumerate(row_coins):
            token, share, margin, low, _ = urn.draw(coin)
            if share <= 0:
                break
            row_tokens[child], row_probs[child] = token, float(row[token])
            row_margins[child], row_lows[child] = margin, low
            if child + 1 < len(row_coins):
                urn.remove(token)
    return tokens, probs, margins, lows


def _on_device(rows: Tensor, coins: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As draw_siblings, all rows at once: float64 [F, k] each. coins float64 [F, k]. Nothing is read."""
    sums, lanes = block_sums(rows), torch.arange(BLOCK, device=rows.device)
    taken: list[Tensor] = []  # int64 [F, 1] each
    some, margins, lows = [], [], []

    def inside(block: Tensor) -> Tensor:
        """float64 [F, BLOCK] one block of each row [F, 1], 0 where nothing is any more."""
        place = block * BLOCK + lanes
        out = rows.gather(1, place.clamp(max=rows.shape[1] - 1)).double().masked_fill_(place >= rows.shape[1], 0)
        for token in taken:
            out.masked_fill_(place == token, 0)
        return out

    for coin in coins.split(1, dim=1):
        ends = sums.cumsum(1)
        some.append(ends[:, -1:] > 0)
        share = coin * BELOW_ONE * ends[:, -1:]
        block = torch.searchsorted(ends, share, right=True).clamp_(max=ends.shape[1] - 1)
        masses = inside(block)
        up_to = torch.nn.functional.pad(ends, (1, 0)).gather(1, block) + masses.cumsum(1)
        last = (lanes * (masses > 0)).amax(1, keepdim=True)  # where the sums within fall short by rounding
        column = torch.minimum(torch.searchsorted(up_to, share, right=True), last)
        above = up_to.gather(1, column)
        borders = (torch.cat([above - masses.gather(1, column), above], dim=1) / ends[:, -1:]).nan_to_num_(nan=0.0)
        margins.append(_margins(coin, borders))
        lows.append(borders[:, :1])
        taken.append(block * BLOCK + column)
        sums.scatter_(1, block, inside(block).sum(1, keepdim=True))
    tokens = torch.cat(taken, dim=1)
    probs = rows.gather(1, tokens).double() * torch.cat(some, dim=1)
    return tokens.double(), probs, torch.cat(margins, dim=1), torch.cat(lows, dim=1)


def _margins(coin: Tensor, borders: Tensor) -> Tensor:
    """draw_margin of each row: coin [F, 1], borders [F, 2]; float64 [F, 1]."""
    between = (borders > SLACK) & (borders < 1 - SLACK)
    return (coin - borders).abs().where(between, 1.0).amin(1, keepdim=True)
