"""Helpers for arrays over the nodes of many steps: joined, stacked, numbered."""

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


def levels(above: Indices) -> Indices:
    """The level of each element: how many steps along `above` lead to -1, so that it is 1 at the top."""
    level, node = np.zeros(len(above), np.int64), np.arange(len(above))
    while (inside := node >= 0).any():
        level += inside
        node = np.where(inside, above[node], -1)
    return level


def places(sorted_keys: NDArray[np.generic]) -> Ints:
    """The place of each element, from 0, among those equal to it; equal elements are adjacent."""
    n = len(sorted_keys)
    new = np.ones(n, np.bool_)
    new[1:] = sorted_keys[1:] != sorted_keys[:-1]
    index = np.arange(n)
    return (index - np.maximum.accumulate(np.where(new, index, 0))).astype(np.int32)


def siblings(family: NDArray[Any]) -> Ints:
    """The place of each element, from 0, among those of its family, which need not be adjacent."""
    order = np.argsort(family, kind="stable")
    place = np.empty(len(order), np.int32)
    place[order] = places(family[order])
    return place
