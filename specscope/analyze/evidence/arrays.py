"""Numbers over all nodes of many steps, and how they hang together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from specscope.trace.record.tree import Ints

Indices = NDArray[np.int64]
T = TypeVar("T", bound=np.generic)


def join(arrays: Sequence[NDArray[Any]], dtype: type[T]) -> NDArray[T]:
    """The arrays one after the other."""
    return np.concatenate(arrays).astype(dtype) if arrays else np.zeros(0, dtype)


def stack(arrays: Sequence[NDArray[Any]], dtype: type[T]) -> NDArray[T]:
    """Arrays of [k, t] one below the other, t the largest: filled with tokens -1, or probabilities 0."""
    shapes = np.array([array.shape for array in arrays], np.int64).reshape(-1, 2)
    out: NDArray[T] = np.full((shapes[:, 0].sum(), shapes[:, 1].max(initial=0)), -1 if dtype is np.int64 else 0, dtype)
    width = np.repeat(shapes[:, 1], shapes[:, 0])  # of each row
    for t in np.unique(width).tolist():
        out[width == t, :t] = np.concatenate([array for array in arrays if array.shape[1] == t])
    return out


def levels(above: Indices) -> Indices:
    """How many steps up, by `above`, lead out of the array (-1): 1 for those at the top."""
    level, at = np.zeros(len(above), np.int64), np.arange(len(above))
    while (inside := at >= 0).any():
        level += inside
        at = np.where(inside, above[at], -1)
    return level


def places(sorted_keys: NDArray[np.generic]) -> Ints:
    """The place of each element among those that equal it, in an array where equal ones lie together."""
    n = len(sorted_keys)
    new = np.ones(n, np.bool_)
    new[1:] = sorted_keys[1:] != sorted_keys[:-1]
    at = np.arange(n)
    return (at - np.maximum.accumulate(np.where(new, at, 0))).astype(np.int32)


def siblings(family: NDArray[Any]) -> Ints:
    """The place of each element among those of the same family, wherever they lie, in their order."""
    order = np.argsort(family, kind="stable")
    place = np.empty(len(order), np.int32)
    place[order] = places(family[order])
    return place


def slices(first: Indices, count: NDArray[np.integer]) -> Indices:
    """The indices of several slices, one after the other."""
    total = int(count.sum())
    begin = np.repeat(first - (np.cumsum(count) - count), count)
    return begin + np.arange(total)
