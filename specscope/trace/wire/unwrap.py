"""What a capture file holds: lines of OTLP JSON as they are, and of any other form the spans.

A line, and any other document, is one unit: what is larger than `LARGEST` is left out. But the list that a document is
made of, such as Jaeger's `data`, may be of any length: each of its entries is one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from itertools import chain
from typing import Any, BinaryIO

import msgspec

from specscope.errors import UserError
from specscope.trace.checked import decoded, whole
from specscope.trace.kinds import (
    LARGEST,
    LOOK,
    OTLP_PROTOBUF,
    Document,
    FileKind,
    Splitter,
    is_array,
    is_whole,
    looks_like_json,
)
from specscope.trace.wire.codec import DamagedError
from specscope.trace.wire.otlp_json import Parts, ReadSpan
from specscope.trace.wire.otlp_proto import messages

PIECE = 2**20  # bytes that are read at once
JAEGER = "data"  # the list of Jaeger's page
NAMES = ("resourceSpans", "batches")  # of the lists; Tempo's are `batches` and in `trace`
LISTS = frozenset((JAEGER, *NAMES, *(f"{outer}.{name}" for outer in ("result", "trace") for name in NAMES)))
PLAIN = re.compile(rb'\s*\{\s*"resourceSpans"')
# An entry of a list of resourceSpans by itself: no other document that is read begins so
BARE = re.compile(rb'\s*\{\s*"(?:resource|scopeSpans)"\s*:')

LeaveOut = Callable[[int, str], None]


def unwrapped(
    content: BinaryIO, kind: FileKind | None, name: str, leave_out: LeaveOut
) -> Iterator[tuple[int, bytes | Parts]]:
    """Numbered lines of OTLP JSON, or spans, where the file holds some; other content as it is.

    The last may be cut off: then it has no line break. `leave_out` hears of what cannot be read, by its line, and may
    raise. Raises UserError, and `compressed.BROKEN`.
    """
    if kind is OTLP_PROTOBUF:
        yield from messages(content, name, leave_out)
        return
    number, first = 0, b""
    while not first.strip() and (first := content.readline(LARGEST + 1)):
        number += 1
    start = first[:LOOK].decode("utf-8", "replace")
    if not looks_like_json(start) or (PLAIN.match(first) is not None and is_whole(first)):
        yield from _lines(content, number, first, leave_out)
        return
    pieces = chain([first], iter(partial(content.read, PIECE), b""))
    yield from _taken_apart(pieces, number, is_array(start), name, leave_out)


def _lines(content: BinaryIO, number: int, line: bytes, leave_out: LeaveOut) -> Iterator[tuple[int, bytes]]:
    """Whole lines, from this one on. One that is too long is skipped without being held in memory."""
    while line:
        if len(line) <= LARGEST:
            yield number, line
        else:
            while line and not line.endswith(b"\n"):
                line = content.readline(PIECE)
            leave_out(number, f"it is longer than {LARGEST >> 20} MiB, the limit")
        number, line = number + 1, content.readline(LARGEST + 1)


def _taken_apart(
    pieces: Iterable[bytes], line: int, outer: bool, name: str, leave_out: LeaveOut
) -> Iterator[tuple[int, bytes | Parts]]:
    """A line, or spans, for each document or entry of its list."""
    is_any_read = False

    def too_large(number: int) -> None:
        why = f"a trace or a resource of over {LARGEST >> 20} MiB, the limit"
        if not is_any_read:
            raise UserError(f"{name}, line {number}: {why}")
        leave_out(number, why)

    splitter = Splitter(too_large, outer=outer, lists=LISTS, line=line)
    for document in chain.from_iterable(map(splitter.take, pieces)):
        try:
            yield document.number, _line(document)
            is_any_read = True
        except DamagedError as error:
            leave_out(document.number, str(error))
    yield from splitter.rest()


def _line(document: Document) -> bytes | Parts:
    """A document, or an entry of a list, as a line or spans. Raises DamagedError."""
    text = document.text
    if document.list_name == JAEGER or (not document.list_name and _TRACE.match(text)):
        return _of_jaeger(text)
    if not document.list_name and not BARE.match(text):
        return text + b"\n"
    return b'{"resourceSpans":[' + text + b"]}\n"


# By a tag's type, what its value must be; and what a value is by its own JSON, where it is none of its tag's type
TYPES: Mapping[str, Any] = {"string": str, "bool": bool, "int64": int, "float64": float}
# What was no attribute before it came to Jaeger: of the scope, the kind and the status. Older versions said library.
NO_ATTRIBUTES = {
    *("otel.scope.name", "otel.library.name"),
    *("otel.scope.version", "otel.library.version", "otel.status_code", "otel.status_description", "span.kind"),
    *("w3c.tracestate", "internal.span.format"),
}
_TRACE = re.compile(rb'\s*\{\s*"(?:traceID|spans|processes)"\s*:')


def _of_jaeger(document: bytes) -> Parts:
    """The spans of a trace in the model of Jaeger's page ("Trace JSON"), by their processes. Raises DamagedError.

    Times are microseconds there, attributes tags with a type, and arrays texts of JSON: codec.py reads those by what is
    declared. Values go over as they are, so what is wrong with one is found where every other is checked.
    """
    try:
        trace = decoded(document)
    except ValueError as error:
        raise DamagedError(str(error)) from None
    spans, processes = (trace.get(key) if isinstance(trace, dict) else None for key in ("spans", "processes"))
    if not isinstance(spans, list) or not isinstance(processes, dict):
        raise DamagedError("a trace without `spans` and `processes`")
    groups: dict[str, list[ReadSpan | DamagedError]] = {}
    for span in spans:
        values = span if isinstance(span, dict) else {}
        groups.setdefault(str(values.get("processID")), []).append(_span(values))
    return [(_resource(processes.get(process)), of_process) for process, of_process in groups.items()]


def _resource(process: Any) -> dict[str, Any]:  # noqa: ANN401
    if not isinstance(process, dict):
        return {}
    name = {"key": "service.name", "type": "string", "value": process.get("serviceName")}
    return dict([*_attributes([name]), *_attributes(process.get("tags"))])


def _span(span: Mapping[str, Any]) -> ReadSpan | DamagedError:
    name, start, duration = span.get("operationName"), _number(span.get("startTime")), _number(span.get("duration"))
    if not isinstance(name, str):
        return DamagedError("a span: it has no `operationName`")
    if start is None or duration is None:
        return DamagedError(f"{name}: its `startTime` or `duration` is not a whole number")
    return ReadSpan(name, 1000 * start, 1000 * (start + duration), dict(_attributes(span.get("tags"))))


def _number(value: Any) -> int | None:  # noqa: ANN401
    """A whole number, which may be written as a text."""
    return value if type(value) is int else whole(value) if isinstance(value, str) else None


def _tags(tags: Any) -> list[dict[str, Any]]:  # noqa: ANN401
    return [tag for tag in tags if isinstance(tag, dict)] if isinstance(tags, list) else []


def _attributes(tags: Any) -> Iterator[tuple[str, Any]]:  # noqa: ANN401
    """Tags as attributes; those that hold nothing that an attribute can be are left out."""
    failed = any(tag.get("key") == "otel.status_code" and tag.get("value") == "ERROR" for tag in _tags(tags))
    for tag in _tags(tags):
        key, value = tag.get("key"), tag.get("value")
        if not isinstance(key, str) or key in NO_ATTRIBUTES or (failed and key == "error"):
            continue
        kind = TYPES.get(str(tag.get("type")).lower(), type(value))
        with suppress(msgspec.ValidationError):  # then it is what its own JSON says
            value = msgspec.convert(value, kind, strict=False)
        if type(value) in (str, bool, int, float):
            yield key, value
