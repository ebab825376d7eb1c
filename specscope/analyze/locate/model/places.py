"""Which rows and which channels differ, where there is a rule in it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from specscope.analyze.locate.located import FedRow

NEARLY_ALL = 0.9  # of the rows a rule names: some may be right by chance
ALL_CHANNELS = 0.98
MOST_LISTED = 4


def place_of_rows(wrong: Tensor, rows: Sequence[FedRow], groups: Mapping[str, Tensor]) -> str:
    """The rule by which rows are wrong, or keys of attention; "" where all are, or by no rule seen.

    A rule names rows of which nearly all are wrong, and outside of which none is.
    """
    number, count = len(wrong), int(wrong.sum())
    if count in (0, number):
        return ""
    positions = torch.tensor([row.position for row in rows])
    if count == 1:
        row = rows[int(wrong.nonzero()[0])]
        return f"only {_row(row)} (1 of {number} rows)"
    place = _of_kind(wrong, rows) or _of_groups(wrong, rows, groups, least=1.0)
    place = place or _of_positions(wrong, positions) or _of_groups(wrong, rows, groups)
    place = place or _periodic(wrong, positions)
    if not place and count <= MOST_LISTED:
        listed = ", ".join(str(int(position)) for position in positions[wrong])
        place = f"only at positions {listed} ({count} of {number} rows)"
    return place


def _row(row: FedRow) -> str:
    return f"at position {row.position}" if row.node is None else f"at node {row.node}, position {row.position}"


def _holds(wrong: Tensor, named: Tensor, least: float = NEARLY_ALL) -> bool:
    """Whether none outside of the named rows is wrong, and nearly all of them are."""
    return not bool(wrong[~named].any()) and float(wrong[named].float().mean()) >= least


def _counts(wrong: Tensor, named: Tensor) -> str:
    return f"{int(wrong[named].sum())} of {int(named.sum())}"


def _of_kind(wrong: Tensor, rows: Sequence[FedRow]) -> str:
    nodes = torch.tensor([row.node is not None for row in rows])
    if not bool(nodes.any()) or bool(nodes.all()):
        return ""
    if _holds(wrong, nodes):
        return f"only at tree nodes: {_counts(wrong, nodes)}, 0 of {int((~nodes).sum())} rows of the text"
    if _holds(wrong, ~nodes):
        return f"only at rows of the text: {_counts(wrong, ~nodes)}, 0 of {int(nodes.sum())} tree nodes"
    return ""


def _of_positions(wrong: Tensor, positions: Tensor) -> str:
    """A prefix that is right, one that is wrong, or one stretch in between."""
    low, high = int(positions[wrong].min()), int(positions[wrong].max())
    stretch = (positions >= low) & (positions <= high)
    if not _holds(wrong, stretch) or bool(stretch.all()):
        return ""
    counts = f"{_counts(wrong, stretch)} rows"
    before, after = positions[positions < low], positions[positions > high]
    if not len(after):
        return f"right up to position {int(before.max())}, wrong from {low} on: {counts}"
    if not len(before):
        return f"wrong up to position {high}, right from {int(after.min())} on: {counts}"
    return f"only at positions {low} to {high}: {counts}, 0 of {len(before) + len(after)} others"


def _of_groups(wrong: Tensor, rows: Sequence[FedRow], groups: Mapping[str, Tensor], least: float = NEARLY_ALL) -> str:
    tokens = torch.tensor([row.token for row in rows])
    for name, ids in {**groups, "token": tokens}.items():
        if ids.dim() not in (1, 2) or len(ids) != len(wrong):
            continue
        members = ids.reshape(len(wrong), -1)
        if not members.shape[1]:
            continue
        for member in members[wrong][0].unique().tolist():  # one that all wrong rows have is one of the first's
            named = (members == member).any(1)
            if _holds(wrong, named, least) and not bool(named.all()):
                return f"only rows of {name} {member}: {_counts(wrong, named)}, 0 of {int((~named).sum())} others"
    return ""


def _periodic(wrong: Tensor, positions: Tensor) -> str:
    """At every k-th position; four of them, or three points would lie on a line by chance."""
    if int(wrong.sum()) < 4:
        return ""
    chosen = positions[wrong].unique()
    if len(chosen) < 4:
        return ""
    step = int(torch.gcd(chosen[1:] - chosen[0], (chosen[1] - chosen[0]).expand(len(chosen) - 1)).min())
    for distance in (chosen - chosen[0])[1:].tolist():
        step = int(torch.gcd(torch.tensor(step), torch.tensor(distance)))
    if step < 2:
        return ""
    first = int(chosen[0])
    named = (positions - first) % step == 0
    if not _holds(wrong, named):
        return ""
    return f"only at every {step}th position ({first}, {first + step}, ...): {_counts(wrong, named)} rows"


def _differing(ours: Tensor, right: Tensor, allowed: float) -> Tensor:
    """[width] bool: the channels of wrong rows that differ by more than rounding, and more than next to nothing."""
    difference = (ours - right).pow(2).mean(0).sqrt()
    size = right.pow(2).mean().sqrt()
    differs = difference > torch.minimum(allowed * size, 0.05 * difference.max())
    # where a few channels are far larger than all others, rounding in proportion is largest there: it is in all of them
    relative = difference / right.pow(2).mean(0).sqrt().clamp_min(1e-30)
    differs |= relative > max(allowed, 0.3 * float(relative[difference.argmax()]))
    return differs if float(differs.float().mean()) < ALL_CHANNELS else torch.ones_like(differs)


def place_of_tokens(ours: Tensor, right: Tensor, tokens: Tensor, allowed: float) -> str:
    """From which token on, or up to which, values [n, width] differ; "" where all do, or no such border parts them."""
    off = (ours - right).abs() > allowed * right.pow(2).mean().sqrt()
    wrong, agreeing = tokens[off], tokens[~off]
    if not len(wrong) or not len(agreeing):
        return ""
    counts = f"{len(wrong.unique())} of {len(tokens.unique())} that are looked at"
    if int(wrong.min()) > int(agreeing.max()):
        return f"only tokens from {int(wrong.min()):,} on: {counts}"
    return f"only tokens up to {int(wrong.max()):,}: {counts}" if int(wrong.max()) < int(agreeing.min()) else ""


def place_of_heads(ours: Tensor, right: Tensor, heads: int, allowed: float) -> tuple[str, Tensor, int]:
    """(rule, channels, heads of these) of the heads that differ in wrong rows [n, width]; "" where all do."""
    wrong = _differing(ours, right, allowed).reshape(heads, -1).any(1).nonzero()[:, 0]
    columns = torch.arange(ours.shape[1]).reshape(heads, -1)[wrong].reshape(-1)
    agreeing = heads - len(wrong)
    if not agreeing or not len(wrong):
        return "", torch.arange(ours.shape[1]), heads
    agree = "the other agrees" if agreeing == 1 else f"the other {agreeing} agree"
    return f"only in {_numbers('head', wrong)} of {heads}, {agree}", columns, len(wrong)


def place_of_channels(ours: Tensor, right: Tensor, heads: int, allowed: float) -> tuple[str, Tensor, int]:
    """(rule, channels, heads of these) of the channels that differ in wrong rows [n, width]; "" where all do."""
    rule, of_heads, count = place_of_heads(ours, right, heads, allowed)
    differs = _differing(ours, right, allowed)
    inside = differs[of_heads].reshape(count, -1)
    if float(inside.float().mean()) >= ALL_CHANNELS:
        return rule, of_heads, count
    common = inside.any(0)
    if float(inside[:, common].float().mean()) >= ALL_CHANNELS:  # the same channels of each head
        of_each = " of each head" if count > 1 else " of the head" if heads > 1 else ""
        inner = _channels(common)
        columns = of_heads.reshape(count, -1)[:, common].reshape(-1)
        return ", ".join(filter(None, (rule, inner and f"only in {inner}{of_each}"))), columns, count
    inner = _channels(differs)
    return f"only in {inner}" if inner else rule, differs.nonzero()[:, 0], 1


def _numbers(noun: str, chosen: Tensor) -> str:
    if len(chosen) == 1:
        return f"{noun} {int(chosen[0])}"
    low, high = int(chosen[0]), int(chosen[-1])
    if high - low + 1 == len(chosen):
        return f"{noun}s {low} to {high}"
    if len(chosen) <= MOST_LISTED:
        return f"{noun}s {', '.join(str(int(number)) for number in chosen)}"
    return f"{len(chosen)} {noun}s"


def _channels(chosen: Tensor) -> str:
    """The rule of some channels [size] among others; "" where there is none."""
    size = len(chosen)
    numbers = chosen.nonzero()[:, 0]
    low, high, count = int(numbers[0]), int(numbers[-1]), len(numbers)
    if count > NEARLY_ALL * size:
        return ""
    if count == high - low + 1:
        if count > 1 and 2 * count == size and low in (0, count):
            return f"the {'second' if low else 'first'} half ({_numbers('channel', numbers)})"
        return f"{_numbers('channel', numbers)} of {size}"
    step = int((numbers[1:] - numbers[:-1]).min())
    if step > 1 and bool((numbers[1:] - numbers[:-1] == step).all()) and count >= 3 and low < step:
        if step == 2 and low < 2:
            return f"the {'odd' if low else 'even'} channels"
        return f"every {step}th channel from {low} on"
    return f"channels {', '.join(str(int(number)) for number in numbers)} of {size}" if count <= MOST_LISTED else ""
