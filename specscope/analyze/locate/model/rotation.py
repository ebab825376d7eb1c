"""Pairs of channels that are rotated: rotary positions off by a constant, scaled, left out, or of another base."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from specscope.analyze.locate.model.relations import MOST, Block, figure

BASES = (10000.0, 500000.0, 1000000.0, 100000.0, 150000.0, 1000.0, 5000000.0, 10000000.0)
FARTHEST = 4096  # the largest distance of positions that is looked for
LOOKED_AT = 64  # rows from which the rule is told


def rotated(block: Block) -> str:
    """In what way each pair of channels is rotated, by the same angle in each head; "" where it is not a rotation."""
    number, width = block.ours.shape
    size = width // block.heads
    positions = torch.tensor([row.position for row in block.rows[:LOOKED_AT]], dtype=torch.float64)
    for extent in (size, size // 2, size // 4):  # the first channels of each head that are rotated
        if extent < 4 or extent % 2 or number * extent * block.heads < 32:
            continue
        ours, right = (_complex(side, block.heads, extent) for side in (block.ours, block.right))
        cross = (ours * right.conj()).sum(1)  # [n, pairs]
        angles = torch.angle(cross)
        phrase = block.explained(_turned(block, right, angles))
        if not phrase or bool((angles.sin().abs() < 1e-3).all()):  # half a turn is a sign
            continue
        part = "" if extent == size else f" in the first {extent} channels of each head"
        rules = (words for words, by in _rules(positions, cross[:LOOKED_AT]) if _holds(block, right, by))
        if rule := next(rules, ""):
            return f"{rule}{part} {phrase}"
    return ""


def _complex(side: Tensor, heads: int, extent: int) -> Tensor:
    """[n, heads, pairs] a channel of each half; in double precision, for angles are small."""
    return torch.complex(*side.reshape(len(side), heads, -1)[..., :extent].double().chunk(2, -1))


def _turned(block: Block, right: Tensor, angles: Tensor) -> Tensor:
    """[n, w] the first n right values, their pairs turned by angles [n, pairs]."""
    turned = torch.polar(torch.ones_like(angles), angles)[:, None] * right[: len(angles)]
    whole = block.right[: len(angles)].reshape(*turned.shape[:2], -1).clone()
    whole[..., : 2 * turned.shape[2]] = torch.cat([turned.real, turned.imag], -1).float()
    return whole.flatten(1)


def _holds(block: Block, right: Tensor, angles: Tensor) -> bool:
    """Whether angles [LOOKED_AT, pairs] give nearly all of these rows."""
    off = (block.ours[: len(angles)] - _turned(block, right, angles)).norm(dim=1)
    return float((off <= block.tolerance[: len(angles)]).float().mean()) >= MOST


def _rules(positions: Tensor, cross: Tensor) -> Iterator[tuple[str, Tensor]]:
    """What may have turned the pairs, in words, and by which angles.

    Rotary of base b turns pair k of position p by p b^(-k / pairs). Where the turn grows with the position, the
    logarithm of the whole growth over rotary's own is a line in k: level where all angles are scaled, through 0 where
    they are of another base.
    """
    count = cross.shape[1]
    numbers, growth = torch.arange(count, dtype=torch.float64), _growth(positions, cross)
    speeds = {base: base ** (-numbers / count) for base in BASES}
    for base, own in speeds.items():
        yield f"no rotary is applied (base {base:g})", -positions[:, None] * own
        clear = growth.abs() * positions.max() > 1e-2
        left = ((own + growth) / own)[clear]
        if len(left) < 2 or bool((left <= 0).any()):
            continue
        line, x = left.log(), numbers[clear]
        slope = float(((x - x.mean()) * (line - line.mean())).sum() / (x - x.mean()).pow(2).sum())
        scale, other = math.exp(line.mean() - slope * x.mean()), base * math.exp(-slope * count)
        yield f"rotary angles are scaled by {figure(scale)} (base {base:g})", positions[:, None] * (scale - 1) * own
        usual = min(BASES, key=lambda known: abs(known / other - 1))
        other = usual if abs(usual / other - 1) < 0.03 else other
        by = positions[:, None] * (other ** (-numbers / count) - own)
        yield f"rotary of base {float(f'{other:.3g}'):g} instead of {base:g}", by
    for base, own in speeds.items():  # as at other positions, each row for itself
        turns = -own[:, None] * torch.arange(-FARTHEST, FARTHEST + 1, dtype=torch.float64)
        back = torch.polar(torch.ones_like(turns), turns).to(torch.complex64)
        away = (cross.to(torch.complex64) @ back).real.argmax(1) - FARTHEST
        side = "after" if away[0] > 0 else "before"
        same = f"rotary of the position {abs(int(away[0]))} {side} (base {base:g})"
        yield same if bool((away == away[0]).all()) else "rotary of other positions", away[:, None] * own


def _growth(positions: Tensor, cross: Tensor) -> Tensor:
    """[pairs] by how much the angle of each pair grows from one position to the next; 0 without neighbours."""
    order = positions.argsort(stable=True)
    neighbours = positions[order].diff() == 1
    if int(neighbours.sum()) < 2:
        return torch.zeros(cross.shape[1], dtype=torch.float64)
    unit = cross / cross.abs().clamp_min(1e-30)
    growth = torch.angle((unit[order][1:] * unit[order][:-1].conj())[neighbours].sum(0))
    # the growth over one position is known to few digits: those over all positions say the rest
    rest = torch.angle(unit * torch.polar(torch.ones_like(cross.real), -positions[:, None] * growth))
    middle = positions - positions.mean()
    more: Tensor = (middle[:, None] * (rest - rest.mean(0))).sum(0) / middle.pow(2).sum().clamp_min(1e-30)
    return growth + more
