"""Attributes to columns: those of many spans, or the notes in them, checked and laid out at once, field by field.

What the fields of a record declare is all that is known here. Where anything is damaged, pieces are tried, and so on
down to the one span that the message is about.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import MISSING
from itertools import chain
from typing import Any, TypeVar

import msgspec
import numpy as np
from msgspec import UNSET, Raw

from specscope.trace.record.declared import DIMENSIONS, WireForm
from specscope.trace.record.privacy import NO_TOKEN
from specscope.trace.record.vocabulary import unescape
from specscope.trace.run.packed import NUMBERS, FieldColumns, Longs
from specscope.trace.wire.codec import (
    DamagedError,
    WireField,
    array_of_text,
    numbers_of_text,
    plain_error,
    read_json,
    unescaped,
    wired,
)
from specscope.trace.wire.otlp_json import all_elements, elements

Attributes = Mapping[str, Any]
Lengths = dict[str, Longs]  # of each letter of DIMENSIONS: [S] the length of such arrays in each span
PIECES = 16  # that spans are tried in of which one is damaged
S = TypeVar("S")
R = TypeVar("R")


def read_each(read: Callable[[Sequence[S]], Sequence[R]], spans: Sequence[S]) -> list[R | DamagedError]:
    """What is read of each of these, or what is wrong with it. `read`: raises DamagedError, of all or of one."""
    if not spans:
        return []
    try:
        return [*read(spans)]
    except DamagedError as error:
        if len(spans) == 1:
            return [error]
    size = -(-len(spans) // PIECES)
    pieces = [spans[begin : begin + size] for begin in range(0, len(spans), size)]
    return [each for piece in pieces for each in read_each(read, piece)]


def read_table(
    kind: type,
    attributes: Sequence[Attributes],
    lengths: Lengths | None = None,
    *,
    nameless: bool = False,
    notes: str = "",
    only: Collection[str] = (),
) -> FieldColumns:
    """A record of each of these. Raises DamagedError where anything in one is damaged.

    `lengths`: what is known, and what is found. `nameless`: token ids were left out. `notes`: the attribute whose JSON
    these are. `only`: attributes that are read.
    """
    table = _Table(len(attributes), {} if lengths is None else lengths, notes)
    left_out = []
    for field in wired(kind):
        if field.notes is None and field.wire.form is not WireForm.BY_HAND and (not only or field.attribute in only):
            if nameless and field.is_id:
                left_out.append(field)
            else:
                key = field.key
                table.add(field, [each.get(key, UNSET) for each in attributes])
    for field in left_out:
        table.add_left_out(field)
    return table.columns


class _Table:
    """The columns of one record, while they are filled."""

    def __init__(self, count: int, lengths: Lengths, notes: str) -> None:
        self._count, self._lengths, self._notes = count, lengths, notes
        self.columns = FieldColumns()

    def add(self, field: WireField, values: list[Any]) -> None:
        if field.dtype is None:
            plain, dtype = self._plain(field, values), NUMBERS.get(field.base)
            if dtype is None:
                self.columns.words[field.name] = plain
            else:
                self.columns.numbers[field.name] = np.fromiter(plain, dtype, self._count)
        elif self._notes:
            self._add_rows(field, self._checked(field, values))
        else:
            self._add_array(field, *_flat(field, [None if value is UNSET else value for value in values]))

    def add_left_out(self, field: WireField) -> None:
        """As many ids as there were, which were left out."""
        if field.dtype is None:
            self.columns.numbers[field.name] = np.full(self._count, NO_TOKEN)
            return
        nothing = np.zeros(self._count, np.int64)
        shape = [self._lengths.get(letter, nothing) for letter in field.dimensions]
        counts, shapes = np.prod(shape, axis=0), np.stack(shape, axis=1) if len(shape) > 1 else None
        self.columns.add(field.name, np.full(int(counts.sum()), NO_TOKEN, field.dtype), counts, shapes)

    def _plain(self, field: WireField, values: list[Any]) -> list[Any]:
        if field.is_list:
            values = [array_of_text(field.key, v, field.type) if isinstance(v, str) else v for v in values]
        values = self._checked(field, values)
        if field.wire.form is WireForm.ESCAPED:
            return [unescaped(text, field.key, _text) for text in values]
        if field.wire.form is WireForm.JSON:
            return [read_json(text, field.kind, field.key) for text in values]
        return values if field.default is None else [field.default if v is None else v for v in values]

    def _checked(self, field: WireField, values: list[Any]) -> list[Any]:
        if UNSET in values:
            if field.absent is MISSING:
                raise DamagedError(f"{self._where}Object missing required field `{field.key}`")
            values = [field.absent if value is UNSET else value for value in values]
        return converted(values, field.type, field.key, self._where)

    def _add_array(self, field: WireField, flat: Sequence[Any], counts: Longs) -> None:
        """An array of each record, end to end; of two dimensions row after row."""
        shapes = None
        if len(field.dimensions) > 1:
            rows = self._lengths.setdefault(field.dimensions[0], np.zeros(self._count, np.int64))
            if (wrong := (counts % np.maximum(rows, 1) != 0) | ((counts > 0) & (rows == 0))).any():
                raise DamagedError(f"{self._called(field)} holds {counts[wrong][0]} values for {rows[wrong][0]} rows")
            shapes = np.stack([rows, counts // np.maximum(rows, 1)], axis=1)
        else:
            self._as_long(field, counts)
        self.columns.add(field.name, np.fromiter(flat, field.dtype, len(flat)), counts, shapes)

    def _add_rows(self, field: WireField, values: Sequence[Sequence[Any]]) -> None:
        """An array of each record; of two dimensions as lists of rows."""
        counts = np.array([*map(len, values)], np.int64)
        self._as_long(field, counts)
        flat, shapes = chain.from_iterable(values), None
        if len(field.dimensions) > 1:
            widths = np.array([len(each[0]) if each else 0 for each in values], np.int64)
            known = self._lengths.setdefault(field.dimensions[1], widths)
            uneven = [any(len(row) != wide for row in each) for each, wide in zip(values, widths.tolist(), strict=True)]
            if (wrong := np.array(uneven, np.bool_) | ((counts > 0) & (widths != known))).any():
                raise DamagedError(f"{self._called(field)} has rows that do not hold {known[wrong][0]} values")
            flat, shapes, counts = chain.from_iterable(flat), np.stack([counts, widths], axis=1), counts * widths
        self.columns.add(field.name, np.fromiter(flat, field.dtype, int(counts.sum())), counts, shapes)

    def _as_long(self, field: WireField, counts: Longs) -> None:
        has_any = (counts > 0) | (not field.wire.per.endswith("?"))
        known = self._lengths.setdefault(field.dimensions[0], counts)
        if known is not counts and (wrong := has_any & (counts != known)).any():
            raise DamagedError(f"{self._called(field)} holds {counts[wrong][0]} values, not {known[wrong][0]}")

    @property
    def _where(self) -> str:
        return f"`{self._notes}`: " if self._notes else ""

    def _called(self, field: WireField) -> str:
        return f"{self._where}{field.name}" if self._notes else f"`{field.attribute}`"


def _text(text: str) -> str:
    return unescape(text).decode("utf-8", "surrogatepass")


def converted(values: list[Any], kind: Any, name: str, where: str = "") -> list[Any]:  # noqa: ANN401
    """These values, each checked as of this type. Raises DamagedError."""
    try:
        return msgspec.convert(values, list[kind])
    except (msgspec.MsgspecError, RecursionError) as error:
        raise DamagedError(where + str(error).replace(" - at `$[0]", f" in `{name}")) from None


def _flat(field: WireField, values: list[Any]) -> tuple[list[Any], Longs]:
    """The values of an array in all spans, end to end, checked; and how many each has."""
    kind = float if field.is_any_float else field.type
    read = all_elements(values, floats=field.is_float)
    lists = [] if read else [_listed(field.attribute, each, kind) for each in values]
    flat, counts = read or (list(chain.from_iterable(lists)), np.array([*map(len, lists)], np.int64))
    most = math.prod(DIMENSIONS[letter].most for letter in field.dimensions)
    if (counts > most).any():
        raise DamagedError(f"Expected `array` of length <= {most} in `{field.attribute}`")
    if read and field.is_any_float:
        return flat, counts
    try:
        return msgspec.convert(flat, list[kind]), counts  # type: ignore[valid-type]
    except msgspec.MsgspecError as error:
        raise DamagedError(str(error).replace(" - at `$", f" in `{field.attribute}")) from None


def _listed(name: str, value: Any, kind: Any) -> list[Any]:  # noqa: ANN401
    """An array in whatever form it came; its values are not checked."""
    try:
        value = elements(value) if isinstance(value, Raw) else [] if value is None else value
    except msgspec.MsgspecError as error:
        raise DamagedError(f"`{name}`: {plain_error(error)}") from None
    if isinstance(value, str) or (isinstance(value, list) and value and isinstance(value[0], str)):
        value = numbers_of_text(name, value, list[kind])
    return value if isinstance(value, list) else converted([value], list, name)[0]
