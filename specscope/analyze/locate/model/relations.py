"""How wrong values relate to right ones: zero, a factor, a vector too many, other rows, other channels."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import permutations

import torch
from torch import Tensor

from specscope.analyze.locate.model.block import MOST, Block, figure, names_of

FEWEST_CHANNELS = 8  # that one number must explain before it is taken for a rule
FEWEST_ROWS = 4
LISTED = 3
PARTS = (2, 3, 4)  # equal parts of a row that may stand in another order: the layers of a head's features


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
    """One factor, one of each head, row, row and head, or channel: the simplest that holds."""
    number, width, heads = *block.ours.shape, block.heads
    size = width // heads if width % heads == 0 else width
    sizes = (width, block.size, 32, 64, 128, 256, 512, len(block.whole[0]))
    exact = max(block.allowed, 2e-5)
    wrong, meant = block.ours.reshape(number, -1, size), block.right.reshape(number, -1, size)
    many = number >= FEWEST_ROWS and number * width >= 4 * FEWEST_CHANNELS and size == width
    tries = (  # over which dimensions one factor holds, whose it is, and where there are values enough to tell
        ((0, 1, 2), "", number * width >= FEWEST_CHANNELS),
        ((0, 2), "head", heads > 1 and number * size >= FEWEST_CHANNELS),
        ((1, 2), "row", number > 1 and width >= FEWEST_CHANNELS),
        ((2,), "row and head", heads > 1 and size >= FEWEST_CHANNELS),
        ((0,), "channel", many),
    )
    for dims, whose, _ in (one for one in tries if one[2]):
        factors = (wrong * meant).sum(dims, keepdim=True) / meant.pow(2).sum(dims, keepdim=True).clamp_min(1e-30)
        phrase = block.counted(block.explained((factors * meant).reshape(number, width)))
        if not phrase:
            continue
        value, low, high = (float(x) for x in (factors.flatten()[0], factors.min(), factors.max()))
        if not whose:
            flipped = abs(value + 1) < exact
            name = "the sign is flipped" if flipped else f"a factor of {figure(value)}{names_of(value, sizes, exact)}"
            return f"{name} {phrase}"
        return f"a factor of its own in each {whose} ({figure(low)} to {figure(high)}) {phrase}"
    return ""


def added(block: Block) -> str:
    """The same vector too many at every row, or a known one, or its multiples."""
    difference = block.ours - block.right
    number, width = difference.shape
    if width < FEWEST_CHANNELS:
        return ""
    for name, vector in block.vectors.items():
        if phrase := block.counted(block.explained(vector)):
            return f"equal to {name} {phrase}"
        times = float((difference * vector).sum() / vector.pow(2).sum().clamp_min(1e-30))
        if phrase := block.counted(block.explained(block.right + times * vector)):
            much = {1: f"{name} is added once more", -1: f"{name} is missing"}
            fits = abs(times - round(times)) < 0.01
            text = much.get(round(times), "") if fits else ""
            return f"{text or f'{figure(times)} times {name} is added'} {phrase}"
    if number < FEWEST_ROWS:
        return ""
    mean = difference.mean(0)
    if phrase := block.counted(block.explained(block.right + mean)):
        share = float(mean.norm() / block.right.norm(dim=1).median().clamp_min(1e-30))
        return f"the same vector is added {phrase} (its size is {figure(share)} of a row's)"
    return ""


def other_rows(block: Block) -> str:
    """Rows of other positions: one for all, a shift, a permutation, rows of the others."""
    number, width = block.ours.shape
    if width < FEWEST_CHANNELS or len(block.known) < 2:
        return ""
    distances = torch.cdist(block.ours, block.known, compute_mode="use_mm_for_euclid_dist_if_necessary")
    near = distances.min(1).values
    # a product of matrices is exact to some digits only: the nearest is held against the row again
    candidates = distances <= (near + 0.01 * block.ours.norm(dim=1))[:, None]
    nearest = block.known[distances.argmin(1)]
    same = (block.ours - nearest).norm(dim=1) <= block.tolerance
    if not block.counted(int(same.sum()), 0.5):
        return ""
    candidates &= same[:, None]
    fed = candidates[:, : len(block.fed)]
    matches = fed.sum(0)
    if number >= 3 and (phrase := block.counted(int(matches.max()))):
        return f"the row of position {block.fed[int(matches.argmax())].position} stands {phrase}"
    return _shifted(block, fed) or _elsewhere(block, candidates, int(same.sum()))


def _shifted(block: Block, fed: Tensor) -> str:
    """Each row is that of the position k before; rows that have none there say nothing."""
    rows = torch.tensor([row.position for row in block.rows])
    places = torch.tensor([row.position for row in block.fed])
    offsets = rows[:, None] - places[None, :]
    distances, counts = offsets[fed].unique(return_counts=True)
    for offset in distances[counts.argsort(descending=True)][:4].tolist():
        possible = (offsets == offset).any(1)
        held = ((offsets == offset) & fed).any(1)
        if offset and int(held.sum()) >= max(2, MOST * int(possible.sum()), 0.5 * len(rows)):
            side = f"{abs(offset)} {'before' if offset > 0 else 'after'}"
            having = " that have one" if int(possible.sum()) < len(rows) else ""
            return (
                f"each row is that of the position {side}, at {int(held.sum())} of {int(possible.sum())} rows{having}"
            )
    return ""


def _elsewhere(block: Block, candidates: Tensor, count: int) -> str:
    chosen = candidates.float().argmax(1)
    matched = candidates.any(1)
    inside = int((chosen[matched] < len(block.fed)).sum())
    distinct = len(chosen[matched].unique()) == count
    phrase = block.counted(count, 0.5)
    if not inside:
        return f"rows of the others given stand {phrase}"
    examples = [
        f"position {row.position} has that of {block.fed[place].position}"
        for row, place, match in zip(block.rows, chosen.tolist(), matched.tolist(), strict=True)
        if match and place < len(block.fed)
    ]
    outside = f", {count - inside} of them of the others given" if inside < count else ""
    noun = "rows are permuted" if distinct and inside == count == len(block.rows) else "rows of other positions stand"
    return f"{noun} {phrase}{outside} ({_listed(examples)})"


def other_channels(block: Block) -> str:
    """Channels, parts, or whole heads, of other places: an order that has a name, or one that each channel tells."""
    number, width = block.ours.shape
    total = block.whole.shape[1]
    if width < FEWEST_CHANNELS:
        return ""
    for words, order in _orders(block.size, total):
        if phrase := block.counted(block.explained(block.whole[:, order[block.columns]])):
            return f"{words} {phrase}"
    if number < FEWEST_ROWS:
        return ""
    scale = block.whole.norm(dim=0).clamp_min(1e-30)
    source = torch.cdist(block.ours.T.contiguous(), block.whole.T.contiguous()).argmin(1)
    off = (block.ours - block.whole[:, source]).norm(dim=0) / scale[source]
    if float((off <= max(block.allowed, 2e-5)).float().mean()) < MOST:
        return ""
    phrase, size = f"at {number} of {number} rows", block.size
    if size < total and bool(((source % size) == (block.columns % size)).all()):
        heads = sorted({(int(a), int(b)) for a, b in zip(block.columns // size, source // size, strict=True)})
        pairs = [f"head {mine} has that of head {theirs}" for mine, theirs in heads if mine != theirs]
        return f"heads are of other places {phrase} ({_listed(pairs)})"
    shifts = ((block.columns - source) % total).unique()
    if len(shifts) == 1:
        return f"channels are shifted by {int(shifts)} {phrase}"
    return f"channels are permuted {phrase} ({int((source != block.columns).sum())} of {width} moved)"


def _orders(size: int, total: int) -> Iterator[tuple[str, Tensor]]:
    """Orders of channels that have a name: within each head, and of equal parts of the whole width."""
    every = torch.arange(total)
    inner, half, of_each = every % size, size // 2, " in each head" if size < total else ""
    if size % 2 == 0:
        for words, order in (
            ("the halves are swapped", (inner + half) % size),
            ("the order is reversed", size - 1 - inner),
            ("channels lie in pairs in place of halves", (inner % 2) * half + inner // 2),
            ("channels lie in halves in place of pairs", (inner % max(half, 1)) * 2 + inner // max(half, 1)),
        ):
            yield f"{words}{of_each}", every - inner + order
    for parts in (part for part in PARTS if size == total and total % part == 0 and total // part > 1):
        for places in list(permutations(range(parts)))[1:]:
            words = f"the {parts} parts of {total // parts} channels stand in the order {', '.join(map(str, places))}"
            yield words, every.reshape(parts, -1)[list(places)].flatten()


def _listed(items: list[str]) -> str:
    return ", ".join(items[:LISTED]) + (", ..." if len(items) > LISTED else "")


RELATIONS: tuple[Callable[[Block], str], ...] = (zero, factor, added, other_rows, other_channels)
