"""Lines of OTLP JSON as trace stores and collectors give them back: the wrappings that the capture reader takes off."""

import json
from base64 import b64encode
from collections.abc import Callable
from typing import Any

import pyarrow
from google.protobuf.json_format import MessageToDict, ParseDict
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import TracesData

IDS = ("traceId", "spanId", "parentSpanId")
TAGS = {"stringValue": "string", "boolValue": "bool", "intValue": "int64", "doubleValue": "float64"}
Lines = list[dict[str, Any]]


def _message(line: dict[str, Any], kind: Any) -> Any:
    """As an exporter sends it: ids are bytes there, and hex in OTLP JSON."""

    def with_bytes(value: Any) -> Any:
        if isinstance(value, list):
            return [with_bytes(one) for one in value]
        if not isinstance(value, dict):
            return value
        ids = {key: b64encode(bytes.fromhex(value[key])).decode() for key in IDS if key in value}
        return {key: with_bytes(one) for key, one in value.items()} | ids

    return ParseDict(with_bytes(line), kind())


def export(line: dict[str, Any]) -> bytes:
    """A line as an export in protobuf."""
    return _message(line, ExportTraceServiceRequest).SerializeToString()


def one(lines: Lines) -> dict[str, Any]:
    """All lines as one."""
    return {"resourceSpans": [part for line in lines for part in line["resourceSpans"]]}


def _dump(value: Any, indent: int | None = None) -> bytes:
    return json.dumps(value, indent=indent).encode()


def _in_protobuf_json(lines: Lines) -> dict[str, Any]:
    """Ids in base64, and enumerations by name."""
    return MessageToDict(_message(one(lines), TracesData))


def _framed(messages: list[bytes], *, compressed: bool = False) -> bytes:
    if compressed:
        messages = [pyarrow.compress(message, codec="zstd", asbytes=True) for message in messages]
    return b"".join(len(message).to_bytes(4, "big") + message for message in messages)


def field(tag: int, payload: bytes) -> bytes:
    """A field of a message that has a length, with these bytes."""
    size, length = len(payload), b""
    while size > 0x7F:
        length, size = length + bytes([size & 0x7F | 0x80]), size >> 7
    return bytes([tag]) + length + bytes([size]) + payload


def _text(value: dict[str, Any]) -> Any:
    """An array as JSON, as Jaeger keeps it."""

    def plain(element: dict[str, Any]) -> Any:
        ((kind, inner),) = element.items()
        return int(inner) if kind == "intValue" else inner

    return json.dumps([plain(element) for element in value.get("values", [])])


def _arrays_as_text(lines: Lines) -> bytes:
    def changed(value: Any) -> Any:
        if isinstance(value, list):
            return [changed(inner) for inner in value]
        if isinstance(value, dict) and "arrayValue" in value:
            return {"stringValue": _text(value["arrayValue"])}
        return {key: changed(inner) for key, inner in value.items()} if isinstance(value, dict) else value

    return _dump(changed(one(lines)))


def _tags(attributes: list[dict[str, Any]]) -> list[dict[str, Any]]:
    tags = []
    for pair in attributes:
        ((kind, value),) = pair["value"].items()
        if kind == "arrayValue":
            kind, value = "stringValue", _text(value)
        small = kind == "intValue" and abs(int(value)) < 2**53  # those that a browser reads exactly
        tags.append({"key": pair["key"], "type": TAGS[kind], "value": int(value) if small else value})
    return tags


def _page_span(span: dict[str, Any], scope: str, process: str) -> dict[str, Any]:
    start, end = (int(span[key]) // 1000 for key in ("startTimeUnixNano", "endTimeUnixNano"))
    above = {"refType": "CHILD_OF", "traceID": span["traceId"], "spanID": span.get("parentSpanId")}
    own = [{"key": "otel.scope.name", "type": "string", "value": scope}]
    own.append({"key": "span.kind", "type": "string", "value": "internal"})
    return {
        "traceID": span["traceId"],
        "spanID": span["spanId"],
        "operationName": span["name"],
        "references": [above] if "parentSpanId" in span else [],
        "startTime": start,
        "duration": end - start,
        "tags": _tags(span.get("attributes", [])) + own,
        "logs": [],
        "processID": process,
        "warnings": None,
    }


def traces(lines: Lines) -> Lines:
    """Each trace in the model of Jaeger's page."""
    found: dict[str, dict[str, Any]] = {}
    for part in one(lines)["resourceSpans"]:
        names = {pair["key"]: pair["value"].get("stringValue") for pair in part["resource"]["attributes"]}
        tags = _tags([pair for pair in part["resource"]["attributes"] if pair["key"] != "service.name"])
        process = {"serviceName": names["service.name"], "tags": tags}
        for scope in part.get("scopeSpans", []):
            for span in scope.get("spans", []):
                trace = found.setdefault(span["traceId"], {"traceID": span["traceId"], "spans": [], "processes": {}})
                known = trace["processes"]
                key = next((key for key, value in known.items() if value == process), f"p{len(known) + 1}")
                known[key] = process
                trace["spans"].append(_page_span(span, scope.get("scope", {}).get("name", ""), key))
    return list(found.values())


# Each gives a file of some lines. Times of Jaeger's page are microseconds: MICROSECONDS
WRAPPINGS: dict[str, Callable[[Lines], bytes]] = {
    "lines": lambda lines: b"".join(_dump(line) + b"\n" for line in lines),
    "one document": lambda lines: _dump(one(lines)),
    "indented": lambda lines: _dump(one(lines), 1),
    "Jaeger's API": lambda lines: _dump({"result": one(lines)}),
    "Jaeger's API as a stream": lambda lines: b"".join(_dump({"result": line}) + b"\n" for line in lines),
    "Jaeger's API, indented": lambda lines: _dump({"result": one(lines)}, 2),
    "arrays as text": _arrays_as_text,
    "Tempo": lambda lines: _dump({"trace": _in_protobuf_json(lines)}),
    "older Tempo": lambda lines: _dump({"batches": _in_protobuf_json(lines).get("resourceSpans", [])}, 1),
    "protobuf": lambda lines: export(one(lines)),
    "proto of the file exporter": lambda lines: _framed([export(line) for line in lines]),
    "compressed proto": lambda lines: _framed([export(line) for line in lines], compressed=True),
    "compressed JSON": lambda lines: _framed([_dump(line) for line in lines], compressed=True),
    "Jaeger's page": lambda lines: _dump({"data": traces(lines), "total": 0, "errors": None}, 4),
    "Jaeger's page in one line": lambda lines: _dump({"data": traces(lines)}),
    "traces of Jaeger's page": lambda lines: b"\n".join(map(_dump, traces(lines))),
}
MICROSECONDS = ("Jaeger's page", "Jaeger's page in one line", "traces of Jaeger's page")
