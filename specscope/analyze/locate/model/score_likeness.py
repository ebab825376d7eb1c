"""What a difference of attention's scores looks like: weights as logs, by row, head and key.

Weights are known up to what all keys of a row share, so differences are held against their mean over the keys that both
sides see. Who sees which key is one question, the scores of keys that both see another: the answer may name both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from specscope.analyze.locate.located import FedRow
from specscope.analyze.locate.model.block import MOST, figure, names_of
from specscope.analyze.locate.model.places import place_of_heads, place_of_rows

UNSEEN = -87.0  # float32 has no smaller weight
DEEP = -30.0  # where a row's weights go below this, the smallest may have become 0 by rounding
SAMPLED = 32  # rows on which a relation is tried before it is over all of them
FEWEST_KEYS = 3  # of a row, for a line through its scores
FARTHEST_SHIFT = 4


def looks_of_scores(
    ours: Tensor,
    right: Tensor,
    *,
    rows: Sequence[FedRow],
    keys: Sequence[FedRow],
    groups: Mapping[str, Tensor] | None = None,
    size: int = 0,
    allowed: float = 1e-4,
) -> str:
    """What the difference is like, in one phrase with figures; "" where like nothing known.

    ours, right: float32 [rows, heads, keys] logs of attention weights, -inf where a key is unseen. keys: what each key
    is of. groups: ids of each row, by the name of the group. size: channels of a head, whose root a factor may be.
    allowed: relative error of a log that rounding explains. Shapes that do not fit give "".
    """
    fits = ours.dim() == 3 and ours.shape == right.shape and ours.numel() > 0
    if not fits or ours.shape[0] != len(rows) or ours.shape[2] != len(keys):
        return ""
    ours, right = ours.detach().float(), right.detach().float()
    if bool(right.isnan().any()) or bool((right == torch.inf).any()):
        return ""
    whole = _Scores.of(ours, right, rows, keys, size, allowed)
    if not bool(whole.wrong.any()):
        return ""
    bad = whole.wrong.any(1)
    place = place_of_rows(bad, rows, groups or {})
    heads = whole.wrong[bad].any(0)
    marks = heads.float().expand(2, -1)
    in_heads, _, _ = place_of_heads(marks, torch.zeros_like(marks), len(heads), 0.0)
    fed = tuple(row for row, off in zip(rows, bad.tolist(), strict=True) if off)
    part = _Scores.of(ours[bad][:, heads], right[bad][:, heads], fed, keys, size, allowed)
    if bool(part.ours.isnan().any()):
        return ": ".join(filter(None, (place, in_heads, f"NaN at {int(part.ours.isnan().any(2).any(1).sum())} rows")))
    relation = "; ".join(filter(None, (_masks(part), _values(part))))
    return ": ".join(filter(None, (place, in_heads, relation)))


@dataclass(frozen=True)
class _Scores:
    ours: Tensor  # [n, heads, keys]
    right: Tensor
    rows: tuple[FedRow, ...]
    keys: tuple[FedRow, ...]
    both: Tensor  # [n, heads, keys] bool: seen by both sides
    missing: Tensor  # seen by the reference only
    extra: Tensor  # seen by ours only
    allowed: Tensor  # [n, heads, keys] difference of a log that rounding explains
    wrong: Tensor  # [n, heads] bool
    size: int

    @classmethod
    def of(
        cls, ours: Tensor, right: Tensor, rows: Sequence[FedRow], keys: Sequence[FedRow], size: int, allowed: float
    ) -> _Scores:
        seen, meant = ~(ours <= UNSEEN), right > UNSEEN
        both = seen & meant
        slack = allowed * (1 + torch.where(both, right.abs(), 0.0))
        # a key that one side lacks changes the sum by which all are divided: only what is left then is a difference
        missing = _masked(meant & ~seen, both, ours, right)
        extra = _masked(seen & ~meant, both, right, ours)
        masked = (missing | extra).any(2)
        off = torch.where(both, ours - right, 0.0)
        centred = torch.where(both, off - _mean(off, both), 0.0).abs()
        values = torch.where(masked[..., None], centred, torch.maximum(off.abs(), centred))
        wrong = masked | ~(values <= slack).all(2)
        return cls(ours, right, tuple(rows), tuple(keys), both, missing, extra, slack, wrong, size)

    def of_rows(self, chosen: Tensor) -> _Scores:
        """Some rows of it."""
        rows = tuple(self.rows[number] for number in chosen.tolist())
        return replace(
            self,
            ours=self.ours[chosen],
            right=self.right[chosen],
            rows=rows,
            both=self.both[chosen],
            missing=self.missing[chosen],
            extra=self.extra[chosen],
            allowed=self.allowed[chosen],
            wrong=self.wrong[chosen],
        )

    @property
    def distances(self) -> Tensor:
        """[n, keys] by how many positions each key lies before each row."""
        rows = torch.tensor([row.position for row in self.rows])
        return rows[:, None] - torch.tensor([key.position for key in self.keys])[None, :]

    def centred(self, values: Tensor) -> Tensor:
        """Less their mean over the keys that both see; 0 at the others."""
        return torch.where(self.both, values - _mean(torch.where(self.both, values, 0.0), self.both), 0.0)

    def counted(self, predicted: Tensor) -> str:
        """ "at 37 of 37 rows" where predicted scores [n, heads, keys] explain ours, both centred; else ""."""
        lines = self.both.sum(2) >= FEWEST_KEYS
        actual = self.centred(self.ours)
        difference = (actual - self.centred(self.right)).norm(dim=2)
        lines &= difference > self.allowed.amax(2)
        rounding = (self.allowed * self.both).norm(dim=2)
        tolerance = torch.minimum(torch.maximum(rounding, 0.02 * difference), 0.2 * difference)
        held = ((actual - self.centred(predicted)).norm(dim=2) <= tolerance) & lines
        if int(held.sum()) < max(MOST * int(lines.sum()), 1):
            return ""
        return f"at {int(held.any(1).sum())} of {int(lines.any(1).sum())} rows"


def _mean(values: Tensor, both: Tensor) -> Tensor:
    return values.sum(2, keepdim=True) / both.sum(2, keepdim=True).clamp_min(1)


def _masked(lacking: Tensor, both: Tensor, shallow: Tensor, seeing: Tensor) -> Tensor:
    """Of keys that one side lacks, those that are masked: not the smallest of a row whose weights reach far down."""
    deep = torch.where(both, shallow, torch.inf).amin(2, keepdim=True) < DEEP
    smallest = torch.where(both, seeing, torch.inf).amin(2, keepdim=True)
    return lacking & ~(deep & (seeing <= smallest))


def _finite(values: Tensor) -> Tensor:
    return torch.nan_to_num(values, nan=0.0, neginf=0.0, posinf=0.0)


def _masks(part: _Scores) -> str:
    sides = (
        (part.missing.any(1), "weight 0 at {}, where the reference has weight"),
        (part.extra.any(1), "weight at {}, where the reference has none"),
    )
    return "; ".join(words.format(_which(part, cells)) for cells, words in sides if bool(cells.any()))


def _which(part: _Scores, cells: Tensor) -> str:
    """The rule of which keys [n, keys] are meant, and of how many rows."""
    rows, distances = int(cells.any(1).sum()), part.distances
    counts = f"({rows} of {len(part.rows)} rows)"
    off = distances[cells].unique()
    low, high = int(off[0]), int(off[-1])
    nodes = torch.tensor([key.node is not None for key in part.keys])
    from_nodes = torch.tensor([row.node is not None for row in part.rows])
    of_nodes = cells & nodes
    if bool((of_nodes == cells).all()) and bool(from_nodes[cells.any(1)].all()):
        where = "the same depth" if low == high == 0 else "other depths" if 0 not in off.tolist() else "any depth"
        itself = torch.tensor([[row.node == key.node for key in part.keys] for row in part.rows])
        if bool((itself == cells)[cells.any(1)].all()):
            return f"each node itself {counts}"
        return f"other tree nodes, of {where} {counts}"
    if high < 0:
        return f"{'the next position' if low == high == -1 else 'later positions'} {counts}"
    if low == high == 0:
        return f"each row's own position {counts}"
    if low == high:
        return f"the position {low} before {counts}"
    fixed = (cells == cells[int(cells.sum(1).argmax())]).all(1)
    if rows > 1 and int(fixed.sum()) >= MOST * rows:
        places = torch.tensor([key.position for key in part.keys])[cells.any(0)].unique()
        first, last = int(places[0]), int(places[-1])
        if last - first + 1 == len(places):
            return f"position{f' {first}' if first == last else f's {first} to {last}'} {counts}"
    bad = cells.any(1)
    if low > 0 and bool((cells == (distances >= low))[bad].all()):  # all that lie so far before, and no nearer one
        return f"all positions {low} or more before {counts}"
    if len(off) == high - low + 1 and high - low < 64:
        return f"positions {low} to {high} before {counts}"
    return f"{int(cells.sum())} keys {counts}"


def _values(part: _Scores) -> str:
    """The relation of the scores of keys that both sides see."""
    difference = part.centred(part.ours - part.right)
    if bool((difference.abs() <= part.allowed).all()):
        return "" if bool((part.missing | part.extra).any()) else _sums(part)
    chosen = torch.linspace(0, len(part.rows) - 1, min(len(part.rows), SAMPLED)).long()
    sample = part.of_rows(chosen)
    tries = ((relation(sample), relation) for relation in RELATIONS)
    return next((relation(part) for phrase, relation in tries if phrase), "")


def _sums(part: _Scores) -> str:
    """Weights in the same proportions that add up to something else: a sink takes a part of the sum."""
    total, meant = (float(side.exp().sum(2).median()) for side in (part.ours, part.right))
    if abs(total - 1) < 1e-3 and meant < 1 - 1e-3:
        why = " (as where a sink is left out)"
    elif abs(meant - 1) < 1e-3 and total < 1 - 1e-3:
        why = " (as of a sink that the reference has not)"
    else:
        why = ""
    return f"the weights of a row sum to {figure(total)} where the reference's sum to {figure(meant)}{why}"


def _factor(part: _Scores) -> str:
    wrong, meant = part.centred(_finite(part.ours)), part.centred(_finite(part.right))
    sizes = (part.size, 32, 64, 128, 256) if part.size else (32, 64, 128, 256)
    for dims, words in (((0, 1, 2), ""), ((0, 2), "of its own in each head "), ((1, 2), "of its own in each row ")):
        slopes = (wrong * meant).sum(dims, keepdim=True) / meant.pow(2).sum(dims, keepdim=True).clamp_min(1e-30)
        if slopes.numel() > 1 or not words:
            phrase = part.counted(slopes * meant)
            value = float(slopes.reshape(-1)[0])
            if phrase and not words:
                return f"scores differ by a factor of {figure(value)}{names_of(value, sizes, 1e-3)} {phrase}"
            if phrase:
                low, high = float(slopes.min()), float(slopes.max())
                return f"scores differ by a factor {words}({figure(low)} to {figure(high)}) {phrase}"
    return ""


def _some_keys(part: _Scores) -> str:
    """Only the scores of some keys differ; the median of a row's differences is taken for those that do not."""
    off = torch.where(part.both, part.ours - part.right, torch.nan)
    off = off - off.nanmedian(dim=2, keepdim=True).values
    wrong = ((off.abs() > 2 * part.allowed) & part.both).any(1).any(0)
    if bool(wrong.all()) or int(wrong.sum()) * 2 > len(wrong):
        return ""
    place = place_of_rows(wrong, part.keys, {})
    return place and f"scores differ for some keys: {place.replace(' rows', ' keys')}"


def _by_distance(part: _Scores) -> str:
    """An amount that depends on the distance alone: a bias of positions."""
    off = part.centred(part.ours - part.right)
    distances = part.distances[:, None, :].expand_as(off)
    if int(part.both.sum()) < 4 * len(part.distances.unique()):
        return ""
    x = part.centred(distances.float())
    for dims, words in (((0, 1, 2), ""), ((0, 2), " of each head")):
        slope = (off * x).sum(dims, keepdim=True) / x.pow(2).sum(dims, keepdim=True).clamp_min(1e-30)
        if phrase := part.counted(_finite(part.right) + slope * x):
            low, high = float(slope.min()), float(slope.max())
            amount = figure(low) if low == high else f"{figure(low)} to {figure(high)}"
            return f"a bias of {amount}{words} for each position before is added to the scores {phrase}"
    return ""


def _shifted(part: _Scores) -> str:
    """The score of each key is that of the key beside it; keys at the ends have none and are not compared."""
    for shift in range(1, FARTHEST_SHIFT + 1):
        for way in (shift, -shift):
            there = part.right.roll(way, 2)
            valid = part.both & (there > UNSEEN) & part.both.roll(way, 2)
            valid[..., :shift] = False
            valid[..., -shift:] = False
            if int(valid.sum()) < 4 * FEWEST_KEYS:
                continue
            off = torch.where(valid, part.ours - there, 0.0)
            off = torch.where(valid, off - _mean(off, valid), 0.0)
            if float((off.abs() <= 2 * part.allowed)[valid].float().mean()) >= MOST:
                side = "before" if way > 0 else "after"
                rows = int(valid.any(2).any(1).sum())
                return f"each key has the score of the key {shift} {side} at {rows} of {len(part.rows)} rows"
    return ""


def _coarse(part: _Scores) -> str:
    """Weights that a dtype of few bits holds."""
    for name, dtype in (("bfloat16", torch.bfloat16), ("float16", torch.float16)):
        shares = []
        for side in (part.ours, part.right):
            weights = side.exp()[part.both & (part.right > -14)]
            near = weights.to(dtype).float()
            shares.append(float(((weights - near).abs() <= 2e-6 * weights).float().mean()))
        if shares[0] >= MOST and shares[1] < 0.5:
            return f"the weights hold only values of {name}, at {len(part.rows)} rows"
    return ""


RELATIONS = (_factor, _some_keys, _by_distance, _shifted, _coarse)
