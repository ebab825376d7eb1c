"""OTLP exports taken apart: the bytes of each span, checked, and what the decoder needs of them.

An export is in protobuf or in OTLP JSON. Either way its spans are decoded one at a time: two bytes can encode a
whole message, so that 16 MB of them decoded at once would take gigabytes. Until its turn comes, a span is kept
as bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, ArrayValue, KeyValue
from opentelemetry.proto.common.v1.common_pb2 import InstrumentationScope as ScopeMessage
from opentelemetry.proto.resource.v1.resource_pb2 import Resource as ResourceMessage
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from specscope.trace.wire import otlp_json
from specscope.trace.wire.engine_spans import EngineSpan, engine_span
from specscope.trace.wire.otlp_raw import RawArray, RawRequest, RawResourceSpans, RawScalars, RawScopeSpans

PROTOBUF = "application/x-protobuf"
JSON = "application/json"
SCALARS = {0x0A: "string_value", 0x10: "bool_value", 0x18: "int_value", 0x21: "double_value"}  # by first byte
MAX_SPANS = 2**15  # in an export, and as many resources and scopes
MAX_SPAN = 4 * 2**20  # bytes of one
MAX_RESOURCE = 2**16  # bytes of a resource or a scope: ours has 1.5 kB
DECODED = 20  # times larger than its bytes is a message of the smallest values
MAX_EXTRAS = 2**16  # events and links of all spans of an export, and attributes of one

T = TypeVar("T")


@dataclass(frozen=True)
class Received:
    """A span as it arrived. It has been checked to be readable."""

    resource: Mapping[str, Any]  # its attributes; one for all spans of a resource
    raw: bytes | msgspec.Raw
    is_json: bool
    scope: str = ""  # the name of its instrumentation scope
    besides: int = 0  # bytes of the resource, roughly: told by its first span

    @property
    def size(self) -> int:
        """Bytes that it takes, roughly."""
        return memoryview(self.raw).nbytes + self.besides

    def message(self) -> Any:  # noqa: ANN401
        """The decoded message: a Span of opentelemetry.proto, or otlp_json.WholeSpan, which has the same fields."""
        return otlp_json.read_span(self.raw) if self.is_json else Span.FromString(self.raw)

    def read(self) -> tuple[str, int, int, dict[str, Any]]:
        """Name, start, end and attributes: what Decoder.feed takes."""
        span = self.message()
        attributes = otlp_json.plain(span.attributes) if self.is_json else _plain(span.attributes)
        return span.name, span.start_time_unix_nano, span.end_time_unix_nano, attributes

    def other(self) -> EngineSpan:
        """The span as one of another service. Raises DamagedError."""
        span = self.message()
        trace_id, span_id, above = (
            _bytes(identifier).hex() for identifier in (span.trace_id, span.span_id, span.parent_span_id)
        )
        name, start, end, attributes = self.read()
        return engine_span((trace_id, span_id, above), name, self.resource, self.scope, (start, end), attributes)


def parse(body: bytes | bytearray, kind: str = PROTOBUF) -> list[Received]:
    """The spans of an ExportTraceServiceRequest in protobuf or, for kind `application/json`, in OTLP JSON.

    Raises ValueError, in one line, for anything else.
    """
    name = "OTLP JSON" if kind == JSON else "OTLP protobuf"
    try:
        return list(_json_spans(body) if kind == JSON else _proto_spans(body))
    except (ValueError, RecursionError, DecodeError, msgspec.MsgspecError) as error:
        raise ValueError(" ".join(f"the body is not {name}: {error}".split())[:300]) from None


def _proto_spans(body: bytes | bytearray) -> Iterator[Received]:
    bounds = _Bounds()
    for raw_resource in bounds.of(RawRequest.FromString(body).resource_spans):
        by_resource = RawResourceSpans.FromString(raw_resource)
        besides = bounds.besides(by_resource.resource)
        resource = _plain(ResourceMessage.FromString(by_resource.resource).attributes)
        for raw_scope in bounds.of(by_resource.scope_spans):
            by_scope = RawScopeSpans.FromString(raw_scope)
            besides += bounds.besides(by_scope.scope)
            scope = ScopeMessage.FromString(by_scope.scope).name
            for raw in bounds.of(by_scope.spans):
                yield bounds.check(Received(resource, raw, is_json=False, scope=scope, besides=besides))
                besides = 0


def _json_spans(body: bytes | bytearray) -> Iterator[Received]:
    bounds = _Bounds()
    for raw_resource in bounds.of(otlp_json.read_request(body).resource_spans):
        by_resource = otlp_json.read_resource(raw_resource)
        besides = bounds.besides(by_resource.resource)
        resource = otlp_json.attributes_of(by_resource.resource)
        for raw_scope in bounds.of(by_resource.scope_spans):
            by_scope = otlp_json.read_scope(raw_scope)
            besides += bounds.besides(by_scope.scope)
            scope = otlp_json.name_of(by_scope.scope)
            for raw in bounds.of(by_scope.spans):  # copied: it is a view of the body, and would keep all of that
                yield bounds.check(Received(resource, raw.copy(), is_json=True, scope=scope, besides=besides))
                besides = 0


class _Bounds:
    """How much an export may hold. Each method returns its argument, or raises ValueError."""

    def __init__(self) -> None:
        self._parts = 0
        self._extras = 0

    def of(self, parts: Sequence[T]) -> Sequence[T]:
        """Resources, scopes or spans."""
        self._parts += len(parts)
        if self._parts > 3 * MAX_SPANS:
            raise ValueError(f"more than {MAX_SPANS} spans in one export: send fewer at a time")
        return parts

    def besides(self, raw: bytes | msgspec.Raw) -> int:
        """Bytes that a resource or scope takes, roughly: once decoded it is many times larger."""
        size = memoryview(raw).nbytes
        if size > MAX_RESOURCE:
            raise ValueError(f"a resource or a scope is larger than {MAX_RESOURCE} bytes")
        return DECODED * size

    def check(self, received: Received) -> Received:
        """Check that a span can be read and that its ids are well-formed."""
        if memoryview(received.raw).nbytes > MAX_SPAN:
            raise ValueError(f"a span is larger than {MAX_SPAN} bytes")
        span = received.message()
        self._extras += len(span.events) + len(span.links)
        if self._extras > MAX_EXTRAS or len(span.attributes) > MAX_EXTRAS:
            raise ValueError(f"more than {MAX_EXTRAS} events, links or attributes")
        _check_id(span.trace_id, 16, "trace id")
        _check_id(span.span_id, 8, "span id")
        if any(above := _bytes(span.parent_span_id)):
            _check_id(above, 8, "parent span id")
        for link in span.links:
            _check_id(link.trace_id, 16, "a link's trace id")
            _check_id(link.span_id, 8, "a link's span id")
        return received


def _check_id(value: bytes | str, size: int, what: str) -> None:
    value = _bytes(value)
    if len(value) != size or not any(value):
        raise ValueError(f"{what} must be {size} bytes and not all zero, not {value.hex() or 'empty'}")


def _bytes(value: bytes | str) -> bytes:
    """An id as it came: bytes in protobuf, hex in JSON."""
    return bytes.fromhex(value) if isinstance(value, str) else value


def _plain(pairs: Iterable[KeyValue]) -> dict[str, Any]:
    """Attributes as a dict; the drawing is left out. The same as otlp_json.plain, of protobuf."""
    return {pair.key: _value(pair.value) for pair in pairs if pair.key != otlp_json.DRAWING}


def _value(value: AnyValue) -> Any:  # noqa: ANN401
    """The Python value of an AnyValue; None for one of a kind that no attribute of ours has."""
    kind = str(value.WhichOneof("value"))
    if kind == "array_value":
        return _array(value.array_value)
    return getattr(value, kind) if kind in SCALARS.values() else None


def _array(array: ArrayValue) -> list[Any]:
    """The values of an array, nearly always of one kind.

    Laid end to end, the encodings of n AnyValues of one scalar kind are that of a repeated scalar: so they are read at
    once. Of any other array not all n come back in one field.
    """
    items = RawArray.FromString(array.SerializeToString()).values
    kind = SCALARS.get(items[0][0]) if items and items[0] else None
    if kind is not None:
        values = list(getattr(RawScalars.FromString(b"".join(items)), kind))
        if len(values) == len(items):
            return values
    return [None if item.WhichOneof("value") == "array_value" else _value(item) for item in array.values]
