"""A trace in the model of Jaeger's page ("Trace JSON").

Times are microseconds there, attributes tags with a type, and arrays texts of JSON: codec.py reads those by what is
declared. Values go over as they are, so what is wrong with one is found where every other is checked.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

import msgspec

from specscope.trace.checked import decoded, whole
from specscope.trace.wire.codec import DamagedError
from specscope.trace.wire.otlp_json import Parts, ReadSpan

# By a tag's type, what its value must be; and what a value is by its own JSON, where it is none of its tag's type
TYPES: Mapping[str, Any] = {"string": str, "bool": bool, "int64": int, "float64": float}
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


def parts(document: bytes) -> Parts:
    """The spans of a trace, by their processes. Raises DamagedError."""
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
    """The attributes of a process."""
    if not isinstance(process, dict):
        return {}
    name = {"key": "service.name", "type": "string", "value": process.get("serviceName")}
    return dict([*_attributes([name]), *_attributes(process.get("tags"))])


def _span(span: Mapping[str, Any]) -> ReadSpan | DamagedError:
    name, start, duration = span.get("operationName"), _number(span.get("startTime")), _number(span.get("duration"))
    if not isinstance(name, str):
        return DamagedError("a span: it has no `operationName`")
    if start is None or duration is None:
        return DamagedError(f"{name}: its `startTime` or `duration` is no whole number")
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
