"""Fields of records over many steps as arrays, each laid out when it is first asked for."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from specscope.trace.record.tree import Doubles

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


def of_trees(name: str, kind: type[T]) -> cached_property[NDArray[T]]:
    """[N] a field of DraftTree, laid out when it is first asked for."""

    def laid(columns: Any) -> NDArray[T]:  # noqa: ANN401 - Columns, which stands above this
        return join([getattr(visit.part.tree, name) for visit in columns.visits], kind)

    return cached_property(laid)


def of_verdicts(name: str, kind: type[T]) -> cached_property[NDArray[T]]:
    """[N] a field of Verdict, likewise."""
    return cached_property(lambda columns: join([getattr(one, name) for one in columns.verdicts], kind))


def of_parents(name: str, kind: type[T]) -> cached_property[NDArray[T]]:
    """[K] a field of ParentNotes, likewise."""
    return cached_property(lambda parents: join([getattr(one, name) for one in parents.notes], kind))


def stacked(name: str, kind: type[T]) -> cached_property[NDArray[T]]:
    """[K, t] a field of ParentNotes, likewise."""
    return cached_property(lambda parents: stack([getattr(one, name) for one in parents.notes], kind))


def of_their_nodes(name: str, kind: type[T]) -> cached_property[NDArray[T]]:
    """[N] a field of ParentNotes that is over the nodes, likewise; 0 where there are no notes."""

    def laid(parents: Any) -> NDArray[T]:  # noqa: ANN401
        found = np.zeros(len(parents.columns.token), kind)
        found[parents.there[parents.columns.step]] = join([getattr(one, name) for one in parents.notes], kind)
        return found

    return cached_property(laid)


def of_finals(name: str) -> cached_property[Doubles]:
    """[S] a figure of ParentNotes about the final token, likewise."""

    def laid(parents: Any) -> Doubles:  # noqa: ANN401
        found = np.zeros(len(parents.columns))
        found[parents.there] = [getattr(one, name) for one in parents.notes]
        return found

    return cached_property(laid)
