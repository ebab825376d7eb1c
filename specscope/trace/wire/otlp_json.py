"""OTLP JSON as typed messages, decoded by msgspec: lines of captures, and what comes over HTTP.

Of a line only what a capture needs is read. It is decoded at once where it is whole; where anything in it is not as
declared, its spans are decoded one by one, and those that fail are named.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from msgspec import UNSET, Raw, Struct, UnsetType, field

from specscope.trace.wire.codec import DamagedError, plain_error

DRAWING = "specscope.drawing"  # left out: it can be drawn again
KINDS = ("string_value", "bool_value", "int_value", "double_value", "array_value", "kvlist_value", "bytes_value")


class Value(Struct, gc=False, rename="camel"):
    """AnyValue."""

    int_value: int | UnsetType = UNSET
    double_value: float | UnsetType = UNSET
    string_value: str | UnsetType = UNSET
    bool_value: bool | UnsetType = UNSET
    array_value: Array | UnsetType = UNSET
    kvlist_value: Pairs | UnsetType = UNSET
    bytes_value: bytes | UnsetType = UNSET

    def WhichOneof(self, name: str) -> str | None:  # noqa: N802 - as protobuf has it
        """The name of the field that is filled."""
        return next((kind for kind in KINDS if getattr(self, kind) is not UNSET), None)


class Array(Struct, gc=False):
    """ArrayValue."""

    values: list[Value] = field(default_factory=list)


class KeyValue(Struct, gc=False):
    """KeyValue."""

    key: str
    value: Value = field(default_factory=Value)


class Pairs(Struct, gc=False):
    """KeyValueList."""

    values: list[KeyValue] = field(default_factory=list)


class SpanMessage(Struct):
    """Span."""

    name: str
    start_ns: int = field(name="startTimeUnixNano")
    end_ns: int = field(name="endTimeUnixNano")
    attributes: list[KeyValue] = field(default_factory=list)


class _Scope(Struct):
    spans: list[SpanMessage] = field(default_factory=list)


class _Resource(Struct):
    attributes: list[KeyValue] = field(default_factory=list)


class _Part(Struct):
    resource: _Resource
    scopes: list[_Scope] = field(name="scopeSpans", default_factory=list)


class _Line(Struct):
    parts: list[_Part] = field(name="resourceSpans")


class _RawPair(Struct):
    key: str
    value: Raw


class _RawSpan(Struct):
    name: str
    start_ns: int = field(name="startTimeUnixNano")
    end_ns: int = field(name="endTimeUnixNano")
    attributes: list[_RawPair] = field(default_factory=list)


class _RawScope(Struct):
    spans: list[Raw] = field(default_factory=list)


class _RawPart(Struct):
    resource: _Resource
    scopes: list[_RawScope] = field(name="scopeSpans", default_factory=list)


class _RawLine(Struct):
    parts: list[_RawPart] = field(name="resourceSpans")


class ResourceMessage(Struct, rename="camel"):
    """Resource."""

    attributes: list[KeyValue] = field(default_factory=list)


NONE = Raw(b"null")


class RawScopeSpans(Struct, rename="camel"):
    """ScopeSpans, its spans not decoded."""

    spans: list[Raw] = field(default_factory=list)
    schema_url: str = ""


class RawResourceSpans(Struct, rename="camel"):
    """ResourceSpans, neither its resource nor its scopes decoded."""

    resource: Raw = NONE
    scope_spans: list[Raw] = field(default_factory=list)
    schema_url: str = ""


class RawRequest(Struct, rename="camel"):
    """ExportTraceServiceRequest, its resources not decoded."""

    resource_spans: list[Raw] = field(default_factory=list)


class _Dated(Struct, rename="camel"):
    attributes: list[KeyValue] = field(default_factory=list)
    dropped_attributes_count: int = 0


class EventMessage(_Dated, rename="camel"):
    """Span.Event."""

    name: str = ""
    time_unix_nano: int = 0


class LinkMessage(_Dated, rename="camel"):
    """Span.Link."""

    trace_id: str = ""  # ids are hex in OTLP JSON
    span_id: str = ""
    trace_state: str = ""
    flags: int = 0


class StatusMessage(Struct):
    """Status."""

    code: int = 0
    message: str = ""


class WholeSpan(_Dated, rename="camel"):
    """Span, all of it."""

    trace_id: str = ""
    span_id: str = ""
    parent_span_id: str = ""
    trace_state: str = ""
    flags: int = 0
    name: str = ""
    kind: int = 0
    start_time_unix_nano: int = 0
    end_time_unix_nano: int = 0
    events: list[EventMessage] = field(default_factory=list)
    dropped_events_count: int = 0
    links: list[LinkMessage] = field(default_factory=list)
    dropped_links_count: int = 0
    status: StatusMessage | None = None


# Not strict: OTLP JSON has 64-bit integers as strings.
_line = msgspec.json.Decoder(_Line, strict=False)
_raw_line = msgspec.json.Decoder(_RawLine, strict=False)
_raw_span = msgspec.json.Decoder(_RawSpan, strict=False)
_value = msgspec.json.Decoder(Value, strict=False)

# Of an export: each raises what msgspec raises, or RecursionError. They stand for protobuf's messages.
read_request: Callable[[bytes | bytearray], Any] = msgspec.json.Decoder(RawRequest, strict=False).decode
read_resource: Callable[[Any], Any] = msgspec.json.Decoder(RawResourceSpans, strict=False).decode
read_scope: Callable[[Any], Any] = msgspec.json.Decoder(RawScopeSpans, strict=False).decode
_resource = msgspec.json.Decoder(ResourceMessage | None, strict=False)
read_span: Callable[[Any], Any] = msgspec.json.Decoder(WholeSpan, strict=False).decode
_BAD = (msgspec.MsgspecError, RecursionError, UnicodeDecodeError)

Spans = Sequence[SpanMessage | DamagedError]


def read_line(line: bytes) -> list[tuple[dict[str, Any], Spans]]:
    """(attributes of the resource, spans) of each part of a line; a span that cannot be read is a DamagedError.

    Raises DamagedError where the line as a whole cannot be read.
    """
    try:
        whole = _line.decode(line).parts
    except _BAD:
        return _piece_by_piece(line)
    return [(plain(part.resource.attributes), [x for scope in part.scopes for x in scope.spans]) for part in whole]


def _piece_by_piece(line: bytes) -> list[tuple[dict[str, Any], Spans]]:
    try:
        parts = _raw_line.decode(line).parts
    except _BAD as error:
        raise DamagedError(plain_error(error)) from None
    return [
        (plain(part.resource.attributes), [_one(raw) for scope in part.scopes for raw in scope.spans]) for part in parts
    ]


def _one(raw: Raw) -> SpanMessage | DamagedError:
    name = "a span"
    try:
        span = _raw_span.decode(raw)
        pairs = []
        for pair in span.attributes:
            name = f"{span.name}: `{pair.key}`"
            pairs.append(KeyValue(pair.key, _value.decode(pair.value)))
    except _BAD as error:
        return DamagedError(f"{name}: {plain_error(error)}")
    return SpanMessage(span.name, span.start_ns, span.end_ns, pairs)


def attributes_of(resource: Raw) -> dict[str, Any]:
    """The attributes of a resource that was not decoded yet."""
    message = _resource.decode(resource)
    return plain(message.attributes) if message else {}


def plain(pairs: Sequence[KeyValue]) -> dict[str, Any]:
    """Attributes as a dict; the drawing is left out."""
    return {pair.key: _plain(pair.value) for pair in pairs if pair.key != DRAWING}


def _plain(value: Value) -> Any:  # noqa: ANN401
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
