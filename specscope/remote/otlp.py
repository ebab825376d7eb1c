"""OTLP messages to the SDK's ReadableSpans, exactly: the inverse of what the OTLP exporters encode.

A message is one of opentelemetry.proto (protobuf) or of otlp_json.py (OTLP JSON). Both have the same fields; where the
first has an empty submessage, the second has None. Annotations name the protobuf types.

An export is taken apart before its spans are decoded, one at a time: two bytes can stand for a whole message, so that
16 MB of them decoded at once would take gigabytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from operator import attrgetter
from typing import Any, TypeVar

import msgspec
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
from opentelemetry.attributes import BoundedAttributes
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.common.v1.common_pb2 import InstrumentationScope as ScopeMessage
from opentelemetry.proto.resource.v1.resource_pb2 import Resource as ResourceMessage
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from opentelemetry.proto.trace.v1.trace_pb2 import Status as StatusMessage
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.util import BoundedList
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, SpanContext, SpanKind, Status, StatusCode, TraceFlags, TraceState

from specscope.trace import otlp_json
from specscope.trace.otlp_raw import RawRequest, RawResourceSpans, RawScopeSpans

PROTOBUF = "application/x-protobuf"
JSON = "application/json"
IS_REMOTE = 0x200  # in a span's or link's flags: the context they point to came from another process
SCALARS = frozenset(("string_value", "bool_value", "int_value", "double_value"))
MAX_SPANS = 2**15  # in an export, and as many resources and scopes
MAX_SPAN = 4 * 2**20  # bytes of one
MAX_EXTRAS = 2**16  # events and links of all spans of an export, and attributes of one

T = TypeVar("T")


def parse(body: bytes, kind: str = PROTOBUF) -> list[ReadableSpan]:
    """The spans of an ExportTraceServiceRequest in protobuf or, for kind `application/json`, in OTLP JSON.

    Raises ValueError, in one line, for anything else.
    """
    name = "OTLP JSON" if kind == JSON else "OTLP protobuf"
    try:
        return _json_spans(body) if kind == JSON else _proto_spans(body)
    except (ValueError, RecursionError, DecodeError, msgspec.MsgspecError) as error:
        raise ValueError(" ".join(f"the body is not {name}: {error}".split())[:300]) from None


def _proto_spans(body: bytes) -> list[ReadableSpan]:
    spans: list[ReadableSpan] = []
    bounds = _Bounds()
    for raw_resource in bounds.of(RawRequest.FromString(body).resource_spans):
        by_resource = RawResourceSpans.FromString(raw_resource)
        resource = _resource(ResourceMessage.FromString(by_resource.resource), by_resource.schema_url)
        for raw_scope in bounds.of(by_resource.scope_spans):
            by_scope = RawScopeSpans.FromString(raw_scope)
            scope = _scope(ScopeMessage.FromString(by_scope.scope), by_scope.schema_url)
            raw_spans = map(bounds.size, bounds.of(by_scope.spans))
            spans += [_span(bounds.check(Span.FromString(raw)), resource, scope) for raw in raw_spans]
    return spans


def _json_spans(body: bytes) -> list[ReadableSpan]:
    spans: list[ReadableSpan] = []
    bounds = _Bounds()
    for raw_resource in bounds.of(otlp_json.read_request(body).resource_spans):
        by_resource = otlp_json.read_resource(raw_resource)
        resource = _resource(by_resource.resource, by_resource.schema_url)
        for raw_scope in bounds.of(by_resource.scope_spans):
            by_scope = otlp_json.read_scope(raw_scope)
            scope = _scope(by_scope.scope, by_scope.schema_url)
            raw_spans = map(bounds.size, bounds.of(by_scope.spans))
            spans += [_span(bounds.check(otlp_json.read_span(raw)), resource, scope) for raw in raw_spans]
    return spans


class _Bounds:
    """How much an export may hold. Each method gives what it was given, or raises ValueError."""

    def __init__(self) -> None:
        self._parts = 0
        self._extras = 0

    def of(self, parts: Sequence[T]) -> Sequence[T]:
        """Resources, scopes or spans."""
        self._parts += len(parts)
        if self._parts > 3 * MAX_SPANS:
            raise ValueError(f"more than {MAX_SPANS} spans in one export: send fewer at a time")
        return parts

    def size(self, raw: bytes) -> bytes:
        """A span that is still encoded."""
        if (len(raw) if isinstance(raw, bytes) else memoryview(raw).nbytes) > MAX_SPAN:
            raise ValueError(f"a span is larger than {MAX_SPAN} bytes")
        return raw

    def check(self, span: T) -> T:
        """A span that is decoded."""
        message: Any = span
        self._extras += len(message.events) + len(message.links)
        if self._extras > MAX_EXTRAS or len(message.attributes) > MAX_EXTRAS:
            raise ValueError(f"more than {MAX_EXTRAS} events, links or attributes")
        return span


def from_proto(request: ExportTraceServiceRequest) -> list[ReadableSpan]:
    """The spans of a request (or of TracesData) of opentelemetry.proto.

    The conversion is exact: attributes keep their types (arrays become tuples), and the counts of attributes,
    events and links that the sender dropped are kept. Raises ValueError for an id that is none.
    """
    spans: list[ReadableSpan] = []
    for by_resource in request.resource_spans:
        resource = _resource(by_resource.resource, by_resource.schema_url)
        for by_scope in by_resource.scope_spans:
            scope = _scope(by_scope.scope, by_scope.schema_url)
            spans += [_span(span, resource, scope) for span in by_scope.spans]
    return spans


def _resource(resource: ResourceMessage | None, schema_url: str) -> Resource:
    return Resource(_attributes(resource.attributes) if resource else {}, schema_url)


def _scope(scope: ScopeMessage | None, schema_url: str) -> InstrumentationScope | None:
    if scope is None or not scope.name:
        return None
    return InstrumentationScope(scope.name, scope.version or None, schema_url, _attributes(scope.attributes))


def _span(span: Span, resource: Resource, scope: InstrumentationScope | None) -> ReadableSpan:
    trace_id = _id(span.trace_id, 16, "trace id")
    flags, state = TraceFlags(span.flags & 0xFF), _state(span.trace_state)
    parent = None
    if any(above := _bytes(span.parent_span_id)):
        parent_id = _id(above, 8, "parent span id")
        parent = SpanContext(trace_id, parent_id, bool(span.flags & IS_REMOTE), flags, state)
    return ReadableSpan(
        name=span.name,
        context=SpanContext(trace_id, _id(span.span_id, 8, "span id"), False, flags, state),
        parent=parent,
        resource=resource,
        attributes=_bounded(span.attributes, span.dropped_attributes_count),
        events=_bounded_list([_event(event) for event in span.events], span.dropped_events_count),
        links=_bounded_list([_link(link) for link in span.links], span.dropped_links_count),
        kind=SpanKind(span.kind - 1) if 1 <= span.kind <= len(SpanKind) else SpanKind.INTERNAL,
        status=_status(span.status),
        start_time=span.start_time_unix_nano or None,
        end_time=span.end_time_unix_nano or None,
        instrumentation_scope=scope,
    )


def _event(event: Span.Event) -> Event:
    return Event(event.name, _bounded(event.attributes, event.dropped_attributes_count), event.time_unix_nano)


def _link(link: Span.Link) -> Link:
    context = SpanContext(
        _id(link.trace_id, 16, "a link's trace id"),
        _id(link.span_id, 8, "a link's span id"),
        bool(link.flags & IS_REMOTE),
        TraceFlags(link.flags & 0xFF),
        _state(link.trace_state),
    )
    return Link(context, _bounded(link.attributes, link.dropped_attributes_count))


def _status(status: StatusMessage | None) -> Status:
    if status is None or status.code not in (StatusCode.OK.value, StatusCode.ERROR.value):
        return Status(StatusCode.UNSET)
    code = StatusCode(int(status.code))
    return Status(code, (status.message or None) if code is StatusCode.ERROR else None)


def _state(header: str) -> TraceState:
    return TraceState.from_header([header]) if header else TraceState()


def _id(value: bytes | str, size: int, what: str) -> int:
    value = _bytes(value)
    if len(value) != size or not any(value):
        raise ValueError(f"{what} must be {size} bytes and not all zero, not {value.hex() or 'empty'}")
    return int.from_bytes(value, "big")


def _bytes(value: bytes | str) -> bytes:
    """An id as it came: bytes in protobuf, hex in JSON."""
    return bytes.fromhex(value) if isinstance(value, str) else value


def _attributes(pairs: Iterable[KeyValue]) -> dict[str, Any]:
    return {pair.key: _value(pair.value) for pair in pairs}


def _value(value: AnyValue) -> object:
    """An AnyValue as the SDK holds it; one without a value is None."""
    kind = _kind(value)
    if kind is None:
        return None
    if kind == "array_value":
        return _array(value.array_value.values)
    if kind == "kvlist_value":
        return _attributes(value.kvlist_value.values)
    return getattr(value, kind)


def _array(items: Sequence[AnyValue]) -> tuple[object, ...]:
    kinds = {item.WhichOneof("value") for item in items}
    kind = kinds.pop() if len(kinds) == 1 else None
    if kind is not None and kind in SCALARS:  # the arrays over a tree's nodes: one look-up an element is enough
        return tuple(map(attrgetter(kind), items))
    return tuple(map(_value, items))


def _kind(value: AnyValue | None) -> str | None:
    """The name of the field that an AnyValue fills."""
    return value.WhichOneof("value") if value is not None else None


def _bounded(pairs: Iterable[KeyValue], dropped: int) -> Mapping[str, Any]:
    """Attributes; in the SDK's own container only where it has a count of dropped ones to carry, for it is slow."""
    values = _attributes(pairs)
    if not dropped:
        return values
    bounded = BoundedAttributes(attributes=values)
    bounded.dropped = dropped
    return bounded


def _bounded_list(items: list[T], dropped: int) -> Sequence[T]:
    if not dropped:
        return items
    bounded = BoundedList.from_seq(None, items)
    bounded.dropped = dropped
    return bounded
