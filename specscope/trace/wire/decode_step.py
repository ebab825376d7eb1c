"""Decode steps to columns: the evidence of many spans, checked and laid out at once, with no record for each.

What a record's fields declare is read over all spans field by field, and what hangs together is compared as whole
columns. Where any of it is damaged, pieces are tried, and so on down to the one span that the message is about.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import msgspec
import numpy as np
from msgspec import UNSET, Raw
from numpy.typing import NDArray

from specscope.trace.record.declared import DIMENSIONS
from specscope.trace.record.notes import ParentNotes
from specscope.trace.record.privacy import NO_TOKEN
from specscope.trace.record.records import RequestStep
from specscope.trace.run.packed import HELD, NUMBERS, FieldColumns, Longs, PackedParts
from specscope.trace.wire import schema
from specscope.trace.wire.codec import (
    DamagedError,
    WireField,
    array_of_text,
    is_text,
    notes_struct,
    plain_error,
    read_json,
    wired,
)
from specscope.trace.wire.otlp_json import all_elements, elements
from specscope.tree_shape import ROOT

Attributes = Mapping[str, Any]
Span = tuple[schema.DecodeStep, Attributes]  # what one says of itself, and all that it says
Lengths = dict[str, Longs]  # of each letter of DIMENSIONS: [S] the length of such arrays in each span
PIECES = 16  # that spans are tried in of which one is damaged


Part = tuple[RequestStep, Sequence[str]]  # in columns with others; the texts of ParentNotes.named, if there are any


def read_parts(spans: Sequence[Span], *, nameless: bool) -> list[Part | DamagedError]:
    """The steps of these spans in columns, or what is wrong with one. `nameless`: token ids were left out."""
    if not spans:
        return []
    try:
        return [*_parts([span for span, _ in spans], [attributes for _, attributes in spans], nameless)]
    except DamagedError as error:
        if len(spans) == 1:
            return [error]
    size = -(-len(spans) // PIECES)
    pieces = [spans[begin : begin + size] for begin in range(0, len(spans), size)]
    return [part for piece in pieces for part in read_parts(piece, nameless=nameless)]


def _parts(spans: Sequence[schema.DecodeStep], attributes: Sequence[Attributes], nameless: bool) -> list[Part]:
    """The steps, checked. Raises DamagedError where anything in one is damaged; the message is of the only one."""
    lengths: Lengths = {}
    own = _of_attributes(RequestStep, attributes, lengths, nameless)
    everywhere, has_notes = np.ones(len(spans), np.bool_), np.array([span.dropped is not UNSET for span in spans])
    held = {
        name: (everywhere, _of_attributes(HELD[name], attributes, lengths, nameless)) for name in ("tree", "verdict")
    }
    dropped = np.array([span.dropped for span in spans if span.dropped is not UNSET], np.int64)
    with_notes = [each for each, there in zip(attributes, has_notes, strict=True) if there]
    of_notes = {**_some(lengths, has_notes), "d": dropped}
    held["notes"] = has_notes, _of_attributes(HELD["notes"], with_notes, of_notes, nameless)
    lengths["e"] = own.numbers["emitted"]
    parsed: dict[str, list[Any]] = {}
    for field in wired(RequestStep):
        if field.notes is not None:
            struct = schema.Parents if field.notes is ParentNotes else notes_struct(field.notes)
            texts = _converted([each.get(field.attribute, "") for each in attributes], field.many, field.attribute)
            there = np.array(list(map(bool, texts)), np.bool_)
            parsed[field.name] = [read_json(text, struct, field.attribute) for text in texts if text]
            held[field.name] = there, _of_notes(field, parsed[field.name], _some(lengths, there), nameless)
    packed = PackedParts(own, held)
    _check(packed, spans, lengths["n"], lengths["a"])
    likeliest: list[Sequence[str]] = [*(notes.text for notes in parsed["parents"]), ()]
    return [(packed[row], likeliest[place]) for row, place in enumerate(packed.rows["parents"].tolist())]


def _some(lengths: Lengths, there: NDArray[np.bool_]) -> Lengths:
    return {letter: each[there] for letter, each in lengths.items()}


def _of_attributes(kind: type, attributes: Sequence[Attributes], lengths: Lengths, nameless: bool) -> FieldColumns:
    table = _Table(len(attributes), lengths, nameless)
    for field in wired(kind):
        if field.notes is None and not table.leaves_out(field):
            values = [each.get(field.attribute) for each in attributes]
            if field.dtype is None:
                table.add_plain(field, _plain(field, values, attributes))
            else:
                table.add_array(field, *_flat(field, values))
    return table.columns()


def _of_notes(field: WireField, parsed: Sequence[Any], lengths: Lengths, nameless: bool) -> FieldColumns:
    table = _Table(len(parsed), lengths, nameless, field.attribute)
    for inner in wired(field.notes):
        if table.leaves_out(inner):
            continue
        values = [getattr(notes, inner.slot) for notes in parsed]
        if inner.dtype is None:
            table.add_plain(inner, values)
        elif len(inner.dimensions) == 1:
            table.add_array(inner, list(chain.from_iterable(values)), _counts(values))
        else:
            table.add_rows(inner, values)
    return table.columns()


def _check(packed: PackedParts, spans: Sequence[schema.DecodeStep], n: Longs, accepted: Longs) -> None:
    """What holds between fields of a step."""
    tree, verdict, notes = (packed.held[name] for name in ("tree", "verdict", "notes"))
    _parents_first("specscope.tree.parent", tree, "parent", np.zeros(len(spans), np.int64))
    _parents_first("specscope.draft.dropped_parent", notes, "dropped_parent", n[packed.rows["notes"] >= 0])
    _check_path(verdict, tree, n)
    for name, holds in (("drafted", n), ("accepted", accepted)):
        says = np.array([getattr(span, name) for span in spans])
        if (wrong := says != holds).any():
            raise DamagedError(f"`specscope.{name}` is {says[wrong][0]}, the arrays hold {holds[wrong][0]}")
    emitted = packed.parts.numbers["emitted"]
    if (wrong := emitted > accepted + 1).any():
        few = accepted[wrong][0] + 1
        raise DamagedError(f"`specscope.emitted` is {emitted[wrong][0]}, only {few} were committed")
    for span, nodes in zip(spans, n.tolist(), strict=True):
        if span.text and len(span.text) != nodes + 1:
            raise DamagedError(f"`specscope.tree.text` holds {len(span.text)} texts for {nodes + 1} tokens")
    _check_nodes("specscope.forced", verdict, "forced", n, n)
    _check_nodes("specscope.kv.moved", packed.parts, "moved", n, n - 1)
    for name in ("parents", "form"):
        nodes = n[packed.rows[name] >= 0]
        _check_nodes(f"specscope.{name}", packed.held[name], "node", nodes, nodes - 1)


class _Table:
    """The columns of one record, while they are filled."""

    def __init__(self, count: int, lengths: Lengths, nameless: bool, where: str = "") -> None:
        self._count, self._lengths, self._nameless, self._where = count, lengths, nameless, where
        self._columns = FieldColumns()
        self._gone: list[WireField] = []

    def leaves_out(self, field: WireField) -> bool:
        """Whether these are ids that were left out; then something stands for them."""
        is_gone = self._nameless and field.is_id
        if is_gone:
            self._gone.append(field)
        return is_gone

    def add_plain(self, field: WireField, values: list[Any]) -> None:
        dtype = NUMBERS.get(field.base)
        if dtype is None:
            self._columns.words[field.name] = values
        else:
            self._columns.numbers[field.name] = np.fromiter(values, dtype, self._count)

    def add_array(self, field: WireField, flat: Sequence[Any], counts: Longs) -> None:
        """An array of each record, end to end; of two dimensions row after row."""
        shapes = None
        if len(field.dimensions) > 1:
            rows = self._lengths.setdefault(field.dimensions[0], np.zeros(self._count, np.int64))
            if (wrong := (counts % np.maximum(rows, 1) != 0) | ((counts > 0) & (rows == 0))).any():
                raise DamagedError(f"{self._called(field)} holds {counts[wrong][0]} values for {rows[wrong][0]} rows")
            shapes = np.stack([rows, counts // np.maximum(rows, 1)], axis=1)
        else:
            self._as_long(field, counts)
        self._columns.add(field.name, np.fromiter(flat, field.dtype, len(flat)), counts, shapes)

    def add_rows(self, field: WireField, values: Sequence[Sequence[Sequence[Any]]]) -> None:
        """An array of two dimensions of each record, as lists of rows."""
        inner = field.dimensions[1]
        rows, widths = _counts(values), np.array([len(each[0]) if each else 0 for each in values], np.int64)
        self._as_long(field, rows)
        known = self._lengths.setdefault(inner, widths)
        uneven = [any(len(row) != width for row in each) for each, width in zip(values, widths.tolist(), strict=True)]
        if (wrong := np.array(uneven, np.bool_) | ((rows > 0) & (widths != known))).any():
            raise DamagedError(f"{self._called(field)} has rows that do not hold {known[wrong][0]} values")
        flat = list(chain.from_iterable(chain.from_iterable(values)))
        shapes = np.stack([rows, widths], axis=1)
        self._columns.add(field.name, np.fromiter(flat, field.dtype, len(flat)), rows * widths, shapes)

    def _as_long(self, field: WireField, counts: Longs) -> None:
        """Check that arrays over the same are of one length in each record."""
        has_any = (counts > 0) | (not field.wire.per.endswith("?"))
        known = self._lengths.setdefault(field.dimensions[0], counts)
        if known is not counts and (wrong := has_any & (counts != known)).any():
            raise DamagedError(f"{self._called(field)} holds {counts[wrong][0]} values, not {known[wrong][0]}")

    def _called(self, field: WireField) -> str:
        return f"`{self._where}`: {field.name}" if self._where else f"`{field.attribute}`"

    def columns(self) -> FieldColumns:
        nothing = np.zeros(self._count, np.int64)
        for field in self._gone:
            if field.dtype is None:
                self._columns.numbers[field.name] = np.full(self._count, NO_TOKEN)
                continue
            shape = [self._lengths.get(letter, nothing) for letter in field.dimensions]
            counts, shapes = np.prod(shape, axis=0), np.stack(shape, axis=1) if len(shape) > 1 else None
            self._columns.add(field.name, np.full(int(counts.sum()), NO_TOKEN, field.dtype), counts, shapes)
        return self._columns


def _counts(values: Sequence[Sequence[Any]]) -> Longs:
    return np.fromiter(map(len, values), np.int64, len(values))


def _converted(values: list[Any], kind: Any, name: str) -> list[Any]:  # noqa: ANN401
    try:
        return msgspec.convert(values, kind)  # type: ignore[no-any-return]
    except (msgspec.MsgspecError, RecursionError) as error:
        raise DamagedError(str(error).replace(" - at `$[0]", f" in `{name}")) from None


def _plain(field: WireField, values: list[Any], attributes: Sequence[Attributes]) -> list[Any]:
    default = field.checked_as[1]
    if None in values:
        absent = UNSET if field.is_id else default.get("default", UNSET)
        values = [each.get(field.attribute, absent) for each in attributes]
        if UNSET in values:
            raise DamagedError(f"Object missing required field `{field.attribute}`")
    return _converted(values, field.many, field.attribute)


def _flat(field: WireField, values: list[Any]) -> tuple[list[Any], Longs]:
    """The values of an array in all spans, end to end, checked; and how many each has."""
    together = getattr(next(filter(None, values), None), "all_elements", all_elements)  # protobuf's have their own
    read = together(values, floats=field.is_float)
    lists = [] if read else [_listed(field, each) for each in values]
    flat, counts = read or (list(chain.from_iterable(lists)), _counts(lists))
    most = math.prod(DIMENSIONS[letter].most for letter in field.dimensions)
    if (counts > most).any():
        raise DamagedError(f"Expected `array` of length <= {most} in `{field.attribute}`")
    if field.is_any_float:
        return flat, counts
    try:
        return msgspec.convert(flat, field.many), counts
    except msgspec.MsgspecError as error:
        raise DamagedError(str(error).replace(" - at `$", f" in `{field.attribute}")) from None


def _listed(field: WireField, value: Any) -> list[Any]:  # noqa: ANN401
    kind = list[float] if field.is_float else field.many
    try:
        value = elements(value) if isinstance(value, Raw) else [] if value is None else value
        value = value.elements() if hasattr(value, "elements") else value
    except msgspec.MsgspecError as error:
        raise DamagedError(f"`{field.attribute}`: {plain_error(error)}") from None
    if is_text(value, kind):
        value = array_of_text(field.attribute, value, kind)
    return _converted([value], list[kind], field.attribute)[0]  # type: ignore[valid-type, no-any-return]


def _inner(table: FieldColumns, name: str) -> tuple[NDArray[Any], Longs, Longs]:
    """An array of all records end to end, the record of each value, and its place in that record's array."""
    ends = table.ends[name]
    counts = np.diff(ends)
    record = np.repeat(np.arange(len(counts)), counts)
    return table.arrays[name], record, np.arange(len(record)) - ends[record]


def _parents_first(name: str, table: FieldColumns, column: str, first: Longs) -> None:
    """Nodes `first` and on of each record: every parent comes before its child."""
    above, record, place = _inner(table, column)
    node = place + first[record]
    if (wrong := above >= node).any():
        at, parent = node[wrong][0], above[wrong][0]
        raise DamagedError(f"`{name}`: node {parent} cannot be the parent of node {at}: parents come first")


def _check_path(verdict: FieldColumns, tree: FieldColumns, n: Longs) -> None:
    """A path goes from the root down; whether each of its nodes was accepted, `verify` judges."""
    path, record, place = _inner(verdict, "path")
    wrong = path >= n[record]
    if not wrong.any():
        above = np.where(place == 0, ROOT, np.concatenate([[ROOT], path[:-1]])[: len(path)])
        wrong = tree.arrays["parent"][tree.ends["parent"][record] + path] != above
    if wrong.any():
        raise DamagedError("`specscope.verdict.path` is not a path of accepted nodes from the root")


def _check_nodes(name: str, table: FieldColumns, column: str, n: Longs, last: Longs) -> None:
    """Nodes are of the tree of n, the `last` included."""
    nodes, record, _ = _inner(table, column)
    if (wrong := nodes > last[record]).any():
        raise DamagedError(f"`{name}` names node {nodes[wrong].max()} of {n[record][wrong][0]}")
