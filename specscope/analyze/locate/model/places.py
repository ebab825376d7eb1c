"""Which rows and which channels differ, where there is a rule in it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from specscope.analyze.locate.located import FedRow

NEARLY_ALL = 0.9  # of the rows a rule names: some may be right by chance
ALL_CHANNELS = 0.98
MOST_LISTED = 4


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
