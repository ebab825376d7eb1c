"""The outer messages of an OTLP export with what they hold left as bytes, to be decoded a piece at a time.

On the wire a submessage and a bytes field are the same, so these read what ExportTraceServiceRequest reads. RawArray
reads an ArrayValue, and RawScalars any number of AnyValues, laid end to end.
"""

from __future__ import annotations

from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory  # type: ignore[import-untyped]

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
