"""Draws from rows of probabilities by the inverse of their cumulative sums, many rows at once and nothing read.

A cumulative sum over the whole vocabulary is slow, and most of it is never looked at. So a row is summed in blocks; the
block at which the sums pass the coin's share is found first, then the token within it. All sums are float64.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

BLOCK = 256  # tokens
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


def draw(rows: Tensor, coin: Tensor) -> Drawn:
    """One token a row. rows [F, V] of any float dtype, not negative, each with some mass; coin float64 [F] in (0, 1).

    A token of probability zero is never drawn.
    """
    sums = block_sums(rows)
    ends = sums.cumsum(1)
    whole = ends[:, -1:]
    # Rounding may take the largest coin to the end of the sum, behind which there is nothing.
    share = torch.minimum(coin[:, None] * whole, whole.nextafter(torch.zeros_like(whole)))
    block = torch.searchsorted(ends, share, right=True)
    before = torch.nn.functional.pad(ends, (1, 0)).gather(1, block)
    place = block * BLOCK + torch.arange(BLOCK, device=rows.device)
    inside = rows.gather(1, place.clamp(max=rows.shape[1] - 1)).double().masked_fill_(place >= rows.shape[1], 0)
    up_to = before + inside.cumsum(1)
    # The sums within may fall short of the block's by rounding: then it is the last token with any mass.
    last = (torch.arange(BLOCK, device=rows.device) * (inside > 0)).amax(1, keepdim=True)
    at = torch.minimum(torch.searchsorted(up_to, share, right=True), last)
    own, above = inside.gather(1, at), up_to.gather(1, at)
    margin = draw_margins(coin[:, None], (above - own) / whole, above / whole)
    return Drawn((block * BLOCK + at)[:, 0], (own / whole)[:, 0], margin[:, 0])


def draw_margins(coin: Tensor, below: Tensor, above: Tensor) -> Tensor:
    """How far each coin lies from the borders of (below, above), its token's part of the cumulative sum.

    The ends of the sum are no borders: nothing lies beyond them. 1 where there is no border.
    """
    ends = torch.stack([below, above])
    return torch.where((ends > SLACK) & (ends < 1 - SLACK), (coin - ends).abs(), 1.0).amin(0)
