"""How wrong values relate to right ones: zero, a factor, a vector too many, other rows, other channels, rounding."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import permutations

import torch
from torch import Tensor

from specscope.analyze.locate.located import FedRow

MOST = 0.95  # a relation holds where it explains this share of the rows
FEWEST_CHANNELS = 8  # that one number must explain before it is taken for a rule
FEWEST_ROWS = 4
LISTED = 3
LAYERS = 3  # equal parts of a row that may stand in another order: of a head's features
BASES = (10000.0, 500000.0, 1000000.0, 100000.0, 150000.0, 1000.0, 5000000.0, 10000000.0)
FARTHEST = 4096  # the largest distance of positions that is looked for
LOOKED_AT = 64  # rows from which the rule is told
REPEATED = 8  # an operation in a dtype of few bits rounds its inputs and what it sums, not its output alone


def figure(value: float) -> str:
    """Three digits."""
    return f"{value:.3g}"


@dataclass(frozen=True)
class Block:
    """Rows and channels that differ."""

    ours: Tensor  # [n, w]
    right: Tensor  # [n, w]
    rows: Sequence[FedRow]  # n of them
    heads: int  # that the w channels are of
    allowed: float
    known: Tensor  # [m, w] right values of all rows that were fed
    fed: Sequence[FedRow]  # m of them

    def narrowed(self, columns: Tensor, heads: int) -> Block:
        """Some channels of it."""
        sides = {name: getattr(self, name)[:, columns] for name in ("ours", "right", "known")}
        return replace(self, **sides, heads=heads)

    @property
    def tolerance(self) -> Tensor:
        """[n] how far a prediction of a row may be off: what rounding explains, or a 50th of the difference.

        Never more than a fifth of the difference, or a prediction of no change would explain a small one.
        """
        difference = (self.ours - self.right).norm(dim=1)
        rounding = self.allowed * torch.maximum(self.ours.norm(dim=1), self.right.norm(dim=1))
        return torch.minimum(torch.maximum(rounding, 0.02 * difference), 0.2 * difference)

    def explained(self, predicted: Tensor) -> str:
        """What `counted` says of the rows that a prediction [n, w] explains."""
        return self.counted(int(((self.ours - predicted).norm(dim=1) <= self.tolerance).sum()))

    def counted(self, count: int, share: float = MOST) -> str:
        """ "at 37 of 37 rows", or "" where it is too few."""
        number = len(self.rows)
        return f"at {count} of {number} {'row' if number == 1 else 'rows'}" if count >= max(share * number, 1) else ""


def not_finite(bad: Tensor) -> str:
    """Rows [n, width] of which some are not finite."""
    rows = int((~bad.isfinite()).any(1).sum())
    name = "NaN" if bool(bad.isnan().any()) else "infinite"
    share = float((~bad.isfinite()).float().mean())
    return f"{name} at {rows} of {len(bad)} rows ({share:.0%} of their values)"


def zero(block: Block) -> str:
    """All zero."""
    phrase = block.counted(int((block.ours == 0).all(1).sum()), 0.5)
    return phrase and f"all zero {phrase}"


def factor(block: Block) -> str:
    """One factor, one of each head, row, or channel: the simplest that holds."""
    number, width, heads = *block.ours.shape, block.heads
    wrong, meant = (side.reshape(number, heads, -1) for side in (block.ours, block.right))
    tries = (  # over which dimensions one factor holds, whose it is, and how many values tell it
        ((0, 1, 2), "", number * width),
        ((0, 2), "head", number * width // heads * (heads > 1)),
        ((1, 2), "row", width * (number > 1)),
        ((0,), "channel", number * width // 4 * (number >= FEWEST_ROWS)),
    )
    for dims, whose, telling in tries:
        factors = (wrong * meant).sum(dims, keepdim=True) / meant.pow(2).sum(dims, keepdim=True).clamp_min(1e-30)
        phrase = telling >= FEWEST_CHANNELS and block.explained((factors * meant).reshape(number, width))
        if not phrase:
            continue
        value, low, high = (float(x) for x in (factors.flatten()[0], factors.min(), factors.max()))
        if whose:
            return f"a different factor in each {whose} ({figure(low)} to {figure(high)}) {phrase}"
        is_flipped = abs(value + 1) < max(block.allowed, 2e-5)
        return f"{'the sign is flipped' if is_flipped else f'a factor of {figure(value)}'} {phrase}"
    return ""


def added(block: Block) -> str:
    """The same vector too many at every row: a bias that is missing, or added twice, is one."""
    if block.ours.shape[1] < FEWEST_CHANNELS or len(block.rows) < FEWEST_ROWS:
        return ""
    mean = (block.ours - block.right).mean(0)
    if not (phrase := block.explained(block.right + mean)):
        return ""
    share = float(mean.norm() / block.right.norm(dim=1).median().clamp_min(1e-30))
    return f"the same vector is added {phrase} (its size is {figure(share)} of a row's)"


def other_rows(block: Block) -> str:
    """Rows of other positions: one for all, those a shift away, or any."""
    number, width = block.ours.shape
    if width < FEWEST_CHANNELS:
        return ""
    same = torch.cdist(block.ours, block.known, compute_mode="donot_use_mm_for_euclid_dist") <= block.tolerance[:, None]
    phrase = block.counted(int(same.any(1).sum()), 0.5)
    if not phrase:
        return ""
    if number >= 3 and (alike := block.counted(int(same.sum(0).max()))):
        return f"the row of position {block.fed[int(same.sum(0).argmax())].position} is {alike}"
    rows, places = (torch.tensor([row.position for row in some]) for some in (block.rows, block.fed))
    offsets = rows[:, None] - places[None, :]
    distances, counts = offsets[same].unique(return_counts=True)
    for offset in distances[counts.argsort(descending=True)][:4].tolist():  # rows that have none there say nothing
        possible, held = (int(some.any(1).sum()) for some in (offsets == offset, (offsets == offset) & same))
        if offset and held >= max(2, MOST * possible, 0.5 * number):
            side = f"{abs(offset)} {'before' if offset > 0 else 'after'}"
            having = " that have one" if possible < number else ""
            return f"each row is the row of the position {side}, at {held} of {possible} rows{having}"
    found = zip(rows[same.any(1)].tolist(), places[same.float().argmax(1)[same.any(1)]].tolist(), strict=True)
    whose = [f"position {own} has the row of {other}" for own, other in found]
    return f"rows belong to other positions {phrase} ({_listed(whose)})"


def other_channels(block: Block) -> str:
    """Channels or parts of other places, in an order that has a name."""
    width = block.ours.shape[1]
    for words, order in _orders(width // block.heads, width) if width >= FEWEST_CHANNELS else ():
        if phrase := block.explained(block.right[:, order]):
            return f"{words} {phrase}"
    return ""


def _orders(size: int, total: int) -> Iterator[tuple[str, Tensor]]:
    """Orders of channels that have a name: within each head, and of a third of the whole width each."""
    every, of_each = torch.arange(total), " in each head" if size < total else ""
    inner, half = every % size, size // 2
    if size % 2 == 0:
        for words, order in (
            ("the halves are swapped", (inner + half) % size),
            ("channels are in pairs instead of halves", (inner % 2) * half + inner // 2),
            ("channels are in halves instead of pairs", (inner % half) * 2 + inner // half),
        ):
            yield f"{words}{of_each}", every - inner + order
    for places in [*permutations(range(LAYERS))][1:] if size == total and total % LAYERS == 0 else ():
        words = f"the {LAYERS} parts of {total // LAYERS} channels are in the order {', '.join(map(str, places))}"
        yield words, every.reshape(LAYERS, -1)[list(places)].flatten()


def _listed(items: list[str]) -> str:
    return ", ".join(items[:LISTED]) + (", ..." if len(items) > LISTED else "")


def _int8(values: Tensor) -> Tensor:
    scale = values.abs().amax(1, keepdim=True).clamp_min(1e-30) / 127
    return (values / scale).round() * scale


# By their bits of mantissa: what has few of them is found among the values of what has more
ROUNDED: dict[str, Callable[[Tensor], Tensor]] = {
    "float8_e5m2": lambda values: values.to(torch.float8_e5m2).float(),
    "float8_e4m3fn": lambda values: values.to(torch.float8_e4m3fn).float(),
    "int8 with a scale per row": _int8,
    "bfloat16": lambda values: values.bfloat16().float(),
    "float16": lambda values: values.half().float(),
}


def rounded(ours: Tensor, right: Tensor) -> str:
    """Ours holds values of a dtype only, the right values are others, and the error has the size of its rounding."""
    if ours.shape[1] < FEWEST_CHANNELS or not bool(ours.any()):
        return ""
    error = float((ours - right).norm() / right.norm().clamp_min(1e-30))
    for name, to in ROUNDED.items():
        ours_held, right_held = (float(((x - to(x)).abs() <= 2e-6 * x.abs()).float().mean()) for x in (ours, right))
        if ours_held >= MOST and right_held < 0.5 and error <= REPEATED * _error(right, to):
            return f"rounded to {name}: ours holds only such values (relative error {figure(error)})"
    return ""


def _error(values: Tensor, to: Callable[[Tensor], Tensor]) -> float:
    """The relative error of rounding values once; those beyond its largest are left out."""
    return float((to(values) - values).nan_to_num(posinf=0, neginf=0).norm() / values.norm().clamp_min(1e-30))


# Pairs of channels that are rotated: rotary positions off by a constant, scaled, left out, or of another base


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
