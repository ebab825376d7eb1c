"""A file of OTLP protobuf: a TracesData, or messages with the length of each before it.

The collector's file exporter (`format: proto`) writes each message with its length as 4 bytes, big endian, and with
`compression: zstd` compresses each by itself; so it does with JSON then. A TracesData is also what Tempo answers, where
its newer API has it in the first field of another message.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from io import BufferedReader, BytesIO
from typing import BinaryIO

from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

from specscope.trace.compressed import BROKEN, is_compressed, open_plain, reason
from specscope.trace.documents import LARGEST
from specscope.trace.wire.otlp_json import Parts
from specscope.trace.wire.otlp_proto import read_request, read_resource

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
