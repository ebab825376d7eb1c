"""What a difference of one operation looks like: rows of an engine held against the same rows of the reference.

A relation must hold at nearly all of the rows, so that noise is not taken for structure. Scores of attention are known
up to what all keys of a row share: they are held against the median of those that both sides see.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import compress, permutations

import torch
from torch import Tensor

from specscope.analyze.locate.located import FedRow
from specscope.analyze.locate.model.reference import relative

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
    return f"{value:.3g}"


@dataclass(frozen=True)
class Block:
    ours: Tensor  # [n, w]
    right: Tensor  # [n, w]
    rows: Sequence[FedRow]  # n of them
    heads: int  # that the w channels are of
    allowed: float
    known: Tensor  # [m, w] right values of all rows that were fed
    fed: Sequence[FedRow]  # m of them

    def narrowed(self, columns: Tensor, heads: int) -> Block:
        sides = {name: getattr(self, name)[:, columns] for name in ("ours", "right", "known")}
        return replace(self, **sides, heads=heads)

    @property
    def tolerance(self) -> Tensor:
        """[n] how far a prediction of a row may be off: what rounding explains, or a 50th of the difference, but never
        more than a fifth of it, or a prediction of no change would explain a small one."""
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
    off, name = ~bad.isfinite(), "NaN" if bool(bad.isnan().any()) else "infinite"
    return f"{name} at {int(off.any(1).sum())} of {len(bad)} rows ({float(off.float().mean()):.0%} of their values)"


def zero(block: Block) -> str:
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
        low, high = float(factors.min()), float(factors.max())
        if phrase and whose:
            return f"a different factor in each {whose} ({figure(low)} to {figure(high)}) {phrase}"
        if phrase:
            is_flipped = abs(low + 1) < max(block.allowed, 2e-5)
            return f"{'the sign is flipped' if is_flipped else f'a factor of {figure(low)}'} {phrase}"
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
        yield f"the halves are swapped{of_each}", every - inner + (inner + half) % size
        pairs, halves = (inner % 2) * half + inner // 2, (inner % half) * 2 + inner // half
        yield f"channels are in pairs instead of halves{of_each}", every - inner + pairs
        yield f"channels are in halves instead of pairs{of_each}", every - inner + halves
    for places in [*permutations(range(LAYERS))][1:] if size == total and total % LAYERS == 0 else ():
        words = f"the {LAYERS} parts of {total // LAYERS} channels are in the order {', '.join(map(str, places))}"
        yield words, every.reshape(LAYERS, -1)[list(places)].flatten()


def _listed(items: list[str]) -> str:
    return ", ".join(items[:LISTED]) + (", ..." if len(items) > LISTED else "")


def _int8(values: Tensor) -> Tensor:
    scale = values.abs().amax(1, keepdim=True).clamp_min(1e-30) / 127
    return (values / scale).round() * scale


def _cast(dtype: torch.dtype) -> tuple[str, Callable[[Tensor], Tensor]]:
    return str(dtype).removeprefix("torch."), lambda values: values.to(dtype).float()


# By their bits of mantissa: what has few of them is found among the values of what has more
EIGHT = [_cast(torch.float8_e5m2), _cast(torch.float8_e4m3fn), ("int8 with a scale per row", _int8)]
ROUNDED = dict([*EIGHT, _cast(torch.bfloat16), _cast(torch.float16)])


def rounded(ours: Tensor, right: Tensor) -> str:
    """Ours holds values of a dtype only, the right values are others, and the error has the size of its rounding."""
    if ours.shape[1] < FEWEST_CHANNELS or not bool(ours.any()):
        return ""
    error, size = float((ours - right).norm()), float(right.norm().clamp_min(1e-30))
    for name, to in ROUNDED.items():
        ours_held, right_held = (float(((x - to(x)).abs() <= 2e-6 * x.abs()).float().mean()) for x in (ours, right))
        once = float((to(right) - right).nan_to_num(posinf=0, neginf=0).norm())  # without what is beyond its largest
        if ours_held >= MOST and right_held < 0.5 and error <= REPEATED * once:
            return f"rounded to {name}: ours holds only such values (relative error {figure(error / size)})"
    return ""


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
    """What may have turned the pairs, in words, and by which angles. Rotary of base b turns pair k of position p by
    p b^(-k / pairs). The logarithm of a turn's growth over rotary's own is a line in k: level where angles are scaled,
    through 0 where they are of another base.
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


UNSEEN = -87.0  # float32 has no smaller weight
DEEP = -30.0  # where a row's weights go below this, the smallest may have become 0 by rounding
NEARLY_ALL = 0.9  # of the rows a rule names: some may be right by chance
ALL_CHANNELS = 0.98
MOST_LISTED = 4


def looks(
    ours: Tensor,
    right: Tensor,
    *,
    rows: Sequence[FedRow],
    heads: int = 1,
    tokens: Tensor | None = None,
    allowed: float = 1e-4,
) -> str:
    """What the difference of `ours` from `right` is like, in one phrase with figures; "" where like nothing known.

    ours, right: float32 [rows, width]; with heads, width = heads * size. tokens: [rows, width] whose values these are,
    where they differ. allowed: the relative error of a row that rounding explains.
    """
    heads = heads if ours.shape[1] % heads == 0 else 1
    wrong = (relative(ours, right, heads) > allowed).any(1)
    if not bool(wrong.any()) or not bool(right.isfinite().all()):
        return ""
    place, bad = place_of_rows(wrong, rows), ours[wrong]
    if not bool(bad.isfinite().all()):
        return _joined(place, not_finite(bad))
    block = Block(bad, right[wrong], list(compress(rows, wrong.tolist())), heads, allowed, right, rows)
    if tokens is not None:
        which = place_of_tokens(bad, right[wrong], tokens[wrong], allowed)
        return _joined(place, which or factor(block) or added(block))
    return _joined(place, _inside(block))


def _inside(block: Block, noun: str = "channel") -> str:
    """Which heads and channels differ, and how."""
    differs = differing(block.ours, block.right, block.allowed)
    # rounding, another order and rotation leave some channels nearly as they were: they are asked for first
    rule, columns, left = place_of_heads(differs, block.heads)
    by_heads = block.narrowed(columns, left)
    if whole := rounded(by_heads.ours, by_heads.right) or other_channels(by_heads) or rotated(by_heads):
        return _joined(rule, whole)
    channels, columns, left = place_of_channels(differs, block.heads, noun)
    narrow = block.narrowed(columns, left)
    if relation := zero(narrow) or factor(narrow) or added(narrow) or other_rows(narrow):
        return _joined(channels, relation)
    # rows that share channels (a row of another position with the same first half) differ in some only
    coarse = rounded(narrow.ours, narrow.right) if noun == "channel" else ""
    return other_rows(block) or _joined(channels, coarse)


def _joined(*phrases: str) -> str:
    """From the place to the relation: "only in head 2 of 9: all zero at 37 of 37 rows"."""
    return ": ".join(filter(None, phrases))


def looks_of_scores(
    ours: Tensor, right: Tensor, *, rows: Sequence[FedRow], keys: Sequence[FedRow], allowed: float = 1e-4
) -> str:
    """The same of attention's scores.

    ours, right: float32 [rows, heads, keys] logs of attention weights, -inf where a key is unseen. keys: what each key
    is of. allowed: relative error of a log that rounding explains.
    """
    if bool(right.isnan().any()) or bool((right == torch.inf).any()):
        return ""
    seen, meant = ~(ours <= UNSEEN), right > UNSEEN
    both = seen & meant
    missing, extra = _masked(meant & ~seen, both, ours, right), _masked(seen & ~meant, both, right, ours)
    off, slack = torch.where(both, ours - right, torch.nan), allowed * (1 + right.abs())
    middle = off.nanmedian(2, keepdim=True)
    centred, level = off - middle.values, right.gather(2, middle.indices)
    # a key that one side lacks changes the sum by which all are divided: only what is left then is a difference
    masked = (missing | extra).any(2)
    wrong = masked | ~((torch.where(masked[..., None], centred, off).abs() <= slack) | ~both).all(2)
    if not bool(wrong.any()):
        return ""
    bad, heads = wrong.any(1), wrong.any(0)
    place, rule = place_of_rows(bad, rows), place_of_heads(heads, len(heads))[0]
    some = list(compress(rows, bad.tolist()))
    every = (ours, right, level, both, missing, extra, centred, slack)
    ours, right, level, both, missing, extra, centred, slack = (x[bad][:, heads] for x in every)
    if bool(ours.isnan().any()):
        return _joined(place, rule, f"NaN at {int(ours.isnan().any(2).any(1).sum())} rows")
    sides = (
        (missing.any(1), "weight 0 at {}, where the reference has weight"),
        (extra.any(1), "weight at {}, where the reference has none"),
    )
    phrases = [words.format(_which(cells, some, keys)) for cells, words in sides if bool(cells.any())]
    if bool((centred.abs() > slack).any()):
        if words := rounded(ours.exp()[both][None], right.exp()[both][None]):
            phrases.append(f"the weights are {words}")
        else:
            meant, off = (torch.where(both, x, 0.0).flatten(1) for x in (right - level, centred))
            block = Block(meant + off, meant, some, int(heads.sum()), allowed, meant, some)
            words = _inside(block, "key")
            phrases += [f"scores differ: {words}"] if words else []
    elif not phrases:
        phrases.append(_sums(ours, right))
    return _joined(place, rule, "; ".join(phrases))


def _masked(lacking: Tensor, both: Tensor, shallow: Tensor, seeing: Tensor) -> Tensor:
    """Of keys that one side lacks, those that are masked: not the smallest of a row whose weights reach far down."""
    deep = torch.where(both, shallow, torch.inf).amin(2, keepdim=True) < DEEP
    smallest = torch.where(both, seeing, torch.inf).amin(2, keepdim=True)
    return lacking & ~(deep & (seeing <= smallest))


def _sums(ours: Tensor, right: Tensor) -> str:
    """Weights in the same proportions that add up to something else: a sink takes a part of the sum."""
    total, meant = (float(side.exp().sum(2).median()) for side in (ours, right))
    return f"the weights of a row sum to {figure(total)} where the reference's sum to {figure(meant)}"


def _which(cells: Tensor, rows: Sequence[FedRow], keys: Sequence[FedRow]) -> str:
    """The rule of which keys [rows, keys] are meant, and of how many rows."""
    bad = cells.any(1)
    counts = f"({int(bad.sum())} of {len(rows)} rows)"
    positions = torch.tensor([key.position for key in keys])
    distances = torch.tensor([row.position for row in rows])[:, None] - positions
    off, nodes = distances[cells].unique(), torch.tensor([key.node is not None for key in keys])
    itself = torch.tensor([[row.node == key.node for key in keys] for row in rows]) & nodes
    if bool(nodes[cells.any(0)].all()) and all(row.node is not None for row in rows):
        where = "the same depth" if off.tolist() == [0] else "other depths" if 0 not in off.tolist() else "any depth"
        is_itself = bool((itself == cells)[bad].all())
        return f"each node itself {counts}" if is_itself else f"other tree nodes, of {where} {counts}"
    if int(off[-1]) < 0:
        return f"later positions {counts}"
    if off.tolist() == [0]:
        return f"each row's own position {counts}"
    fixed = (cells == cells[int(cells.sum(1).argmax())]).all(1)
    if len(off) == 1:
        return f"the position {int(off[0])} before {counts}"
    where = f"{rule} before" if (rule := numbers("position", off)) else f"{int(cells.sum())} keys"
    if int(bad.sum()) > 1 and int(fixed.sum()) >= MOST * int(bad.sum()):
        where = numbers("position", positions[cells.any(0)]) or where
    return f"{where} {counts}"


# Which rows and which channels differ, where there is a rule in it


def numbers(noun: str, chosen: Tensor) -> str:
    """Some numbers by the rule they follow: one, a stretch, every k-th, a few; "" where there is none."""
    values = chosen.unique().tolist()
    low, high, count = values[0], values[-1], len(values)
    step = math.gcd(*(value - low for value in values))
    if count == 1:
        return f"{noun} {low}"
    if high - low + 1 == count:
        return f"{noun}s {low} to {high}"
    if count >= 4 and step > 1 and high - low == step * (count - 1):
        return f"{every(step)} {noun} from {low} to {high}"
    return f"{noun}s {', '.join(map(str, values))}" if count <= MOST_LISTED else ""


def every(step: int) -> str:
    return f"every {({2: '2nd', 3: '3rd'}).get(step, f'{step}th')}"


def place_of_rows(wrong: Tensor, rows: Sequence[FedRow]) -> str:
    """The rule by which rows are wrong; "" where all are, or by no rule seen.

    A rule names rows of which nearly all are wrong, and outside of which none is.
    """
    number, count = len(wrong), int(wrong.sum())
    if count in (0, number):
        return ""
    if count == 1:
        row = rows[int(wrong.nonzero()[0])]
        node = "" if row.node is None else f"node {row.node}, "
        return f"only at {node}position {row.position} (1 of {number} rows)"
    for words, named in _named(wrong, rows):
        if not bool(wrong[~named].any()) and NEARLY_ALL * int(named.sum()) <= count and not bool(named.all()):
            return f"only {words}: {count} of {int(named.sum())} rows, 0 of {int((~named).sum())} others"
    positions = torch.tensor([row.position for row in rows])[wrong]
    return f"only at {numbers('position', positions)} ({count} of {number} rows)" if count <= MOST_LISTED else ""


def _named(wrong: Tensor, rows: Sequence[FedRow]) -> Iterator[tuple[str, Tensor]]:
    """Rows that a rule may name, the simplest rule first."""
    nodes = torch.tensor([row.node is not None for row in rows])
    yield "at tree nodes", nodes
    yield "at rows of the text", ~nodes
    token = rows[int(wrong.nonzero()[0])].token
    yield f"rows of token {token}", torch.tensor([row.token == token for row in rows])
    positions = torch.tensor([row.position for row in rows])
    low, high = int(positions[wrong].min()), int(positions[wrong].max())
    before, behind = positions[positions < low], positions[positions > high]
    where = f"at positions {low} to {high}" if len(before) else f"up to position {high}"
    if len(before) and not len(behind):
        where = f"behind position {int(before.max())}"
    yield where, (positions >= low) & (positions <= high)
    step = math.gcd(*(positions[wrong] - low).tolist())
    if step > 1 and int(wrong.sum()) >= 4:  # three points lie on a line by chance
        yield f"at {every(step)} position ({low}, {low + step}, ...)", (positions - low) % step == 0


def place_of_tokens(ours: Tensor, right: Tensor, tokens: Tensor, allowed: float) -> str:
    """From which token on, or up to which, values [n, width] differ; "" where all do, or no such border parts them."""
    off = (ours - right).abs() > allowed * right.pow(2).mean().sqrt()
    wrong, agreeing = tokens[off].unique(), tokens[~off].unique()
    counts = f"{len(wrong)} of {len(tokens.unique())} that were examined"
    if len(wrong) and len(agreeing) and wrong[0] > agreeing[-1]:
        return f"only tokens from {int(wrong[0]):,} on: {counts}"
    is_first = len(wrong) and len(agreeing) and wrong[-1] < agreeing[0]
    return f"only tokens up to {int(wrong[-1]):,}: {counts}" if is_first else ""


def place_of_heads(differs: Tensor, heads: int) -> tuple[str, Tensor, int]:
    """(rule, channels, heads of these) of the heads that differ, by whether each channel does; "" where all do."""
    wrong, every = differs.reshape(heads, -1).any(1).nonzero()[:, 0], torch.arange(len(differs))
    agreeing = heads - len(wrong)
    if not agreeing or not len(wrong):
        return "", every, heads
    agree = "the other agrees" if agreeing == 1 else f"the other {agreeing} agree"
    words = numbers("head", wrong) or f"{len(wrong)} heads"
    return f"only in {words} of {heads}, {agree}", every.reshape(heads, -1)[wrong].flatten(), len(wrong)


def place_of_channels(differs: Tensor, heads: int, noun: str) -> tuple[str, Tensor, int]:
    """(rule, channels, heads of these) of the channels that differ; "" where all do."""
    rule, of_heads, count = place_of_heads(differs, heads)
    inside = differs[of_heads].reshape(count, -1)
    if float(inside.float().mean()) >= ALL_CHANNELS:
        return rule, of_heads, count
    common = inside.any(0)
    if float(inside[:, common].float().mean()) < ALL_CHANNELS:  # others in each head
        inner = _channels(differs, noun)
        return f"only in {inner}" if inner else rule, differs.nonzero()[:, 0], 1
    of_each = " of each head" if count > 1 else " of the head" if heads > 1 else ""
    inner = _channels(common, noun)
    columns = of_heads.reshape(count, -1)[:, common].flatten()
    return ", ".join(filter(None, (rule, inner and f"only in {inner}{of_each}"))), columns, count


def differing(ours: Tensor, right: Tensor, allowed: float) -> Tensor:
    """[width] bool: the channels of wrong rows that differ by more than rounding, and more than next to nothing."""
    difference = (ours - right).pow(2).mean(0).sqrt()
    size = right.pow(2).mean().sqrt()
    differs = difference > torch.minimum(allowed * size, 0.05 * difference.max())
    # where a few channels are far larger than all others, rounding in proportion is largest there: it is in all of them
    relative = difference / right.pow(2).mean(0).sqrt().clamp_min(1e-30)
    differs |= relative > max(allowed, 0.3 * float(relative[difference.argmax()]))
    return differs if float(differs.float().mean()) < ALL_CHANNELS else torch.ones_like(differs)


def _channels(chosen: Tensor, noun: str) -> str:
    """The rule of some channels among others; "" where there is none."""
    which = chosen.nonzero()[:, 0]
    rule = numbers(noun, which) if len(which) <= NEARLY_ALL * len(chosen) else ""
    return rule and f"{rule} of {len(chosen)}"
