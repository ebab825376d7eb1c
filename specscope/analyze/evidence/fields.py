"""Fields of records over many steps as arrays, each laid out when it is first asked for."""

from __future__ import annotations

from functools import cached_property
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from specscope.analyze.evidence.arrays import Indices, join, stack
from specscope.trace.record.tree import Bools, Doubles

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
    return cached_property(lambda columns: _where_told(columns, "notes", name, kind, missing))


def of_methods(name: str, kind: type[T], missing: float) -> cached_property[NDArray[T]]:
    """[N] a field of MethodNotes, likewise."""
    return cached_property(lambda columns: _where_told(columns, "method", name, kind, missing))


def tells_method(name: str) -> cached_property[Bools]:
    """[N] whether the step's MethodNotes have a value of this field for each node."""
    return cached_property(lambda columns: _fitting(columns, "method", name)[0][columns.step])


def _where_told(columns: Any, notes: str, name: str, kind: type[T], missing: float) -> NDArray[T]:  # noqa: ANN401
    """[N] a field of notes over the nodes; `missing` where they tell nothing."""
    column, (fits, values) = np.full(len(columns.token), missing, kind), _fitting(columns, notes, name)
    column[fits[columns.step]] = join(values, kind)
    return column


def _fitting(columns: Any, notes: str, name: str) -> tuple[Bools, list[NDArray[Any]]]:  # noqa: ANN401
    """[S] which steps' notes have a value of this field for each node, and these; another length tells nothing."""
    fits, values = np.zeros(len(columns), np.bool_), []
    for step, (part, size) in enumerate(zip(columns.parts, np.diff(columns.start).tolist(), strict=True)):
        if (note := getattr(part, notes)) is not None and len(array := getattr(note, name)) == size:
            fits[step] = True
            values.append(array)
    return fits, values


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
