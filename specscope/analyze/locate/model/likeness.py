"""What a difference of one operation looks like: rows of an engine held against the same rows of the reference.

First which rows differ, then which heads or channels of these, then how what is left relates to the right values. Every
relation must explain nearly all of the difference at nearly all of the rows, so that noise is not taken for structure.

Scores of attention are known up to what all keys of a row share: they are held against those of one key, the median of
those that both sides see. Who sees which key is one question, the scores of keys that both see another: the answer may
name both.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specscope.analyze.locate.located import FedRow
from specscope.analyze.locate.model.places import (
    differing,
    numbers,
    place_of_channels,
    place_of_heads,
    place_of_rows,
    place_of_tokens,
)
from specscope.analyze.locate.model.reference import relative
from specscope.analyze.locate.model.relations import (
    MOST,
    Block,
    added,
    factor,
    figure,
    not_finite,
    other_channels,
    other_rows,
    rounded,
    zero,
)
from specscope.analyze.locate.model.rotation import rotated

UNSEEN = -87.0  # float32 has no smaller weight
DEEP = -30.0  # where a row's weights go below this, the smallest may have become 0 by rounding


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
    some = [row for row, off in zip(rows, wrong.tolist(), strict=True) if off]
    block = Block(bad, right[wrong], some, heads, allowed, right, rows)
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
    missing = _masked(meant & ~seen, both, ours, right)
    extra = _masked(seen & ~meant, both, right, ours)
    off = torch.where(both, ours - right, torch.nan)
    slack = allowed * (1 + right.abs())
    middle = off.nanmedian(2, keepdim=True)
    centred, level = off - middle.values, right.gather(2, middle.indices)
    # a key that one side lacks changes the sum by which all are divided: only what is left then is a difference
    masked = (missing | extra).any(2)
    wrong = masked | ~((torch.where(masked[..., None], centred, off).abs() <= slack) | ~both).all(2)
    if not bool(wrong.any()):
        return ""
    bad, heads = wrong.any(1), wrong.any(0)
    place = place_of_rows(bad, rows)
    rule, _, _ = place_of_heads(heads, len(heads))
    some = [row for row, is_bad in zip(rows, bad.tolist(), strict=True) if is_bad]
    ours, right, level, both, missing, extra, centred, slack = (
        x[bad][:, heads] for x in (ours, right, level, both, missing, extra, centred, slack)
    )
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
    off = distances[cells].unique()
    nodes = torch.tensor([key.node is not None for key in keys])
    itself = torch.tensor([[row.node == key.node for key in keys] for row in rows]) & nodes
    if bool(nodes[cells.any(0)].all()) and all(row.node is not None for row in rows):
        if bool((itself == cells)[bad].all()):
            return f"each node itself {counts}"
        where = "the same depth" if off.tolist() == [0] else "other depths" if 0 not in off.tolist() else "any depth"
        return f"other tree nodes, of {where} {counts}"
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
