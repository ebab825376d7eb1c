"""Whether wrong values are right ones rounded to a dtype of few bits."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from specscope.analyze.locate.model.block import MOST, Block, figure

# by their bits of mantissa: what has few of them is found among the values of what has more
FLOATS = {
    "float8_e5m2": torch.float8_e5m2,
    "float8_e4m3fn": torch.float8_e4m3fn,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
INT8 = 127
ROUNDINGS = 8  # an operation in a dtype of few bits rounds its inputs and what it sums, not its output alone
FEWEST_CHANNELS = 8


def rounded(block: Block) -> str:
    """Ours holds values of a dtype only, the right values are others, and the error has the size of its rounding."""
    ours, right = block.ours, block.right
    number, width = ours.shape
    if width < FEWEST_CHANNELS or not bool(ours.any()):
        return ""
    error = float((ours - right).norm() / right.norm().clamp_min(1e-30))
    sample = slice(None, None, max(1, number // 16))  # a few rows rule nearly all dtypes out
    for name, dtype in FLOATS.items():
        for scale, words in _scales(block, torch.finfo(dtype).max):
            if dtype in (torch.bfloat16, torch.float16) and words:
                continue
            if (
                _holds((ours / scale)[sample], dtype) >= MOST
                and _holds(ours / scale, dtype) >= MOST
                and _holds(right / scale, dtype) < 0.5
            ):
                if error <= ROUNDINGS * _error(right / scale, dtype):
                    return _values(name, words, number, error)
                break
    for scale, words in _scales(block, INT8):
        whole = words and min(_whole((ours / scale)[sample]), _whole(ours / scale)) >= MOST
        if whole and _whole(right / scale) < 0.5 and error < INT8**-0.5:
            return _values("int8", words, number, error)
    return ""


def _values(name: str, words: str, number: int, error: float) -> str:
    rows = "row" if number == 1 else "rows"
    return f"rounded to {name}{words}: ours holds only values of it at {number} {rows} (relative error {figure(error)})"


def _scales(block: Block, limit: float) -> Iterator[tuple[Tensor, str]]:
    """No scale, then those that make the largest value of all, a row, a head or a channel the dtype's largest."""
    size = block.ours.abs()
    number, width = size.shape
    yield torch.ones(1, 1), ""
    yield size.max().reshape(1, 1).clamp_min(1e-30) / limit, " with one scale"
    yield size.amax(1, keepdim=True).clamp_min(1e-30) / limit, " with a scale of each row"
    if block.heads > 1 and width % block.heads == 0:
        of_heads = size.reshape(number, block.heads, -1)
        for largest, words in (
            (of_heads.amax(2, keepdim=True), " with a scale of each row and head"),
            (of_heads.amax((0, 2), keepdim=True), " with a scale of each head"),
        ):
            yield largest.expand_as(of_heads).reshape(number, width).clamp_min(1e-30) / limit, words
    if number >= FEWEST_CHANNELS:
        yield size.amax(0, keepdim=True).clamp_min(1e-30) / limit, " with a scale of each channel"


def _holds(values: Tensor, dtype: torch.dtype) -> float:
    """The share of values that a dtype has; a scale was divided by, which costs a unit in the last place."""
    near = values.to(dtype).float()
    return float(((values - near).abs() <= 3e-7 * values.abs()).float().mean())


def _whole(values: Tensor) -> float:
    return float(((values - values.round()).abs() <= 1e-4).float().mean())


def _error(values: Tensor, dtype: torch.dtype) -> float:
    """The relative error of rounding values once; those beyond its largest are left out."""
    values = torch.where(values.abs() <= torch.finfo(dtype).max, values, 0.0)
    return float((values.to(dtype).float() - values).norm() / values.norm().clamp_min(1e-30))


def noise(block: Block) -> str:
    """A relative error of every row of the size of a dtype's rounding, in all channels; "" where it varies."""
    ours, right = block.ours, block.right
    number, width = ours.shape
    if number * width < 64 or width < FEWEST_CHANNELS:
        return ""
    difference = ours - right
    errors = difference.norm(dim=1) / right.norm(dim=1).clamp_min(1e-30)
    channels = difference.pow(2).mean(0).sqrt() / right.pow(2).mean().sqrt().clamp_min(1e-30)
    for spread in (errors, channels if number >= FEWEST_CHANNELS else errors):
        low, high = torch.quantile(spread[:4096], torch.tensor([0.05, 0.95])).tolist()
        if high > 8 * low:
            return ""
    error = float(errors.median())
    sizes = {name: _error(right, dtype) for name, dtype in FLOATS.items()}
    sizes = {name: size for name, size in sizes.items() if size and size / 2 < error < 2.5 * size}
    if not sizes:
        return ""
    name = min(sizes, key=lambda known: abs(sizes[known] - error))
    return f"noise of the size of {name}'s rounding (relative error {figure(error)}) at {number} of {number} rows"
