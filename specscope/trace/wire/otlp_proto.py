"""Spans of OTLP protobuf, decoded a piece at a time: the outer messages, with what they hold left as bytes, then spans.

On the wire a submessage and a bytes field are the same, so RawRequest reads what ExportTraceServiceRequest reads, which
is what TracesData reads. RawArray reads an ArrayValue, and RawScalars any number of AnyValues, laid end to end.

A file of it is a TracesData, or messages with the length of each before it: the collector's file exporter (`format:
proto`) writes that as 4 bytes, big endian, and with `compression: zstd` compresses each by itself; so it does with JSON
then. A TracesData is also what Tempo answers, where its newer API has it in the first field of another message.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from io import BufferedReader, BytesIO
from typing import Any, BinaryIO

import numpy as np
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory  # type: ignore[import-untyped]
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
from numpy.typing import NDArray
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, ArrayValue, KeyValue
from opentelemetry.proto.resource.v1.resource_pb2 import Resource
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from specscope.trace.files import BROKEN, is_compressed, open_plain, reason
from specscope.trace.kinds import LARGEST
from specscope.trace.wire.codec import DamagedError
from specscope.trace.wire.otlp_json import DECODE_STEP, DRAWING, NUMBERS, Parts, ReadSpan, Spans

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


LIST = 0x0A  # the first byte of resource_spans, and of what holds one: field 1, bytes
OUTER = re.compile(rb"(?:\n[\x80-\xff]{0,4}[\x00-\x7f]){4}[\w./-]{1,250}\x12")  # a ResourceSpans in another message
FIXED = {1: 8, 5: 4}  # bytes of a value, by its wire type
VARINT, BYTES = 0, 2
NO_OTLP = "it is not OTLP protobuf"
TOO_LARGE = f"a message or a resource's spans of over {LARGEST >> 20} MiB, the limit"

LeaveOut = Callable[[int, str], None]


class _CutOffError(Exception):
    """The file ends within a message."""


class _Bytes:
    def __init__(self, content: BinaryIO) -> None:
        self._content = content
        self.taken = 0  # since the last message ended

    def take(self, count: int) -> bytes:
        data = self._content.read(count)
        self.taken += len(data)
        if len(data) < count:
            raise _CutOffError
        return data

    def skip(self, count: int) -> None:
        while count > 0:
            count -= len(self.take(min(count, 2**20)))

    def varint(self) -> int:
        value = 0
        for shift in range(0, 70, 7):
            byte = self.take(1)[0]
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value
        raise ValueError(NO_OTLP)


def messages(content: BinaryIO, name: str, leave_out: LeaveOut) -> Iterator[tuple[int, bytes | Parts]]:
    """The spans of each message with its number, or its line where it is OTLP JSON.

    Of a message that is cut off there are as many bytes, which are no JSON. `leave_out` hears of what cannot be read.
    """
    source = _Bytes(content)
    number = 0
    try:
        first = source.take(1)
        is_list = first[0] == LIST
        for number, message in enumerate(_fields(source, LIST) if is_list else _messages(source, first), 1):
            try:
                yield number, _read(message, not is_list, name)
            except DecodeError:
                leave_out(number, NO_OTLP)
            except ValueError as error:
                leave_out(number, str(error))
            source.taken = 0
    except _CutOffError:
        if source.taken:
            yield number + 1, bytes(source.taken)
    except ValueError as error:
        leave_out(number + 1, str(error))


def _messages(source: _Bytes, first: bytes) -> Iterator[bytes | None]:
    """Messages as the exporter wrote them. None: too large. Raises _CutOffError at the end of the file."""
    while True:
        yield _part(source, int.from_bytes(first + source.take(3), "big"))
        first = source.take(1)


def _part(source: _Bytes, length: int) -> bytes | None:
    if length <= LARGEST:
        return source.take(length)
    source.skip(length)
    return None


def _fields(source: _Bytes, tag: int) -> Iterator[bytes | None]:
    """The first field of a message that is as long as the file: ResourceSpans, or what holds some.

    None: too large. Raises _CutOffError at the end of the file, and ValueError where what follows cannot be found.
    """
    while True:
        kind = tag & 7
        if kind == BYTES:
            length = source.varint()
            if tag == LIST:
                yield _part(source, length)
            else:
                source.skip(length)
        elif kind == VARINT:
            source.varint()
        elif kind in FIXED:
            source.skip(FIXED[kind])
        else:
            raise ValueError(NO_OTLP)
        source.taken = 0
        tag = source.take(1)[0]


def _read(message: bytes | None, is_request: bool, name: str) -> bytes | Parts:
    """A message's spans: a TracesData, or what is in one. Raises ValueError, DecodeError."""
    if message is not None and is_compressed(message):
        try:
            message = open_plain(BufferedReader(BytesIO(message)), name).read(LARGEST + 1)
        except BROKEN as error:
            raise ValueError(reason(error)) from None
    if message is None or len(message) > LARGEST:
        raise ValueError(TOO_LARGE)
    if message.startswith(b"{"):
        return message.rstrip() + b"\n"
    return read_request(message) if is_request or OUTER.match(message) else [read_resource(message)]
