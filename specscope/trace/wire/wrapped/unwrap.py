"""What a capture file holds: lines of OTLP JSON as they are, and of any other form the spans.

A line, and any other document, is one unit: what is larger than `LARGEST` is left out. But the list that a document is
made of, such as Jaeger's `data`, may be of any length: each of its entries is one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from typing import Any, BinaryIO

import orjson

from specscope.errors import UserError
from specscope.trace.checked import decoded
from specscope.trace.documents import LARGEST, Document, Splitter, is_whole
from specscope.trace.kinds import BARE_SPANS, LOOK, OTLP_PROTOBUF, FileKind, is_array, looks_like_json
from specscope.trace.wire.codec import DamagedError
from specscope.trace.wire.otlp_json import Parts
from specscope.trace.wire.wrapped import jaeger, protobuf

PIECE = 2**20  # bytes that are read at once
JAEGER = "data"  # the list of Jaeger's page
NAMES = ("resourceSpans", "resource_spans", "batches")  # of the lists; Tempo's are `batches` and in `trace`
LISTS = frozenset((JAEGER, *NAMES, *(f"{outer}.{name}" for outer in ("result", "trace") for name in NAMES)))
PLAIN = re.compile(rb'\s*\{\s*"resourceSpans"')
# An entry of a list of resourceSpans by itself: no other document that is read begins so
BARE = re.compile(rb'\s*\{\s*"(?:resource|%b)"\s*:' % "|".join(BARE_SPANS).encode())
# Keys as protobuf's own JSON, or an older OTLP, has them. In a text a quote has a backslash before it.
OTHER_NAMES = re.compile(rb'"(?:[a-z]+_[a-z_]+|instrumentationLibrarySpans)"\s*:')
OLDER = "instrumentationLibrarySpans"  # an older OTLP's name of scopeSpans

LeaveOut = Callable[[int, str], None]


def unwrapped(
    content: BinaryIO, kind: FileKind | None, name: str, leave_out: LeaveOut
) -> Iterator[tuple[int, bytes | Parts]]:
    """Numbered lines of OTLP JSON, or spans, where the file holds some; other content as it is.

    The last may be cut off: then it has no line break. `leave_out` hears of what cannot be read, by its line, and may
    raise. Raises UserError, and `compressed.BROKEN`.
    """
    if kind is OTLP_PROTOBUF:
        yield from protobuf.messages(content, name, leave_out)
        return
    pieces = _pieces(content)
    head: list[tuple[int, bytes]] = []
    for number, piece in pieces:
        head += [(number, piece)] if head or piece.strip() else []
        if head and (piece.endswith(b"\n") or len(head) > LARGEST // PIECE):
            break
    first = b"".join(piece for _, piece in head)
    start = first[:LOOK].decode("utf-8", "replace")
    if not looks_like_json(start) or (_is_plain(first) and is_whole(first)):
        yield from _lines(chain(head, pieces), leave_out)
        return
    yield from _taken_apart(chain(head, _chunks(content, head)), is_array(start), name, leave_out)


def _is_plain(line: bytes) -> bool:
    return PLAIN.match(line) is not None and OTHER_NAMES.search(line) is None


def _pieces(content: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """Each line with its number; a long one in several pieces."""
    number, ends = 0, True
    while piece := content.readline(PIECE):
        number += ends
        ends = piece.endswith(b"\n")
        yield number, piece


def _chunks(content: BinaryIO, head: Sequence[tuple[int, bytes]]) -> Iterator[tuple[int, bytes]]:
    """What follows, with the number of the line that each begins in."""
    number = head[-1][0] + head[-1][1].count(b"\n")
    while chunk := content.read(PIECE):
        yield number, chunk
        number += chunk.count(b"\n")


def _lines(pieces: Iterable[tuple[int, bytes]], leave_out: LeaveOut) -> Iterator[tuple[int, bytes]]:
    """Whole lines. One that is too long is skipped without being held in memory."""
    parts: list[bytes] = []
    size = number = 0
    for number, piece in pieces:
        size += len(piece)
        parts = [*parts, piece] if size <= LARGEST else []
        if piece.endswith(b"\n"):
            yield from _joined(number, parts, leave_out)
            parts, size = [], 0
    if size:
        yield from _joined(number, parts, leave_out)


def _joined(number: int, parts: list[bytes], leave_out: LeaveOut) -> Iterator[tuple[int, bytes]]:
    if parts:
        yield number, parts[0] if len(parts) == 1 else b"".join(parts)
    else:
        leave_out(number, f"it is longer than {LARGEST >> 20} MiB, the limit")


def _taken_apart(
    pieces: Iterable[tuple[int, bytes]], outer: bool, name: str, leave_out: LeaveOut
) -> Iterator[tuple[int, bytes | Parts]]:
    """A line, or spans, for each document or entry of its list."""
    is_any_read = False

    def too_large(number: int) -> None:
        why = f"a trace or a resource in one piece of over {LARGEST >> 20} MiB, the limit"
        if not is_any_read:
            raise UserError(f"{name}, line {number}: {why}")
        leave_out(number, why)

    splitter = Splitter(too_large, outer=outer, lists=LISTS)
    for number, piece in pieces:
        for document in splitter.take(number, piece):
            try:
                yield document.number, _line(document)
                is_any_read = True
            except DamagedError as error:
                leave_out(document.number, str(error))
    yield from splitter.rest()


def _line(document: Document) -> bytes | Parts:
    """A document, or an entry of a list, as a line or spans. Raises DamagedError."""
    text = document.text
    if document.list_name == JAEGER or (not document.list_name and jaeger.is_trace(text)):
        return jaeger.parts(text)
    if not document.list_name and not BARE.match(text):
        return text + b"\n"
    if OTHER_NAMES.search(text):
        try:
            text = orjson.dumps(_renamed(decoded(text)))
        except (ValueError, TypeError, RecursionError) as error:  # TypeError: it is nested too deeply to be written
            raise DamagedError(str(error)) from None
    return b'{"resourceSpans":[' + text + b"]}\n"


def _renamed(value: Any) -> Any:  # noqa: ANN401
    """A message with the names that OTLP JSON has. Its keys are names of fields, at every depth."""
    if isinstance(value, list):
        return [_renamed(inner) for inner in value]
    if not isinstance(value, dict):
        return value
    return {_name(key): _renamed(inner) for key, inner in value.items()}


def _name(key: str) -> str:
    first, *others = key.split("_")
    camel = first + "".join(map(str.capitalize, others))
    return "scopeSpans" if camel == OLDER else camel
