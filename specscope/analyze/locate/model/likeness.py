"""What a difference of one operation looks like: rows of an engine held against the same rows of the reference.

First which rows differ, then which heads or channels of these, then how what is left relates to the right values. Every
relation must explain nearly all of the difference at nearly all of the rows, so that noise is not taken for structure.

Scores of attention are known up to what all keys of a row share: they are held against those of one key, the median of
those that both sides see. Who sees which key is one question, the scores of keys that both see another: the answer may
name both.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from specscope.analyze.locate.located import FedRow
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
    rotated,
    rounded,
    zero,
)

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
    """`every 16th`."""
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
    token = next(row.token for row, is_wrong in zip(rows, wrong.tolist(), strict=True) if is_wrong)
    yield f"rows of token {token}", torch.tensor([row.token == token for row in rows])
    positions = torch.tensor([row.position for row in rows])
    low, high = int(positions[wrong].min()), int(positions[wrong].max())
    stretch = (positions >= low) & (positions <= high)
    where = f"at positions {low} to {high}" if low > int(positions.min()) else f"up to position {high}"
    if low > int(positions.min()) and high == int(positions.max()):
        where = f"behind position {int(positions[positions < low].max())}"
    yield where, stretch
    step = math.gcd(*(positions[wrong] - low).tolist())
    if step > 1 and int(wrong.sum()) >= 4:  # three points lie on a line by chance
        yield f"at {every(step)} position ({low}, {low + step}, ...)", (positions - low) % step == 0


def place_of_tokens(ours: Tensor, right: Tensor, tokens: Tensor, allowed: float) -> str:
    """From which token on, or up to which, values [n, width] differ; "" where all do, or no such border parts them."""
    off = (ours - right).abs() > allowed * right.pow(2).mean().sqrt()
    wrong, agreeing = tokens[off], tokens[~off]
    if not len(wrong) or not len(agreeing):
        return ""
    counts = f"{len(wrong.unique())} of {len(tokens.unique())} that were examined"
    if int(wrong.min()) > int(agreeing.max()):
        return f"only tokens from {int(wrong.min()):,} on: {counts}"
    return f"only tokens up to {int(wrong.max()):,}: {counts}" if int(wrong.max()) < int(agreeing.min()) else ""


def place_of_heads(differs: Tensor, heads: int) -> tuple[str, Tensor, int]:
    """(rule, channels, heads of these) of the heads that differ, by whether each channel does; "" where all do."""
    wrong = differs.reshape(heads, -1).any(1).nonzero()[:, 0]
    agreeing = heads - len(wrong)
    if not agreeing or not len(wrong):
        return "", torch.arange(len(differs)), heads
    agree = "the other agrees" if agreeing == 1 else f"the other {agreeing} agree"
    words = numbers("head", wrong) or f"{len(wrong)} heads"
    return (
        f"only in {words} of {heads}, {agree}",
        torch.arange(len(differs)).reshape(heads, -1)[wrong].flatten(),
        len(wrong),
    )


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
