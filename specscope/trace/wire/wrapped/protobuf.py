"""A file of OTLP protobuf, made lines of OTLP JSON: a TracesData, or messages with the length of each before it.

The collector's file exporter (`format: proto`) writes each message with its length as 4 bytes, big endian, and with
`compression: zstd` compresses each by itself; so it does with JSON then. A TracesData is also what Tempo answers, where
its newer API has it in the first field of another message.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from io import BufferedReader, BytesIO
from typing import Any, BinaryIO

import orjson
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
from opentelemetry.proto.resource.v1.resource_pb2 import Resource
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from specscope.trace.compressed import BROKEN, is_compressed, open_plain, reason
from specscope.trace.documents import LARGEST
from specscope.trace.wire.capture import LINE_SPANS, json_attributes
from specscope.trace.wire.otlp_proto import (
    MAX_RESOURCE,
    MAX_SPAN,
    RawRequest,
    RawResourceSpans,
    RawScopeSpans,
    plain,
)

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
    """Bytes of a file."""

    def __init__(self, content: BinaryIO) -> None:
        self._content = content
        self.taken = 0  # since the last message ended

    def take(self, count: int) -> bytes:
        """So many. Raises _CutOffError."""
        data = self._content.read(count)
        self.taken += len(data)
        if len(data) < count:
            raise _CutOffError
        return data

    def skip(self, count: int) -> None:
        """Leave so many out. Raises _CutOffError."""
        while count > 0:
            count -= len(self.take(min(count, 2**20)))

    def varint(self) -> int:
        """A number as protobuf has it. Raises _CutOffError, ValueError."""
        value = 0
        for shift in range(0, 70, 7):
            byte = self.take(1)[0]
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value
        raise ValueError(NO_OTLP)


def lines(content: BinaryIO, name: str, leave_out: LeaveOut) -> Iterator[tuple[int, bytes]]:
    """Lines of OTLP JSON, with the number of the message that each is of.

    Of a message that is cut off there are as many bytes, which are no JSON. `leave_out` hears of what cannot be read.
    """
    source = _Bytes(content)
    number = 0
    try:
        first = source.take(1)
        is_list = first[0] == LIST
        for number, message in enumerate(_fields(source, LIST) if is_list else _messages(source, first), 1):
            try:
                for line in _lines(message, not is_list, name):
                    yield number, line
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


def _lines(message: bytes | None, is_request: bool, name: str) -> Iterator[bytes]:
    """A message as lines: a TracesData, or what is in one. Raises ValueError, DecodeError."""
    if message is not None and is_compressed(message):
        try:
            message = open_plain(BufferedReader(BytesIO(message)), name).read(LARGEST + 1)
        except BROKEN as error:
            raise ValueError(reason(error)) from None
    if message is None or len(message) > LARGEST:
        raise ValueError(TOO_LARGE)
    if message.startswith(b"{"):
        yield message.rstrip() + b"\n"
    elif is_request or OUTER.match(message):
        for raw in RawRequest.FromString(message).resource_spans:
            yield from _of_resource(raw)
    else:
        yield from _of_resource(message)


def _of_resource(raw: bytes) -> Iterator[bytes]:
    """The spans of a resource, some of them in a line. Raises ValueError, DecodeError."""
    by_resource = RawResourceSpans.FromString(raw)
    if len(by_resource.resource) > MAX_RESOURCE:
        raise ValueError(f"a resource is larger than {MAX_RESOURCE} bytes")
    resource = {"attributes": json_attributes(plain(Resource.FromString(by_resource.resource).attributes))}
    for raw_scope in by_resource.scope_spans:
        by_scope = RawScopeSpans.FromString(raw_scope)
        for first in range(0, max(len(by_scope.spans), 1), LINE_SPANS):
            spans = [_span(raw_span) for raw_span in by_scope.spans[first : first + LINE_SPANS]]
            part = {"resource": resource, "scopeSpans": [{"spans": spans}]}
            yield orjson.dumps({"resourceSpans": [part]}) + b"\n"


def _span(raw: bytes) -> Any:  # noqa: ANN401
    """A span as OTLP JSON has it; in place of one that cannot be read, a text that says why."""
    if len(raw) > MAX_SPAN:
        return f"a span larger than {MAX_SPAN} bytes"
    try:
        span = Span.FromString(raw)
        attributes = json_attributes(plain(span.attributes))
    except DecodeError:
        return "a span that is not OTLP protobuf"
    return {
        "name": span.name,
        "startTimeUnixNano": str(span.start_time_unix_nano),
        "endTimeUnixNano": str(span.end_time_unix_nano),
        "attributes": attributes,
    }
