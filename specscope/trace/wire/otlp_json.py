"""Spans of OTLP JSON, decoded by msgspec: lines of captures, and what comes over HTTP.

Only what a capture needs is read, and each span by itself: one that is not as declared costs no other.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from sys import intern
from typing import Any

import msgspec
import numpy as np
from msgspec import UNSET, Raw, Struct, UnsetType, field
from numpy.typing import NDArray

from specscope.trace.record.notes import DraftNotes
from specscope.trace.record.records import PHASES, RequestStep, Verdict
from specscope.trace.record.tree import DraftTree
from specscope.trace.wire.codec import DamagedError, plain_error, wired
from specscope.whole_file import MOST_OBJECTS

DRAWING = "specscope.drawing"  # left out: it can be drawn again
DECODE_STEP = "decode_step"
NUMBERS = frozenset(  # attributes of a decode step that are arrays of numbers
    field.attribute
    for kind in (DraftTree, Verdict, DraftNotes, RequestStep)
    for field in wired(kind)
    if field.dtype is not None
)
UNREAD = frozenset((*PHASES, "draft_pass"))  # captures of before have a span of each: nothing is read of these
SHORT = 64  # characters: shorter texts are kept once, as most are names that every step has
_BAD = (msgspec.MsgspecError, RecursionError, UnicodeDecodeError)


@dataclass(frozen=True, slots=True)
class ReadSpan:
    """A span, in whatever form it came."""

    name: str
    start_ns: int
    end_ns: int
    # Plain values and lists of them; None for a kind that no attribute of ours has. Of a decode step, arrays of numbers
    # as `Raw`, or as protobuf's LateArray: wire/tables.py reads those of many spans at once
    attributes: Mapping[str, Any]


Spans = Sequence[ReadSpan | DamagedError]
Parts = Sequence[tuple[Mapping[str, Any], Spans]]  # the attributes of each resource, and its spans


class Value(Struct, gc=False, rename="camel"):
    int_value: int | UnsetType = UNSET
    double_value: float | UnsetType = UNSET
    string_value: str | UnsetType = UNSET
    bool_value: bool | UnsetType = UNSET
    array_value: Raw | UnsetType = UNSET  # read when it is wanted: an array of evidence has many values


class _Array(Struct, gc=False):
    values: list[Value] = field(default_factory=list)


class _Pair(Struct, gc=False):
    key: str
    value: Value = field(default_factory=Value)


class _Span(Struct):
    name: str
    start_ns: int = field(name="startTimeUnixNano")
    end_ns: int = field(name="endTimeUnixNano")
    attributes: list[_Pair] = field(default_factory=list)


class _Resource(Struct):
    attributes: list[_Pair] = field(default_factory=list)


class _Scope(Struct):
    spans: list[Raw] = field(default_factory=list)


class _Part(Struct):
    resource: _Resource = field(default_factory=_Resource)
    scopes: list[_Scope] = field(name="scopeSpans", default_factory=list)


class _Line(Struct):
    parts: list[_Part] = field(name="resourceSpans")


# Not strict: OTLP JSON has 64-bit integers as strings.
_line = msgspec.json.Decoder(_Line, strict=False)
_span = msgspec.json.Decoder(_Span, strict=False)
_elements = msgspec.json.Decoder(_Array, strict=False)

_floats = msgspec.json.Decoder(list[float], strict=False)
_ints = msgspec.json.Decoder(list[int], strict=False)
_ENDS = b'{"values":[', b"]}"  # of an array


def read_line(line: bytes | bytearray) -> Parts:
    """The parts of a line, or of an export. A span that cannot be read is a DamagedError; else one is raised."""
    if line.count(b"{") > MOST_OBJECTS:
        raise DamagedError(f"it holds more than {MOST_OBJECTS:,} JSON objects, the limit")
    try:
        parts = _line.decode(line).parts
        return [(_plain(part.resource.attributes), [_read(x) for y in part.scopes for x in y.spans]) for part in parts]
    except _BAD as error:
        raise DamagedError(plain_error(error)) from None


def _read(raw: Raw) -> ReadSpan | DamagedError:
    try:
        span = _span.decode(raw)
        if span.name in UNREAD:
            return ReadSpan(span.name, span.start_ns, span.end_ns, {})
        late = NUMBERS if span.name == DECODE_STEP else ()
        return ReadSpan(span.name, span.start_ns, span.end_ns, _plain(span.attributes, late))
    except _BAD as error:
        return DamagedError(f"a span: {plain_error(error)}")


def _plain(pairs: Sequence[_Pair], late: Collection[str] = ()) -> dict[str, Any]:
    """Attributes as a dict, without the drawing. Arrays of these names are left as they are, for `elements`."""
    values = {}
    for pair in pairs:
        key, value = pair.key, pair.value
        if value.array_value is UNSET:
            if key != DRAWING:
                values[key] = _scalar(value)
        else:
            values[key] = value.array_value if key in late else elements(value.array_value)
    return values


def elements(raw: Raw) -> list[Any]:
    """The values of an array. Raises a msgspec error."""
    values = _elements.decode(raw).values
    if values and values[0].int_value is not UNSET:
        return [element.int_value for element in values]
    if values and values[0].double_value is not UNSET:
        return [element.double_value for element in values]
    texts = [element.string_value for element in values]
    return texts if UNSET not in texts else [_scalar(element) for element in values]


def all_elements(arrays: Sequence[Any], *, floats: bool) -> tuple[list[Any], NDArray[np.int64]] | None:
    """The numbers of many arrays, end to end, and how many each has; None where one is not `Raw`, or of other values.

    None stands for an array that is not there. What is left of such an array without the names is one of plain JSON.
    """
    form = b'{"doubleValue":' if floats else b'{"intValue":'
    begin, (left, right) = _ENDS[0] + form, map(len, _ENDS)
    texts, counts = [], np.zeros(len(arrays), np.int64)
    for place, array in enumerate(arrays):
        if array is None:
            continue
        text = bytes(array) if isinstance(array, Raw) else b""
        if not text.startswith(begin):
            return None
        texts.append(text[left:-right])
        counts[place] = text.count(b"}") - 1
    try:
        decoder = _floats if floats else _ints
        values: list[Any] = decoder.decode(b"[%b]" % b",".join(texts).replace(form, b"").replace(b"}", b""))
    except msgspec.MsgspecError:
        return None
    return (values, counts) if len(values) == counts.sum() else None


def _scalar(value: Value) -> Any:  # noqa: ANN401
    for scalar in (value.int_value, value.string_value, value.double_value, value.bool_value):
        if scalar is not UNSET:
            return intern(scalar) if isinstance(scalar, str) and len(scalar) < SHORT else scalar
    return None
