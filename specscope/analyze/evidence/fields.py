"""Fields of records over many steps as arrays, each laid out when it is first asked for."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from specscope.analyze.evidence.arrays import Indices, join, stack
from specscope.trace.record.tree import Doubles

T = TypeVar("T", bound=np.generic)


def of_trees(name: str, kind: type[T]) -> cached_property[NDArray[T]]:
    """[N] a field of DraftTree, laid out when it is first asked for."""

    def laid(columns: Any) -> NDArray[T]:  # noqa: ANN401 - Columns, which stands above this
        return join([getattr(part.tree, name) for part in columns.parts], kind)

    return cached_property(laid)


def of_verdicts(name: str, kind: type[T]) -> cached_property[NDArray[T]]:
    """[N] a field of Verdict, likewise."""
    return cached_property(lambda columns: join([getattr(verdict, name) for verdict in columns.verdicts], kind))


def of_notes(name: str, kind: type[T], missing: float) -> cached_property[NDArray[T]]:
    """[N] a field of DraftNotes, likewise; `missing` where the step has none."""
    return cached_property(
        lambda columns: _where_noted(columns, [part.notes for part in columns.parts], name, kind, missing)
    )


def of_methods(name: str, kind: type[T], missing: float) -> cached_property[NDArray[T]]:
    """[N] a field of MethodNotes, likewise."""
    return cached_property(
        lambda columns: _where_noted(columns, [part.method for part in columns.parts], name, kind, missing)
    )


def _where_noted(columns: Any, notes: Sequence[Any], name: str, kind: type[T], missing: float) -> NDArray[T]:  # noqa: ANN401
    """[N] a field of notes [S], each over its step's nodes; notes of another length count as missing."""
    column = np.full(len(columns.token), missing, kind)
    values = [np.zeros(0) if note is None else getattr(note, name) for note in notes]
    fits = np.array([len(array) for array in values], np.int64) == np.diff(columns.start)
    column[fits[columns.step]] = join([array for array, fit in zip(values, fits, strict=True) if fit], kind)
    return column


def of_parents(name: str, kind: type[T]) -> cached_property[NDArray[T]]:
    """[K] a field of ParentNotes, likewise."""
    return cached_property(lambda parents: join([getattr(note, name) for note in parents.notes], kind))


def stacked(name: str, kind: type[T]) -> cached_property[NDArray[T]]:
    """[K, t] a field of ParentNotes, likewise."""
    return cached_property(lambda parents: stack([getattr(note, name) for note in parents.notes], kind))


def width_of(name: str) -> cached_property[Indices]:
    """[K] how many columns of a field of [K, t] each parent's own step has."""

    def laid(parents: Any) -> Indices:  # noqa: ANN401
        shapes = np.array([getattr(note, name).shape for note in parents.notes], np.int64).reshape(-1, 2)
        return np.repeat(shapes[:, 1], shapes[:, 0])

    return cached_property(laid)


def of_their_nodes(name: str, kind: type[T]) -> cached_property[NDArray[T]]:
    """[N] a field of ParentNotes that is over the nodes, likewise; 0 where there are no notes."""

    def laid(parents: Any) -> NDArray[T]:  # noqa: ANN401
        column = np.zeros(len(parents.rows.steps), kind)
        column[parents.there[parents.rows.steps]] = join([getattr(note, name) for note in parents.notes], kind)
        return column

    return cached_property(laid)


def of_finals(name: str) -> cached_property[Doubles]:
    """[S] a figure of ParentNotes about the final token, likewise."""

    def laid(parents: Any) -> Doubles:  # noqa: ANN401
        column = np.zeros(len(parents.there))
        column[parents.there] = [getattr(note, name) for note in parents.notes]
        return column

    return cached_property(laid)
