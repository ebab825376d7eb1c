"""Pairs of channels that are rotated: rotary positions off by a constant, scaled, left out, or of another base."""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor

from specscope.analyze.locate.model.block import MOST, Block, figure

BASES = (10000.0, 500000.0, 1000000.0, 100000.0, 150000.0, 1000.0, 5000000.0, 10000000.0)
FARTHEST = 4096  # the largest distance of positions that is looked for
SAMPLED = 32  # rows for which it is
OF_ITS_OWN = "each pair of channels is rotated by an angle of its own, the same in each head"


def rotated(block: Block) -> str:
    """In what way each pair of channels is rotated, by the same angle in each head; "" where it is not a rotation."""
    number, width = block.ours.shape
    if width % block.heads or width // block.heads != block.size:
        return ""
    for size in _sizes(block):
        pairs = size // 2
        if pairs < 2 or number * pairs * block.heads < 16:
            continue
        for halves in (True, False):
            ours, right = (_complex(side, block, size, halves) for side in (block.ours, block.right))
            cross = (ours * right.conj()).sum(1)  # [n, pairs]
            angles = torch.angle(cross)
            phrase = block.counted(_explained(block, ours, right, angles))
            if not phrase or bool((angles.sin().abs() < 1e-3).all()):  # half a turn is a sign
                continue
            layout = "" if halves else " (pairs of neighbours)"
            part = "" if size == block.size else f" in the first {size} channels of each head"
            rule = _rule(block, ours, right, cross)
            if rule or block.heads > 1:  # of one head angles of its own would explain any order of two channels
                return f"{rule or OF_ITS_OWN}{part}{layout} {phrase}"
    return ""


def _sizes(block: Block) -> tuple[int, ...]:
    """The rotated channels of a head: all, or as many as differ."""
    size = block.size
    difference = (block.ours - block.right).reshape(-1, size).norm(dim=0)
    differing = (difference > 1e-4 * difference.max()).nonzero()[:, 0]
    extent = int(differing[-1]) + 1 if len(differing) else size
    extent += extent % 2
    return (size, extent) if extent < size else (size,)


def _complex(side: Tensor, block: Block, size: int, halves: bool) -> Tensor:
    """[n, heads, pairs] the pairs as complex numbers; in double precision, for angles are small."""
    of_heads = side.reshape(len(side), block.heads, block.size)[..., :size].double()
    if halves:
        return torch.complex(of_heads[..., : size // 2], of_heads[..., size // 2 :])
    return torch.complex(of_heads[..., 0::2], of_heads[..., 1::2])


def _explained(block: Block, ours: Tensor, right: Tensor, angles: Tensor) -> int:
    """How many rows a rotation by angles [n, pairs] explains, the channels that are not rotated included."""
    predicted = torch.polar(torch.ones_like(angles), angles)[:, None] * right
    errors = (ours - predicted).abs().pow(2).sum((1, 2))
    size = 2 * ours.shape[-1]
    beside = (block.ours - block.right).reshape(len(ours), block.heads, -1)[..., size:]
    return int(((errors + beside.pow(2).sum((1, 2))).sqrt() <= block.tolerance).sum())


def _rule(block: Block, ours: Tensor, right: Tensor, cross: Tensor) -> str:
    positions = torch.tensor([row.position for row in block.rows], dtype=torch.float64)
    number = len(positions)
    speeds = _speeds(positions, cross)
    if speeds is not None and _explained(block, ours, right, positions[:, None] * speeds) >= MOST * number:
        return _grown(speeds, positions)
    distances, base = _distances(block, ours, right, cross)
    if distances is None:
        grown = speeds is not None and _linear(cross, positions, speeds)
        return OF_ITS_OWN.replace("an angle of its own", "angles that grow with the position") if grown else ""
    if bool((distances == distances[0]).all()):
        side = "after" if distances[0] > 0 else "before"
        return f"rotary as of the position {abs(int(distances[0]))} {side} (base {base:g})"
    sampled = positions[_sample(number)]
    if bool((distances == -sampled).all()):
        return f"no rotary is applied (base {base:g})"
    examples = [
        f"position {int(position)} as {int(position + distance)}"
        for position, distance in zip(sampled.tolist(), distances.tolist(), strict=True)
    ]
    return f"rotary as of other positions ({', '.join(examples[:3])}{', ...' if len(examples) > 3 else ''})"


def _speeds(positions: Tensor, cross: Tensor) -> Tensor | None:
    """[pairs] by how much the angle of each pair grows from one position to the next; None without neighbours."""
    order = positions.argsort(stable=True)
    neighbours = (positions[order][1:] - positions[order][:-1]) == 1
    if int(neighbours.sum()) < 2:
        return None
    unit = cross / cross.abs().clamp_min(1e-30)
    step = (unit[order][1:] * unit[order][:-1].conj())[neighbours].sum(0)
    speeds = torch.angle(step)
    # the growth over one position is known to few digits: those over all positions say the rest
    rest = torch.angle(unit * torch.polar(torch.ones_like(cross.real), -positions[:, None] * speeds))
    middle = positions - positions.mean()
    more: Tensor = (middle[:, None] * (rest - rest.mean(0))).sum(0) / middle.pow(2).sum().clamp_min(1e-30)
    return speeds + more


def _linear(cross: Tensor, positions: Tensor, speeds: Tensor) -> bool:
    """Whether what is left once the growth is taken off is the same at each row, and the growth is not nothing."""
    unit = cross / cross.abs().clamp_min(1e-30)
    rest = unit * torch.polar(torch.ones_like(cross.real), -positions[:, None] * speeds)
    span = float(positions.max() - positions.min())
    return bool((rest.mean(0).abs() > 0.999).all()) and float(speeds.abs().max()) * span > 0.05


def _grown(speeds: Tensor, positions: Tensor) -> str:
    """The words of angles that are the position times a speed: what is left of rotary's own, and of which base that is.

    Rotary of base b has the speed b^(-k / pairs) in pair k. Whatever is added to it, the logarithm of the whole over it
    is a line in k for the right b: level where all angles are scaled, through 0 where they are of another base.
    """
    pairs = len(speeds)
    numbers = torch.arange(pairs, dtype=torch.float64)
    clear = speeds.abs() * positions.max() > 1e-2
    for base in BASES if int(clear.sum()) >= 2 else ():
        own = base ** (-numbers / pairs)
        left = ((own + speeds) / own)[clear]
        if bool((left.abs() < 1e-3).all()):
            return f"no rotary is applied (base {base:g})"
        if bool((left <= 0).any()):
            continue
        line, x = left.log(), numbers[clear]
        slope = float(((x - x.mean()) * (line - line.mean())).sum() / (x - x.mean()).pow(2).sum())
        level = float(line.mean() - slope * x.mean())
        if float((line - level - slope * x).abs().max()) > 0.01 * max(abs(slope) * pairs, abs(level)):
            continue
        if abs(slope) * pairs < 0.02:
            return f"rotary angles are scaled by {figure(math.exp(level))} (base {base:g})"
        if abs(level) < 0.02:
            return f"rotary of base {_usual(base * math.exp(-slope * pairs)):g} in place of {base:g}"
    changed = clear.nonzero()[:, 0]
    of = (
        f" of pairs {int(changed[0])} to {int(changed[-1])} of {pairs}" if len(changed) < pairs and len(changed) else ""
    )
    return f"rotary angles{of} are off by amounts that grow with the position"


def _usual(base: float) -> float:
    """A usual base where it is near; else three digits of it."""
    usual = min(BASES, key=lambda known: abs(known / base - 1))
    return usual if abs(usual / base - 1) < 0.03 else float(f"{base:.3g}")


def _sample(number: int) -> Tensor:
    return torch.linspace(0, number - 1, min(number, SAMPLED)).long()


@lru_cache(maxsize=32)
def _turns(base: float, pairs: int) -> Tensor:
    """[pairs, 2 * FARTHEST + 1] the turns of each pair by each distance, backwards."""
    speeds: Tensor = base ** (-torch.arange(pairs, dtype=torch.float64) / pairs)
    angles: Tensor = -speeds[:, None] * torch.arange(-FARTHEST, FARTHEST + 1, dtype=torch.float64)
    turns: Tensor = torch.polar(torch.ones_like(angles), angles).to(torch.complex64)
    return turns


def _distances(block: Block, ours: Tensor, right: Tensor, cross: Tensor) -> tuple[Tensor | None, float]:
    """The whole number of positions that each sampled row is off by, and the base; None where no base explains it."""
    sample = _sample(len(cross))
    pairs = cross.shape[1]
    for base in BASES:
        scores = (cross[sample].to(torch.complex64) @ _turns(base, pairs)).real
        distances = scores.argmax(1) - FARTHEST
        angles = torch.angle(cross)
        speeds = base ** (-torch.arange(pairs, dtype=torch.float64) / pairs)
        angles[sample] = distances[:, None].double() * speeds
        wrong = len(cross) - _explained(block, ours, right, angles)
        if wrong <= (1 - MOST) * len(sample):
            return distances, base
    return None, 0.0
