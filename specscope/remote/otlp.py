"""OTLP exports taken apart: the bytes of each span, checked, and what the decoder needs of them.

An export is in protobuf or in OTLP JSON. Either way its spans are decoded one at a time: two bytes can encode a
whole message, so that 16 MB of them decoded at once would take gigabytes. Until its turn comes, a span is kept
as bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
from opentelemetry.proto.resource.v1.resource_pb2 import Resource as ResourceMessage
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from specscope.trace.wire import otlp_json, otlp_proto
from specscope.trace.wire.otlp_proto import MAX_RESOURCE, MAX_SPAN, RawRequest, RawResourceSpans, RawScopeSpans

PROTOBUF = "application/x-protobuf"
JSON = "application/json"
MAX_SPANS = 2**15  # in an export, and as many resources and scopes
DECODED = 20  # times larger than its bytes is a message of the smallest values
MAX_EXTRAS = 2**16  # events and links of all spans of an export, and attributes of one

T = TypeVar("T")


@dataclass(frozen=True)
class Received:
    """A span as it arrived. It has been checked to be readable."""

    resource: Mapping[str, Any]  # its attributes; one for all spans of a resource
    raw: bytes | msgspec.Raw
    is_json: bool
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
        attributes = otlp_json.plain(span.attributes) if self.is_json else otlp_proto.plain(span.attributes)
        return span.name, span.start_time_unix_nano, span.end_time_unix_nano, attributes


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
        resource = otlp_proto.plain(ResourceMessage.FromString(by_resource.resource).attributes)
        for raw_scope in bounds.of(by_resource.scope_spans):
            by_scope = RawScopeSpans.FromString(raw_scope)
            for raw in bounds.of(by_scope.spans):
                yield bounds.check(Received(resource, raw, is_json=False, besides=besides))
                besides = 0


def _json_spans(body: bytes | bytearray) -> Iterator[Received]:
    bounds = _Bounds()
    for raw_resource in bounds.of(otlp_json.read_request(body).resource_spans):
        by_resource = otlp_json.read_resource(raw_resource)
        besides = bounds.besides(by_resource.resource)
        resource = otlp_json.attributes_of(by_resource.resource)
        for raw_scope in bounds.of(by_resource.scope_spans):
            by_scope = otlp_json.read_scope(raw_scope)
            for raw in bounds.of(by_scope.spans):  # copied: it is a view of the body, and would keep all of that
                yield bounds.check(Received(resource, raw.copy(), is_json=True, besides=besides))
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
        """Bytes that a resource takes, roughly: once decoded it is many times larger."""
        size = memoryview(raw).nbytes
        if size > MAX_RESOURCE:
            raise ValueError(f"a resource is larger than {MAX_RESOURCE} bytes")
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
