"""Capture files: OTLP JSON Lines, as the OpenTelemetry file exporter writes them, so Jaeger and the collector
read them as they are.

The line is laid out here rather than by opentelemetry-exporter-otlp-json-file because that takes 370 us for a
decode_step and this 25: the engine would feel it. A test holds both to the same JSON, value by value.
"""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import orjson

import specscope
from specscope.errors import UserError
from specscope.trace.records import RunInfo, StepRecord
from specscope.trace.spans import SCOPE, Encoder, Span, resource_attributes
from specscope.trace.unfinite import dump_numbers, named
from specscope.trace.vocabulary import Vocabulary

LINE_SPANS = 64  # spans a line at most
LINE_SECONDS = 0.5  # and a line at least this often, so that a kill loses little
SCALARS = {bool: "boolValue", float: "doubleValue", str: "stringValue"}
SAMPLED_LOCAL = 256  # span flags: the bit that says that "is remote" is known, and is false


def _value(value: Any) -> dict[str, Any]:  # noqa: ANN401
    """An OTLP AnyValue: 64-bit integers are strings, as proto3 JSON has them."""
    kind = type(value)
    if kind is int:
        return {"intValue": str(value)}
    if name := SCALARS.get(kind):
        return {name: named(value) if kind is float else value}
    if not value:
        return {"arrayValue": {}}
    kinds = set(map(type, value))
    if kinds == {float}:
        return {"arrayValue": {"values": _numbers(value, b'{"doubleValue":', b"}")}}
    if kinds == {int}:
        return {"arrayValue": {"values": _numbers(value, b'{"intValue":"', b'"}')}}
    if kinds == {str}:
        return {"arrayValue": {"values": [{"stringValue": v} for v in value]}}
    return {"arrayValue": {"values": [_value(v) for v in value]}}


def _numbers(values: Sequence[float], before: bytes, after: bytes) -> orjson.Fragment:
    """An array of AnyValues, put together as text: arrays over a tree's nodes are most of a capture."""
    inner = dump_numbers(values)[1:-1].replace(b",", after + b"," + before)
    return orjson.Fragment(b"[" + before + inner + after + b"]")


def _attributes(values: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [{"key": key, "value": _value(value)} for key, value in values.items()]


def span_json(span: Span) -> dict[str, Any]:
    """One span as an OTLP JSON object."""
    out: dict[str, Any] = {"traceId": f"{span.trace:032x}", "spanId": f"{span.id:016x}"}
    if span.parent:
        out["parentSpanId"] = f"{span.parent:016x}"
    out |= {
        "flags": SAMPLED_LOCAL,
        "name": span.name,
        "kind": 1,
        "startTimeUnixNano": str(span.start_ns),
        "endTimeUnixNano": str(span.end_ns),
        "attributes": _attributes(span.attributes),
    }
    if span.links:
        links = [{"traceId": f"{trace:032x}", "spanId": f"{own:016x}"} for trace, own in span.links]
        out["links"] = [link | {"flags": SAMPLED_LOCAL} for link in links]
    return out | {"status": {}}


def line_json(resource: Mapping[str, Any], spans: Sequence[Span]) -> bytes:
    """One line of a capture file: TracesData with one resource and one scope."""
    scope = {"name": SCOPE, "version": specscope.__version__}
    data = {
        "resourceSpans": [
            {
                "resource": {"attributes": _attributes(resource)},
                "scopeSpans": [{"scope": scope, "spans": [span_json(span) for span in spans]}],
            }
        ]
    }
    return orjson.dumps(data) + b"\n"


def _opener(path: str, flags: int) -> int:
    """Raise for a pipe without a reader, instead of waiting for one."""
    number = os.open(path, flags | os.O_NONBLOCK, 0o666)
    os.set_blocking(number, True)
    return number


class CaptureWriter:
    """A lossless sink that writes a capture file. Raises UserError where the file cannot be written.

    The first line, written at once, holds the resource and no spans, so that even an empty run is a capture.
    Each line goes to the file whole, in one write; a torn last line can only come from a kill or a full disk.
    """

    def __init__(self, path: str | os.PathLike[str], run: RunInfo, vocabulary: Vocabulary) -> None:
        self.path = Path(path)
        self._encoder = Encoder(run, vocabulary)
        self._resource = resource_attributes(run)
        self._spans: list[Span] = []
        self._written = time.monotonic()
        self.is_gone = False  # at the end: the file was deleted or replaced while it was written
        is_new = not self.path.exists()
        try:
            self._file: BinaryIO = open(self.path, "wb", buffering=0, opener=_opener)  # noqa: SIM115
        except OSError as error:
            raise UserError(f"cannot write {self.path}: {error.strerror}") from error
        self._opened = os.fstat(self._file.fileno())
        try:
            self._write()
        except UserError:
            self._file.close()
            if is_new:  # leave no empty file behind
                self.path.unlink(missing_ok=True)
            raise

    def __call__(self, record: StepRecord) -> None:
        """Take a record; a line is written when there is enough for one, or when the engine rests."""
        self._spans += self._encoder.encode(record)
        if len(self._spans) >= LINE_SPANS or time.monotonic() - self._written > LINE_SECONDS:
            self._write()

    def _write(self) -> None:
        line = line_json(self._resource, self._spans)
        self._spans = []
        self._written = time.monotonic()
        try:
            view = memoryview(line)
            while view:
                view = view[self._file.write(view) :]
        except OSError as error:
            raise UserError(
                f"cannot continue writing {self.path}: {error.strerror}; what was already written is readable"
            ) from error

    def flush(self) -> None:
        """Write what is left. Raises UserError."""
        if self._spans:
            self._write()

    def close(self) -> None:
        """Write what is left. Raises UserError where it cannot; the file is closed in any case."""
        try:
            self.flush()
        finally:
            self.is_gone = self._is_elsewhere()
            self._file.close()

    def _is_elsewhere(self) -> bool:
        """Whether the name stands for another file now, or for none. Devices and pipes keep nothing."""
        try:
            return stat.S_ISREG(self._opened.st_mode) and not os.path.samestat(self._opened, os.stat(self.path))
        except OSError:
            return True
