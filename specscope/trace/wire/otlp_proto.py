"""OTLP protobuf, decoded a piece at a time: the outer messages, with what they hold left as bytes, and attributes.

On the wire a submessage and a bytes field are the same, so RawRequest reads what ExportTraceServiceRequest reads, which
is what TracesData reads. RawArray reads an ArrayValue, and RawScalars any number of AnyValues, laid end to end.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory  # type: ignore[import-untyped]
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, ArrayValue, KeyValue

from specscope.trace.wire.otlp_json import DRAWING

# Two bytes can encode a whole message: so what is decoded at once is bounded
MAX_SPAN = 4 * 2**20  # bytes of one
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


def plain(pairs: Iterable[KeyValue]) -> dict[str, Any]:
    """Attributes as a dict; the drawing is left out. The same as otlp_json.plain, of protobuf."""
    return {pair.key: _value(pair.value) for pair in pairs if pair.key != DRAWING}


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
