"""Spans of OTLP protobuf, decoded a piece at a time: the outer messages, with what they hold left as bytes, then spans.

On the wire a submessage and a bytes field are the same, so RawRequest reads what ExportTraceServiceRequest reads, which
is what TracesData reads. RawArray reads an ArrayValue, and RawScalars any number of AnyValues, laid end to end.

A file of it is a TracesData, or messages with the length of each before it, as 4 bytes, big endian: so the collector's
file exporter writes it with `format: proto`, and with `compression: zstd`, which compresses each, also JSON, by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from io import BufferedReader, BytesIO
from itertools import count
from typing import Any, BinaryIO

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory  # type: ignore[import-untyped]
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, ArrayValue, KeyValue
from opentelemetry.proto.resource.v1.resource_pb2 import Resource
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from specscope.trace.files import BROKEN, is_compressed, open_plain, reason
from specscope.trace.kinds import LARGEST
from specscope.trace.wire.codec import DamagedError
from specscope.trace.wire.otlp_json import DRAWING, Parts, ReadSpan, Spans

# Two bytes can encode a whole message: so what is decoded at once is bounded
MAX_SPAN = 4 * 2**20  # bytes of one
MAX_SPANS = 2**15  # of a message, and as many resources and scopes
MAX_RESOURCE = 2**16  # bytes of a resource: ours has 1.5 kB
SCALARS = {0x0A: "string_value", 0x10: "bool_value", 0x18: "int_value", 0x21: "double_value"}  # by first byte

# Message: its fields, by number from 1, and their types; * for many
_MESSAGES = {
    "RawRequest": ["resource_spans BYTES*"],
    "RawResourceSpans": ["resource BYTES", "scope_spans BYTES*", "schema_url STRING"],
    "RawScopeSpans": ["scope BYTES", "spans BYTES*", "schema_url STRING"],
    "RawArray": ["values BYTES*"],
    "RawScalars": ["string_value STRING*", "bool_value BOOL*", "int_value INT64*", "double_value DOUBLE*"],
}


def _classes() -> list[Any]:
    declared = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(name="specscope/otlp_raw.proto", package="specscope", syntax="proto3")
    for message, fields in _MESSAGES.items():
        made = file.message_type.add(name=message)
        for number, (name, kind) in enumerate(map(str.split, fields), 1):
            label = declared.LABEL_REPEATED if kind.endswith("*") else declared.LABEL_OPTIONAL
            made.field.add(name=name, number=number, type=f"TYPE_{kind.rstrip('*')}", label=label)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return [message_factory.GetMessageClass(pool.FindMessageTypeByName(f"specscope.{name}")) for name in _MESSAGES]


RawRequest, RawResourceSpans, RawScopeSpans, RawArray, RawScalars = _classes()


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
        return ReadSpan(span.name, span.start_time_unix_nano, span.end_time_unix_nano, _plain(span.attributes))
    except DecodeError:
        return DamagedError("a span that is not OTLP protobuf")


def _plain(pairs: Iterable[KeyValue]) -> dict[str, Any]:
    """Attributes as a dict, without the drawing."""
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


LIST = b"\n"  # what a TracesData begins with, and each ResourceSpans in it: field 1, with its length
NO_OTLP = "it is not OTLP protobuf"
TOO_LARGE = f"a message or a resource's spans of over {LARGEST >> 20} MiB, the limit"

LeaveOut = Callable[[int, str], None]


def messages(content: BinaryIO, name: str, leave_out: LeaveOut) -> Iterator[tuple[int, bytes | Parts]]:
    """The spans of each message with its number, or its line where it is OTLP JSON.

    Of a message that is cut off there are as many bytes, which are no JSON. `leave_out` hears of what cannot be read.
    """
    first = content.read(1)
    is_list = first == LIST
    for number in count(1):
        if not first:
            return
        if is_list and first != LIST:
            leave_out(number, NO_OTLP)
            return
        length = _varint(content) if is_list else int.from_bytes(first + content.read(3), "big")
        message = content.read(min(length, LARGEST + 1))
        left = length - len(message)
        while left and (skipped := content.read(min(left, 2**20))):
            left -= len(skipped)
        if left:
            yield number, bytes(length - left)
            return
        try:
            yield number, _read(message, not is_list, name)
        except DecodeError:
            leave_out(number, NO_OTLP)
        except ValueError as error:
            leave_out(number, str(error))
        first = content.read(1)


def _varint(content: BinaryIO) -> int:
    value = 0
    for shift in range(0, 70, 7):
        byte = content.read(1)
        value |= (ord(byte or b"\x7f") & 0x7F) << shift
        if byte < b"\x80":
            break
    return value


def _read(message: bytes, is_request: bool, name: str) -> bytes | Parts:
    """A message's spans: a TracesData, or what is in one. Raises ValueError, DecodeError."""
    if is_compressed(message):
        try:
            message = open_plain(BufferedReader(BytesIO(message)), name).read(LARGEST + 1)
        except BROKEN as error:
            raise ValueError(reason(error)) from None
    if len(message) > LARGEST:
        raise ValueError(TOO_LARGE)
    if message.startswith(b"{"):
        return message.rstrip() + b"\n"
    return read_request(message) if is_request else [read_resource(message)]
