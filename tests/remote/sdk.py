"""What a receiver took, as the SDK's ReadableSpans: the inverse of what the OTLP exporters encode, field by field.

A message is one of opentelemetry.proto (protobuf) or of otlp_json.py (OTLP JSON). Both have the same fields; where the
first has an empty submessage, the second has None.
"""

from __future__ import annotations

from opentelemetry.attributes import BoundedAttributes
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.util import BoundedList
from opentelemetry.trace import Link, SpanContext, SpanKind, Status, StatusCode, TraceFlags, TraceState

IS_REMOTE = 0x200  # in a span's or link's flags: the context they point to came from another process


def sdk_spans(received):
    """A ReadableSpan for each span that was received."""
    return [_span(one.message(), Resource({k: _tuple(v) for k, v in one.resource.items()})) for one in received]


def _tuple(value):
    return tuple(value) if isinstance(value, list) else value


def _span(span, resource):
    trace_id = _id(span.trace_id)
    flags, state = TraceFlags(span.flags & 0xFF), _state(span.trace_state)
    parent = None
    if any(_bytes(span.parent_span_id)):
        parent = SpanContext(trace_id, _id(span.parent_span_id), bool(span.flags & IS_REMOTE), flags, state)
    return ReadableSpan(
        name=span.name,
        context=SpanContext(trace_id, _id(span.span_id), False, flags, state),
        parent=parent,
        resource=resource,
        attributes=_bounded(span.attributes, span.dropped_attributes_count),
        events=_bounded_list([_event(event) for event in span.events], span.dropped_events_count),
        links=_bounded_list([_link(link) for link in span.links], span.dropped_links_count),
        kind=SpanKind(span.kind - 1) if 1 <= span.kind <= len(SpanKind) else SpanKind.INTERNAL,
        status=_status(span.status),
        start_time=span.start_time_unix_nano or None,
        end_time=span.end_time_unix_nano or None,
    )


def _event(event):
    return Event(event.name, _bounded(event.attributes, event.dropped_attributes_count), event.time_unix_nano)


def _link(link):
    own = (_id(link.trace_id), _id(link.span_id))
    context = SpanContext(*own, bool(link.flags & IS_REMOTE), TraceFlags(link.flags & 0xFF), _state(link.trace_state))
    return Link(context, _bounded(link.attributes, link.dropped_attributes_count))


def _status(status):
    if status is None or status.code not in (StatusCode.OK.value, StatusCode.ERROR.value):
        return Status(StatusCode.UNSET)
    code = StatusCode(int(status.code))
    return Status(code, (status.message or None) if code is StatusCode.ERROR else None)


def _state(header):
    return TraceState.from_header([header]) if header else TraceState()


def _id(value):
    return int.from_bytes(_bytes(value), "big")


def _bytes(value):
    """An id as it came: bytes in protobuf, hex in JSON."""
    return bytes.fromhex(value) if isinstance(value, str) else value


def _attributes(pairs):
    return {pair.key: _value(pair.value) for pair in pairs}


def _value(value):
    """An AnyValue as the SDK holds it; one without a value is None."""
    kind = value.WhichOneof("value") if value is not None else None
    if kind is None:
        return None
    if kind == "array_value":
        return tuple(map(_value, value.array_value.values))
    if kind == "kvlist_value":
        return _attributes(value.kvlist_value.values)
    return getattr(value, kind)


def _bounded(pairs, dropped):
    """Attributes, with a count of those that the sender dropped."""
    values = _attributes(pairs)
    if not dropped:
        return values
    bounded = BoundedAttributes(attributes=values)
    bounded.dropped = dropped
    return bounded


def _bounded_list(items, dropped):
    if not dropped:
        return items
    bounded = BoundedList.from_seq(None, items)
    bounded.dropped = dropped
    return bounded
