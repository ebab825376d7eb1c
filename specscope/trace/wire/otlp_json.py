"""Spans of OTLP JSON, decoded by msgspec: lines of captures, and what comes over HTTP.

Only what a capture needs is read. A line is decoded at once where it is whole; where anything in it is not as declared,
its spans are decoded one by one, and those that fail are named.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import msgspec
from msgspec import UNSET, Raw, Struct, UnsetType, field

from specscope.trace.wire.codec import DamagedError, plain_error
from specscope.whole_file import MOST_OBJECTS

DRAWING = "specscope.drawing"  # left out: it can be drawn again
_BAD = (msgspec.MsgspecError, RecursionError, UnicodeDecodeError)


@dataclass(frozen=True, slots=True)
class ReadSpan:
    """A span, in whatever form it came."""

    name: str
    start_ns: int
    end_ns: int
    attributes: dict[str, Any]  # plain values and lists of them; None for a kind that no attribute of ours has


Spans = Sequence[ReadSpan | DamagedError]
Parts = Sequence[tuple[Mapping[str, Any], Spans]]  # the attributes of each resource, and its spans


class Value(Struct, gc=False, rename="camel"):
    """AnyValue."""

    int_value: int | UnsetType = UNSET
    double_value: float | UnsetType = UNSET
    string_value: str | UnsetType = UNSET
    bool_value: bool | UnsetType = UNSET
    array_value: _Array | UnsetType = UNSET


class _Array(Struct, gc=False):
    values: list[Value] = field(default_factory=list)


class _Pair(Struct, gc=False):
    key: str
    value: Value = field(default_factory=Value)


class _RawPair(Struct):
    key: str
    value: Raw = Raw(b"{}")


class _Span(Struct):
    name: str
    start_ns: int = field(name="startTimeUnixNano")
    end_ns: int = field(name="endTimeUnixNano")
    attributes: list[_Pair] = field(default_factory=list)


class _RawSpan(Struct):
    name: str
    start_ns: int = field(name="startTimeUnixNano")
    end_ns: int = field(name="endTimeUnixNano")
    attributes: list[_RawPair] = field(default_factory=list)


class _Resource(Struct):
    attributes: list[_Pair] = field(default_factory=list)


S = TypeVar("S", _Span, Raw)


class _Scope(Struct, Generic[S]):
    spans: list[S] = field(default_factory=list)


class _Part(Struct, Generic[S]):
    resource: _Resource = field(default_factory=_Resource)
    scopes: list[_Scope[S]] = field(name="scopeSpans", default_factory=list)


class _Line(Struct, Generic[S]):
    parts: list[_Part[S]] = field(name="resourceSpans")


# Not strict: OTLP JSON has 64-bit integers as strings.
_line = msgspec.json.Decoder(_Line[_Span], strict=False)
_raw_line = msgspec.json.Decoder(_Line[Raw], strict=False)
_raw_span = msgspec.json.Decoder(_RawSpan, strict=False)
_value = msgspec.json.Decoder(Value, strict=False)


def read_line(line: bytes | bytearray) -> Parts:
    """The parts of a line, or of an export; a span that cannot be read is a DamagedError.

    Raises DamagedError where the line as a whole cannot be read.
    """
    if line.count(b"{") > MOST_OBJECTS:
        raise DamagedError(f"it holds more than {MOST_OBJECTS:,} JSON objects, the limit")
    try:
        return [
            (
                _plain(part.resource.attributes),
                [ReadSpan(x.name, x.start_ns, x.end_ns, _plain(x.attributes)) for y in part.scopes for x in y.spans],
            )
            for part in _line.decode(line).parts
        ]
    except _BAD:
        pass
    try:
        parts = _raw_line.decode(line).parts
    except _BAD as error:
        raise DamagedError(plain_error(error)) from None
    return [(_plain(part.resource.attributes), [_read(x) for y in part.scopes for x in y.spans]) for part in parts]


def _read(raw: Raw) -> ReadSpan | DamagedError:
    name = "a span"
    pairs: list[_Pair] = []
    try:
        span = _raw_span.decode(raw)
        for pair in span.attributes:
            name = f"{span.name}: `{pair.key}`"
            pairs.append(_Pair(pair.key, _value.decode(pair.value)))
    except _BAD as error:
        return DamagedError(f"{name}: {plain_error(error)}")
    return ReadSpan(span.name, span.start_ns, span.end_ns, _plain(pairs))


def _plain(pairs: Sequence[_Pair]) -> dict[str, Any]:
    """Attributes as a dict; the drawing is left out."""
    return {pair.key: _value_of(pair.value) for pair in pairs if pair.key != DRAWING}


def _value_of(value: Value) -> Any:  # noqa: ANN401
    """The Python value of an AnyValue; None for one of a kind that no attribute of ours has."""
    if value.array_value is UNSET:
        return _scalar(value)
    values = value.array_value.values
    if values and values[0].int_value is not UNSET:
        return [element.int_value for element in values]
    if values and values[0].double_value is not UNSET:
        return [element.double_value for element in values]
    return [_scalar(element) for element in values]


def _scalar(value: Value) -> Any:  # noqa: ANN401
    for candidate in (value.int_value, value.double_value, value.string_value, value.bool_value):
        if candidate is not UNSET:
            return candidate
    return None
