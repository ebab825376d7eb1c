"""How wrong values relate to right ones: zero, a factor, a vector too many, other rows, other channels."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from specscope.analyze.locate.model.block import MOST, Block, figure, names_of

FEWEST_CHANNELS = 8  # that one number must explain before it is taken for a rule
FEWEST_ROWS = 4
LISTED = 3


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
    """One factor, one of each head, one of each row, or one of each channel, the simplest that holds."""
    ours, right, heads = block.ours, block.right, block.heads
    number, width = ours.shape
    size = width // heads if width % heads == 0 else width
    sizes = (width, block.size, 32, 64, 128, 256, 512, len(block.whole[0]))
    exact = max(block.allowed, 2e-5)

    def best(dims: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        """Factors [n or 1, heads or 1, size or 1] by least squares over some dimensions, and the prediction."""
        wrong, meant = ours.reshape(number, -1, size), right.reshape(number, -1, size)
        factors = (wrong * meant).sum(dims, keepdim=True) / meant.pow(2).sum(dims, keepdim=True).clamp_min(1e-30)
        return factors, (factors * meant).reshape(number, width)

    def named(value: float) -> str:
        if abs(value + 1) < exact:
            return "the sign is flipped"
        return f"a factor of {figure(value)}{names_of(value, sizes, exact)}"

    if number * width >= FEWEST_CHANNELS:
        factors, predicted = best((0, 1, 2))
        if phrase := block.counted(block.explained(predicted)):
            return f"{named(float(factors))} {phrase}"
    if heads > 1 and number * size >= FEWEST_CHANNELS:
        factors, predicted = best((0, 2))
        if phrase := block.counted(block.explained(predicted)):
            listed = _listed([figure(float(value)) for value in factors.reshape(-1)])
            return f"a factor of its own in each head ({listed}) {phrase}"
    if number > 1 and width >= FEWEST_CHANNELS:
        factors, predicted = best((1, 2))
        if phrase := block.counted(block.explained(predicted)):
            low, high = float(factors.min()), float(factors.max())
            return f"a factor of its own in each row ({figure(low)} to {figure(high)}) {phrase}"
    if heads > 1 and size >= FEWEST_CHANNELS:
        factors, predicted = best((2,))
        if phrase := block.counted(block.explained(predicted)):
            low, high = float(factors.min()), float(factors.max())
            return f"a factor of its own in each row and head ({figure(low)} to {figure(high)}) {phrase}"
    if number >= FEWEST_ROWS and number * width >= 4 * FEWEST_CHANNELS and size == width:
        factors, predicted = best((0,))
        if phrase := block.counted(block.explained(predicted)):
            return f"a factor of its own in each channel {phrase}"
    return _by_row_and_channel(block)


def _by_row_and_channel(block: Block) -> str:
    """A norm that is left out divides by a weight of each channel and a size of each row."""
    ours, right = block.ours, block.right
    number, width = ours.shape
    if number < 2 * FEWEST_ROWS or width < FEWEST_CHANNELS:
        return ""
    channels = torch.ones(width)
    rows = torch.ones(number, 1)
    for _ in range(8):  # alternating least squares; the weights that are far from one need a few rounds
        scaled = channels * right
        rows = (ours * scaled).sum(1, keepdim=True) / scaled.pow(2).sum(1, keepdim=True).clamp_min(1e-30)
        scaled = rows * right
        channels = (ours * scaled).sum(0) / scaled.pow(2).sum(0).clamp_min(1e-30)
    predicted = rows * channels * right
    usual = right.pow(2).mean(0).sqrt().clamp_min(1e-30)  # so that one large channel does not speak for the others
    if float(((ours - predicted) / usual).norm()) > float(((ours - right) / usual).norm()) / 2:
        return ""
    phrase = block.counted(block.explained(predicted))
    return phrase and f"a factor of each row times one of each channel, as of a norm that is left out, {phrase}"


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
    # the same direction in varying amounts: the first singular vector, by a few rounds of the power method
    direction = difference[difference.norm(dim=1).argmax()]
    for _ in range(4):
        direction = difference.T @ (difference @ (direction / direction.norm().clamp_min(1e-30)))
    direction = direction / direction.norm().clamp_min(1e-30)
    amounts = difference @ direction
    phrase = block.counted(block.explained(block.right + amounts[:, None] * direction))
    return phrase and f"one direction is added in an amount of each row {phrase}"


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
    """Channels, or whole heads, of other places."""
    number, width = block.ours.shape
    if number < FEWEST_ROWS or width < 2:
        return ""
    scale = block.whole.norm(dim=0).clamp_min(1e-30)
    distances = torch.cdist(block.ours.T.contiguous(), block.whole.T.contiguous())
    source = distances.argmin(1)
    off = (block.ours - block.whole[:, source]).norm(dim=0) / scale[source]
    if float((off <= max(block.allowed, 2e-5)).float().mean()) < MOST:
        return ""
    moved = source != block.columns
    phrase = f"at {number} of {number} rows"
    size = block.size
    total = block.whole.shape[1]
    if size < total and bool(((source % size) == (block.columns % size)).all()):
        heads = sorted({(int(a), int(b)) for a, b in zip(block.columns // size, source // size, strict=True)})
        pairs = [f"head {mine} has that of head {theirs}" for mine, theirs in heads if mine != theirs]
        return f"heads are of other places {phrase} ({_listed(pairs)})"
    inner, origin = block.columns % size, source % size
    half = size // 2
    rules = {
        "the halves are swapped": (inner + half) % size,
        "the order is reversed": size - 1 - inner,
        "channels lie in pairs in place of halves": (inner % 2) * half + inner // 2,
        "channels lie in halves in place of pairs": (inner % max(half, 1)) * 2 + inner // max(half, 1),
    }
    if size % 2 == 0 or half == 0:
        for words, rule in rules.items():
            if bool((origin == rule).float().mean() >= MOST):
                return f"{words}{' in each head' if size < total else ''} {phrase}"
    shifts = ((block.columns - source) % total).unique()
    if len(shifts) == 1:
        return f"channels are shifted by {int(shifts)} {phrase}"
    return f"channels are permuted {phrase} ({int(moved.sum())} of {len(moved)} moved)"


def _listed(items: list[str]) -> str:
    return ", ".join(items[:LISTED]) + (", ..." if len(items) > LISTED else "")


RELATIONS: tuple[Callable[[Block], str], ...] = (zero, factor, added, other_rows, other_channels)
