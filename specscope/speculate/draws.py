"""Draws from rows of probabilities by the inverse of their cumulative sums, many rows at once and nothing read.

A cumulative sum over the whole vocabulary is slow, and most of it is never looked at. So a row is summed in blocks; the
block at which the sums pass the coin's share is found first, then the token within it. All sums are float64.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

BLOCK = 256  # tokens
BELOW_ONE = 1 - 2.0**-52  # keeps the largest coin's share of a sum below the sum, whatever is rounded
SLACK = 1e-12  # of a sum of float64: so near to an end is at it


@dataclass(frozen=True)
class Drawn:
    """What coins drew from F rows."""

    token: Tensor  # int64 [F]
    prob: Tensor  # float64 [F] the token's share of its row
    margin: Tensor  # float64 [F] how far the cumulative sum would have to move for another token; 1 where none has mass


def block_sums(rows: Tensor) -> Tensor:
    """Sums over each BLOCK tokens of [F, V]: float64 [F, V / BLOCK, rounded up]."""
    whole = rows.shape[1] // BLOCK * BLOCK
    sums: Tensor = rows[:, :whole].unflatten(1, (-1, BLOCK)).sum(-1, dtype=torch.float64)
    if whole == rows.shape[1]:
        return sums
    return torch.cat([sums, rows[:, whole:].sum(-1, keepdim=True, dtype=torch.float64)], dim=1)


class Urn:
    """F rows of probabilities to draw from, with or without putting back what was drawn. The rows are never changed."""

    def __init__(self, rows: Tensor) -> None:
        """rows [F, V] of any float dtype, not negative."""
        self.rows = rows
        self.taken: list[Tensor] = []  # int64 [F, 1] each: tokens that are no longer in it
        self._sums = block_sums(rows)
        self._lanes = torch.arange(BLOCK, device=rows.device)

    def draw(self, coin: Tensor) -> Place:
        """One token a row; coin float64 [F, 1] in (0, 1). Never one of probability zero, where the row has any mass."""
        ends = self._sums.cumsum(1)
        whole = ends[:, -1:]
        share = coin * BELOW_ONE * whole
        block = torch.searchsorted(ends, share, right=True).clamp_(max=ends.shape[1] - 1)
        inside = self._inside(block)
        up_to = torch.nn.functional.pad(ends, (1, 0)).gather(1, block) + inside.cumsum(1)
        # The sums within may fall short of the block's by rounding: then it is the last token with any mass.
        last = (self._lanes * (inside > 0)).amax(1, keepdim=True)
        at = torch.minimum(torch.searchsorted(up_to, share, right=True), last)
        return Place(block * BLOCK + at, whole, at, inside, up_to)

    def remove(self, token: Tensor) -> None:
        """Take a token [F, 1] out of each row; of the rest each keeps its share."""
        self.taken.append(token)
        block = token // BLOCK
        self._sums.scatter_(1, block, self._inside(block).sum(1, keepdim=True))

    def _inside(self, block: Tensor) -> Tensor:
        """float64 [F, BLOCK] one block of each row [F, 1], 0 where nothing is any more."""
        place, vocabulary = block * BLOCK + self._lanes, self.rows.shape[1]
        if vocabulary % BLOCK == 0:
            inside = self.rows.gather(1, place).double()
        else:
            inside = self.rows.gather(1, place.clamp(max=vocabulary - 1)).double()
            inside.masked_fill_(place >= vocabulary, 0)
        for token in self.taken:
            inside.masked_fill_(place == token, 0)
        return inside


@dataclass(frozen=True)
class Place:
    """Where coins came to lie in F rows."""

    token: Tensor  # int64 [F, 1]
    whole: Tensor  # float64 [F, 1] the row's sum
    at: Tensor  # int64 [F, 1] the token's place in its block
    inside: Tensor  # float64 [F, BLOCK] the block
    up_to: Tensor  # float64 [F, BLOCK] the row's cumulative sum there


def draw(rows: Tensor, coin: Tensor) -> Drawn:
    """One token a row. rows [F, V], not negative, of any float dtype, each with mass; coin float64 [F] in (0, 1)."""
    coin = coin[:, None]
    place = Urn(rows).draw(coin)
    own, above = place.inside.gather(1, place.at), place.up_to.gather(1, place.at)
    margin = draw_margins(coin, (above - own) / place.whole, above / place.whole)
    return Drawn(place.token[:, 0], (own / place.whole)[:, 0], margin[:, 0])


def draw_siblings(rows: Tensor, coins: Tensor) -> tuple[Tensor, Tensor]:
    """Tokens drawn from each row without replacement, int64 [F, k], and their probabilities in it, float64 [F, k].

    coins float64 [F, k]. The probability is 0 from where on the row has no further token to give.
    """
    urn = Urn(rows)
    places: list[Place] = []
    for coin in coins.split(1, dim=1):
        if places:
            urn.remove(places[-1].token)
        places.append(urn.draw(coin))
    tokens = torch.cat([place.token for place in places], dim=1)
    some = torch.cat([place.whole for place in places], dim=1) > 0
    return tokens, rows.gather(1, tokens).double() * some


def draw_margins(coin: Tensor, below: Tensor, above: Tensor) -> Tensor:
    """How far each coin lies from the borders of (below, above), its token's part of the cumulative sum.

    The ends of the sum are no borders: nothing lies beyond them. 1 where there is no border.
    """
    ends = torch.stack([below, above])
    return torch.where((ends > SLACK) & (ends < 1 - SLACK), (coin - ends).abs(), 1.0).amin(0)
