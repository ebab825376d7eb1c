"""Arrays over many steps: fields of their records gathered from a run's columns, joined, stacked, numbered."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from specscope.trace.record.tree import Bools, Doubles, Ints
from specscope.trace.run.packed import Picked

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


def joined(picked: Sequence[Picked], held: str, name: str, kind: type[T]) -> NDArray[T]:
    """The values of an array at all of these steps, end to end."""
    return join([each.values(held, name) for each in picked], kind)


def holding(picked: Sequence[Picked], held: str) -> Bools:
    """[S] whether each step holds one: a verdict, notes."""
    return join([each.places(held) >= 0 for each in picked], np.bool_)


def lengths(picked: Sequence[Picked], held: str, name: str) -> Indices:
    """[S] how many values an array has at each step; 0 where it holds none."""
    return join([each.counts(held, name) for each in picked], np.int64)


def numbers(picked: Sequence[Picked], held: str, name: str, missing: float = 0) -> NDArray[Any]:
    """[S] a number of what each step holds; `missing` where it holds nothing."""
    columns = []
    for each in picked:
        places, column = each.places(held), each.table(held).numbers[name]
        known = column[places] if len(column) else np.zeros(len(places), column.dtype)
        columns.append(np.where(places < 0, np.array(missing, column.dtype), known))
    return np.concatenate(columns) if columns else np.zeros(0)


def words(picked: Sequence[Picked], held: str, name: str) -> list[Any]:
    """[S] a text, a name or None of what each step holds; None where it holds nothing."""
    each_of = ((each.table(held).words[name], each.places(held).tolist()) for each in picked)
    return [None if place < 0 else known[place] for known, places in each_of for place in places]


def flags(of: Callable[[Any], Any]) -> cached_property[Bools]:
    """A column that follows from others, computed when it is first asked for."""
    return cached_property(of)


def indices(of: Callable[[Any], Any]) -> cached_property[Indices]:
    """Likewise."""
    return cached_property(of)


def doubles(of: Callable[[Any], Any]) -> cached_property[Doubles]:
    """Likewise."""
    return cached_property(of)


def column(held: str, name: str, kind: type[T], missing: float | None = None) -> cached_property[NDArray[T]]:
    """A field of what the steps hold, end to end; over the nodes, with `missing` where notes do not tell it."""
    if missing is None:
        return cached_property(lambda table: joined(table.picked, held, name, kind))
    return cached_property(lambda columns: where_told(columns, held, name, kind, missing))


def number_of(held: str, name: str) -> cached_property[NDArray[Any]]:
    """[S] a number of what each step holds, likewise."""
    return cached_property(lambda table: numbers(table.picked, held, name))


def where_told(columns: Any, held: str, name: str, kind: type[T], missing: float) -> NDArray[T]:  # noqa: ANN401
    """[N] a field of notes over the nodes; `missing` where they tell nothing."""
    values, (fits, counts) = np.full(len(columns.token), missing, kind), fitting(columns, held, name)
    values[fits[columns.step]] = joined(columns.picked, held, name, kind)[np.repeat(fits, counts)]
    return values


def fitting(columns: Any, held: str, name: str) -> tuple[Bools, Indices]:  # noqa: ANN401
    """[S] which steps' notes have a value of this field for each node, and how many they have."""
    counts = lengths(columns.picked, held, name)
    return holding(columns.picked, held) & (counts == np.diff(columns.start)), counts


def stacked(name: str, kind: type[T]) -> cached_property[NDArray[T]]:
    """[K, t] a field of ParentNotes, padded to the largest t: with -1 for tokens, with 0 for probabilities."""
    nothing = -1 if kind is np.int64 else 0
    return cached_property(lambda parents: padded(parents.picked, "parents", name, kind, nothing))


def padded(picked: Sequence[Picked], held: str, name: str, kind: type[T], missing: float) -> NDArray[T]:
    """[K, t] the rows of an array of two dimensions at all steps, padded to the widest."""
    width, values = widths(picked, held, name), joined(picked, held, name, kind)
    table: NDArray[T] = np.full((len(width), width.max(initial=0)), missing, kind)
    table[np.arange(table.shape[1]) < width[:, None]] = values
    return table


def widths(picked: Sequence[Picked], held: str, name: str) -> Indices:
    """[K] how many columns each of those rows has."""
    shapes = [each.table(held).shapes[name][each.there(held)] for each in picked]
    every = np.concatenate(shapes) if shapes else np.zeros((0, 2), np.int64)
    return np.repeat(every[:, 1], every[:, 0])
