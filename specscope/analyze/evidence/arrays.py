"""Arrays over many steps: fields of their records gathered from a run's columns, joined, stacked, numbered."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from specscope.trace.record.tree import Bools, Doubles
from specscope.trace.run.packed import Picked

Indices = NDArray[np.int64]
T = TypeVar("T", bound=np.generic)


def levels(above: Indices) -> Indices:
    """The level of each element: how many steps along `above` lead to -1, so that it is 1 at the top."""
    level, node = np.zeros(len(above), np.int64), np.arange(len(above))
    while (inside := node >= 0).any():
        level += inside
        node = np.where(inside, above[node], -1)
    return level


def places(keys: NDArray[np.generic]) -> Indices:
    """The place of each element, from 0, among those equal to it; equal elements are adjacent."""
    _, first, which = np.unique(keys, return_index=True, return_inverse=True)
    return np.asarray(np.arange(len(keys)) - first[which], np.int64)


def siblings(family: NDArray[Any]) -> Indices:
    """The place of each element, from 0, among those of its family, which need not be adjacent."""
    order = np.argsort(family, kind="stable")
    place = np.empty(len(order), np.int64)
    place[order] = places(family[order])
    return place


def previous(keys: NDArray[np.generic]) -> Indices:
    """The element before each among those equal to it; -1 for the first."""
    order = np.argsort(keys, kind="stable")
    same = np.flatnonzero(keys[order][1:] == keys[order][:-1])
    before = np.full(len(keys), -1)
    before[order[same + 1]] = order[same]
    return before


def numbered(names: Iterable[object]) -> Indices:
    """A number for each name, equal for equal ones, from 0 in the order in which they come."""
    known: dict[object, int] = {}
    return np.array([known.setdefault(name, len(known)) for name in names], np.int64)


def _join(arrays: Sequence[NDArray[Any]], dtype: type[T]) -> NDArray[T]:
    return np.concatenate(arrays).astype(dtype) if arrays else np.zeros(0, dtype)


def joined(picked: Sequence[Picked], held: str, name: str, kind: type[T]) -> NDArray[T]:
    """The values of an array at all of these steps, end to end."""
    return _join([each.values(held, name) for each in picked], kind)


def holding(picked: Sequence[Picked], held: str) -> Bools:
    """[S] whether each step holds one: a verdict, notes."""
    return _join([each.places(held) >= 0 for each in picked], np.bool_)


def lengths(picked: Sequence[Picked], held: str, name: str) -> Indices:
    """[S] how many values an array has at each step; 0 where it holds none."""
    return _join([each.counts(held, name) for each in picked], np.int64)


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


# Columns that follow from others, computed when they are first asked for
flags, indices, doubles = cached_property[Bools], cached_property[Indices], cached_property[Doubles]


def column(held: str, name: str, kind: type[T]) -> cached_property[NDArray[T]]:
    """A field of what the steps hold, end to end."""
    return cached_property(lambda table: joined(table.picked, held, name, kind))


def number_of(held: str, name: str) -> cached_property[NDArray[Any]]:
    """[S] a number of what each step holds, likewise."""
    return cached_property(lambda table: numbers(table.picked, held, name))


def of_nodes(held: str, name: str, kind: type[T], missing: float) -> cached_property[NDArray[T]]:
    """[N] a field of notes over the nodes of Columns, or of its parents; `missing` where they tell nothing."""

    def laid(table: Any) -> NDArray[T]:  # noqa: ANN401
        c = getattr(table, "columns", table)
        values, fits = np.full(len(c.token), missing, kind), fitting(c, held, name)
        values[fits[c.step]] = joined(c.picked, held, name, kind)[np.repeat(fits, lengths(c.picked, held, name))]
        return values

    return cached_property(laid)


def fitting(c: Any, held: str, name: str) -> Bools:  # noqa: ANN401
    """[S] which steps' notes have a value of this field for each node of Columns."""
    return np.asarray(holding(c.picked, held) & (lengths(c.picked, held, name) == np.diff(c.start)))


def stacked(name: str, kind: type[T]) -> cached_property[NDArray[T]]:
    """[K, t] a field of ParentNotes, padded to the largest t: with -1 for tokens, with 0 for probabilities."""
    return cached_property(lambda e: padded(e.picked, "parents", name, kind, -1 if kind is np.int64 else 0))


def padded(picked: Sequence[Picked], held: str, name: str, kind: type[T], missing: float) -> NDArray[T]:
    """[K, t] the rows of an array of two dimensions at all steps, padded to the widest."""
    width = widths(picked, held, name)
    table: NDArray[T] = np.full((len(width), width.max(initial=0)), missing, kind)
    table[np.arange(table.shape[1]) < width[:, None]] = joined(picked, held, name, kind)
    return table


def widths(picked: Sequence[Picked], held: str, name: str) -> Indices:
    """[K] how many columns each of those rows has."""
    shapes = [each.table(held).shapes[name][each.there(held)] for each in picked]
    every = np.concatenate(shapes) if shapes else np.zeros((0, 2), np.int64)
    return np.repeat(every[:, 1], every[:, 0])
