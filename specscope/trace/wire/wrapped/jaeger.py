"""A trace in the model of Jaeger's page ("Trace JSON"), made a line of OTLP JSON.

Times are microseconds there, attributes tags with a type, and arrays texts of JSON: codec.py reads those by what is
declared. Values go over as they are, so what is wrong with one is found where every other is checked.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
import orjson

from specscope.trace.checked import decoded, whole
from specscope.trace.wire.codec import DamagedError
from specscope.trace.wire.otlp_json import Value

TYPES: Mapping[str, str] = {
    "string": "stringValue",
    "bool": "boolValue",
    "int64": "intValue",
    "float64": "doubleValue",
    "binary": "bytesValue",
}
# What a value is by its own JSON, where it is none of its tag's type
PLAIN: Mapping[type, str] = {str: "stringValue", bool: "boolValue", int: "intValue", float: "doubleValue"}
# What was no attribute before it came to Jaeger: of the scope, the kind and the status. Older versions said library.
NO_ATTRIBUTES = {
    *("otel.scope.name", "otel.library.name"),
    *("otel.scope.version", "otel.library.version", "otel.status_code", "otel.status_description", "span.kind"),
    *("w3c.tracestate", "internal.span.format"),
}
_TRACE = re.compile(rb'\s*\{\s*"(?:traceID|spans|processes)"\s*:')


def is_trace(document: bytes) -> bool:
    """Whether a document begins as such a trace does."""
    return _TRACE.match(document) is not None


def line(document: bytes) -> bytes:
    """The spans of a trace, by their processes. Raises DamagedError."""
    try:
        trace = decoded(document)
    except ValueError as error:
        raise DamagedError(str(error)) from None
    spans, processes = (trace.get(key) if isinstance(trace, dict) else None for key in ("spans", "processes"))
    if not isinstance(spans, list) or not isinstance(processes, dict):
        raise DamagedError("a trace without `spans` and `processes`")
    groups: dict[str, list[Any]] = {}
    for span in spans:
        values = span if isinstance(span, dict) else {}
        groups.setdefault(str(values.get("processID")), []).append(_span(span) if values else span)
    parts = [
        {"resource": {"attributes": _resource(processes.get(process))}, "scopeSpans": [{"spans": of_process}]}
        for process, of_process in groups.items()
    ]
    try:
        return orjson.dumps({"resourceSpans": parts}) + b"\n"
    except TypeError as error:  # it is nested too deeply
        raise DamagedError(str(error)) from None


def _resource(process: Any) -> list[Any]:  # noqa: ANN401
    """The attributes of a process."""
    if not isinstance(process, dict):
        return []
    name = {"key": "service.name", "type": "string", "value": process.get("serviceName")}
    return [*_attributes([name]), *_attributes(process.get("tags"))]


def _span(span: Mapping[str, Any]) -> dict[str, Any]:
    start, duration = (_number(span.get(key)) for key in ("startTime", "duration"))
    has_times = type(start) is int and type(duration) is int
    return {
        "name": span.get("operationName"),
        "startTimeUnixNano": str(1000 * start) if type(start) is int else start,
        "endTimeUnixNano": str(1000 * (start + duration)) if has_times else duration,
        "attributes": list(_attributes(span.get("tags"))),
    }


def _number(value: Any) -> Any:  # noqa: ANN401
    """A number that may be written as a text; anything else as it is."""
    return value if not isinstance(value, str) or (number := whole(value)) is None else number


def _tags(tags: Any) -> list[dict[str, Any]]:  # noqa: ANN401
    return [tag for tag in tags if isinstance(tag, dict)] if isinstance(tags, list) else []


def _attributes(tags: Any) -> Iterator[dict[str, Any]]:  # noqa: ANN401
    """Tags as attributes; those that hold nothing that an attribute can be are left out."""
    failed = any(tag.get("key") == "otel.status_code" and tag.get("value") == "ERROR" for tag in _tags(tags))
    for tag in _tags(tags):
        key, value = tag.get("key"), tag.get("value")
        if not isinstance(key, str) or key in NO_ATTRIBUTES or (failed and key == "error"):
            continue
        kinds = (TYPES.get(str(tag.get("type")).lower()), PLAIN.get(type(value)))
        if (kind := next((kind for kind in kinds if kind is not None and _is(kind, value)), None)) is not None:
            yield {"key": key, "value": {kind: value}}


def _is(kind: str, value: Any) -> bool:  # noqa: ANN401
    """Whether a value can be read as one of that kind."""
    try:
        msgspec.convert({kind: value}, Value, strict=False)
    except msgspec.ValidationError:
        return False
    return True
