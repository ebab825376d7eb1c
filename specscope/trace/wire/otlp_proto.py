"""Spans of OTLP protobuf, decoded a piece at a time: the outer messages, with what they hold left as bytes, then spans.

On the wire a submessage and a bytes field are the same, so RawRequest reads what ExportTraceServiceRequest reads, which
is what TracesData reads. RawArray reads an ArrayValue, and RawScalars any number of AnyValues, laid end to end.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

import numpy as np
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory  # type: ignore[import-untyped]
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
from numpy.typing import NDArray
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, ArrayValue, KeyValue
from opentelemetry.proto.resource.v1.resource_pb2 import Resource
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from specscope.trace.wire.codec import DamagedError
from specscope.trace.wire.otlp_json import DECODE_STEP, DRAWING, NUMBERS, Parts, ReadSpan, Spans

# Two bytes can encode a whole message: so what is decoded at once is bounded
MAX_SPAN = 4 * 2**20  # bytes of one
MAX_SPANS = 2**15  # of a message, and as many resources and scopes
MAX_RESOURCE = 2**16  # bytes of a resource: ours has 1.5 kB
SCALARS = {0x0A: "string_value", 0x10: "bool_value", 0x18: "int_value", 0x21: "double_value"}  # by first byte

_BYTES = descriptor_pb2.FieldDescriptorProto.TYPE_BYTES
_STRING = descriptor_pb2.FieldDescriptorProto.TYPE_STRING
_BOOL = descriptor_pb2.FieldDescriptorProto.TYPE_BOOL
_INT64 = descriptor_pb2.FieldDescriptorProto.TYPE_INT64
_DOUBLE = descriptor_pb2.FieldDescriptorProto.TYPE_DOUBLE
_ONE = descriptor_pb2.FieldDescriptorProto.LABEL_OPTIONAL
_MANY = descriptor_pb2.FieldDescriptorProto.LABEL_REPEATED

# Message: its fields, by number from 1.
_MESSAGES = {
    "RawRequest": [("resource_spans", _BYTES, _MANY)],
    "RawResourceSpans": [
        ("resource", _BYTES, _ONE),
        ("scope_spans", _BYTES, _MANY),
        ("schema_url", _STRING, _ONE),
    ],
    "RawScopeSpans": [("scope", _BYTES, _ONE), ("spans", _BYTES, _MANY), ("schema_url", _STRING, _ONE)],
    "RawArray": [("values", _BYTES, _MANY)],
    "RawScalars": [
        ("string_value", _STRING, _MANY),
        ("bool_value", _BOOL, _MANY),
        ("int_value", _INT64, _MANY),
        ("double_value", _DOUBLE, _MANY),
    ],
}


def _classes() -> dict[str, Any]:
    file = descriptor_pb2.FileDescriptorProto(name="specscope/otlp_raw.proto", package="specscope", syntax="proto3")
    for name, fields in _MESSAGES.items():
        message = file.message_type.add(name=name)
        for number, (field, kind, label) in enumerate(fields, 1):
            message.field.add(name=field, number=number, type=kind, label=label)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {
        name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"specscope.{name}")) for name in _MESSAGES
    }


_made = _classes()
RawRequest = _made["RawRequest"]
RawResourceSpans = _made["RawResourceSpans"]
RawScopeSpans = _made["RawScopeSpans"]
RawArray = _made["RawArray"]
RawScalars = _made["RawScalars"]


def read_request(message: bytes | bytearray) -> Parts:
    """The parts of a TracesData, or of an export, which has the same form. Raises DecodeError, ValueError."""
    return list(map(read_resource, _bounded(RawRequest.FromString(message).resource_spans)))


def read_resource(raw: bytes) -> tuple[dict[str, Any], Spans]:
    """A ResourceSpans: its resource, and its spans. Raises DecodeError, and ValueError where it is too large."""
    part = RawResourceSpans.FromString(raw)
    if len(part.resource) > MAX_RESOURCE:
        raise ValueError(f"a resource is larger than {MAX_RESOURCE} bytes")
    scopes = map(RawScopeSpans.FromString, _bounded(part.scope_spans))
    spans = [raw_span for scope in scopes for raw_span in _bounded(scope.spans)]
    return _plain(Resource.FromString(part.resource).attributes), list(map(_span, _bounded(spans)))


def _bounded(messages: Sequence[bytes]) -> Sequence[bytes]:
    if len(messages) > MAX_SPANS:
        raise ValueError(f"more than {MAX_SPANS:,} spans, scopes or resources in one export: send fewer at a time")
    return messages


def _span(raw: bytes) -> ReadSpan | DamagedError:
    if len(raw) > MAX_SPAN:
        return DamagedError(f"a span larger than {MAX_SPAN} bytes")
    try:
        span = Span.FromString(raw)
        late = NUMBERS if span.name == DECODE_STEP else ()
        return ReadSpan(span.name, span.start_time_unix_nano, span.end_time_unix_nano, _plain(span.attributes, late))
    except DecodeError:
        return DamagedError("a span that is not OTLP protobuf")


def _plain(pairs: Iterable[KeyValue], late: Collection[str] = ()) -> dict[str, Any]:
    """Attributes as a dict, without the drawing. Arrays of the names in `late` are read when they are wanted."""
    return {
        pair.key: LateArray(pair.value.array_value)
        if pair.key in late and pair.value.WhichOneof("value") == "array_value"
        else _value(pair.value)
        for pair in pairs
        if pair.key != DRAWING
    }


class LateArray:
    """An array that is not read yet: wire/decode_step.py reads those of many spans together."""

    __slots__ = ("_message",)

    def __init__(self, message: ArrayValue) -> None:
        self._message = message

    def elements(self) -> list[Any]:
        """Its values."""
        return _array(self._message)

    @staticmethod
    def all_elements(arrays: Sequence[Any], *, floats: bool) -> tuple[list[Any], NDArray[np.int64]] | None:
        """As otlp_json.all_elements: end to end, the encodings of arrays are that of one."""
        if not all(array is None or isinstance(array, LateArray) for array in arrays):
            return None
        messages = [None if array is None else array._message for array in arrays]
        counts = np.array([0 if message is None else len(message.values) for message in messages], np.int64)
        whole = b"".join(message.SerializeToString() for message in messages if message is not None)
        scalars = RawScalars.FromString(b"".join(RawArray.FromString(whole).values))
        values = list(scalars.double_value if floats else scalars.int_value)
        return (values, counts) if len(values) == counts.sum() else None


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
