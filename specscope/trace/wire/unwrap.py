"""What a capture file holds: lines of OTLP JSON as they are, and of any other form the spans.

A line, and any other document, is one unit: what is larger than `LARGEST` is left out.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any, BinaryIO

import msgspec
import orjson

from specscope.trace.checked import decoded, whole
from specscope.trace.kinds import LARGEST, OTLP_PROTOBUF, FileKind, documents
from specscope.trace.wire.codec import DamagedError
from specscope.trace.wire.otlp_json import Parts, ReadSpan
from specscope.trace.wire.otlp_proto import LeaveOut, messages

PIECE = 2**20  # bytes of a line that is skipped
LISTS = ("resourceSpans", "batches")  # of resources; Tempo's are `batches`
PLAIN = re.compile(rb'\s*\{\s*"resourceSpans"')


def unwrapped(
    content: BinaryIO, kind: FileKind | None, name: str, leave_out: LeaveOut
) -> Iterator[tuple[int, bytes | Parts]]:
    """Numbered lines of OTLP JSON, or spans, where the file holds some; other content as it is.

    The last may be cut off: then it has no line break. `leave_out` hears of what cannot be read, by its line, and may
    raise. Raises UserError, and files.BROKEN.
    """
    if kind is OTLP_PROTOBUF:
        yield from messages(content, name, leave_out)
        return
    for number, text in documents(_lines(content, leave_out), name):
        try:
            yield number, text if PLAIN.match(text) else _unwrapped(text)
        except DamagedError as error:
            leave_out(number, str(error))


def _lines(content: BinaryIO, leave_out: LeaveOut) -> Iterator[tuple[int, bytes]]:
    """Whole lines. One that is too long is skipped without being held in memory."""
    number = 1
    while line := content.readline(LARGEST + 1):
        if len(line) <= LARGEST:
            yield number, line
        else:
            while line and not line.endswith(b"\n"):
                line = content.readline(PIECE)
            leave_out(number, f"it is longer than {LARGEST >> 20} MiB, the limit")
        number += 1


def _unwrapped(text: bytes) -> bytes | Parts:
    """A document as a line, or as spans; as it is where it is neither. Raises DamagedError."""
    try:
        value = decoded(text)
    except ValueError:
        return text
    if not isinstance(value, dict):
        return text
    around = [each for each in (value, value.get("result"), value.get("trace")) if isinstance(each, dict)]
    lists = (outer.get(name) for outer in around for name in LISTS)
    if (resources := next((each for each in lists if isinstance(each, list)), None)) is not None:
        return _line(resources)
    if isinstance(traces := value.get("data"), list):
        return [part for trace in traces for part in _of_jaeger(trace)]
    if not value.keys().isdisjoint(("traceID", "spans", "processes")):
        return _of_jaeger(value)
    return _line([value]) if "resource" in value or "scopeSpans" in value else text


def _line(resources: list[Any]) -> bytes:
    try:
        return orjson.dumps({"resourceSpans": resources}) + b"\n"
    except TypeError as error:  # it is nested too deeply to be written
        raise DamagedError(str(error)) from None


# By a tag's type, what its value must be; and what a value is by its own JSON, where it is none of its tag's type
TYPES: Mapping[str, Any] = {"string": str, "bool": bool, "int64": int, "float64": float}
# What was no attribute before it came to Jaeger: of the scope, the kind and the status. Older versions said library.
NO_ATTRIBUTES = {
    *("otel.scope.name", "otel.library.name"),
    *("otel.scope.version", "otel.library.version", "otel.status_code", "otel.status_description", "span.kind"),
    *("w3c.tracestate", "internal.span.format"),
}


def _of_jaeger(trace: Any) -> Parts:  # noqa: ANN401
    """The spans of a trace in the model of Jaeger's page ("Trace JSON"), by their processes. Raises DamagedError.

    Times are microseconds there, attributes tags with a type, and arrays texts of JSON: tables.py reads those by what
    is declared. Values go over as they are, so what is wrong with one is found where every other is checked.
    """
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


def _attributes(tags: Any) -> Iterator[tuple[str, Any]]:  # noqa: ANN401
    """Tags as attributes; those that hold nothing that an attribute can be are left out."""
    tags = [tag for tag in tags if isinstance(tag, dict)] if isinstance(tags, list) else []
    failed = any(tag.get("key") == "otel.status_code" and tag.get("value") == "ERROR" for tag in tags)
    for tag in tags:
        key, value = tag.get("key"), tag.get("value")
        if not isinstance(key, str) or key in NO_ATTRIBUTES or (failed and key == "error"):
            continue
        kind = TYPES.get(str(tag.get("type")).lower(), type(value))
        with suppress(msgspec.ValidationError):  # then it is what its own JSON says
            value = msgspec.convert(value, kind, strict=False)
        if type(value) in (str, bool, int, float):
            yield key, value
