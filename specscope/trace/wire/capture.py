"""Capture files: OTLP JSON Lines, as the OpenTelemetry file exporter writes them, so Jaeger and the collector
read them as they are. Where their name ends with .gz or .zst, they are compressed.

The line is laid out here rather than by opentelemetry-exporter-otlp-json-file because that takes 370 us for a
decode_step and this 25: the engine would feel it. A test holds both to the same JSON, value by value.
"""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import orjson

import specscope
from specscope.errors import UserError
from specscope.trace.files import Existing, Packer, open_capture
from specscope.trace.history.wording import plural
from specscope.trace.record.records import RunInfo, StepRecord
from specscope.trace.record.vocabulary import Vocabulary
from specscope.trace.wire.codec import dump_numbers, named
from specscope.trace.wire.spans import SCOPE, Encoder, Span, brief, engine_resource, resource_attributes

LINE_SPANS = 64  # spans a line at most
LINE_SECONDS = 0.5  # and a line at least this often, so that a kill loses little
SCALARS = {bool: "boolValue", float: "doubleValue", str: "stringValue"}
ERROR = 2  # a span's status
SAMPLED_LOCAL = 256  # span flags: the bit that says that "is remote" is known, and is false


def _value(value: Any) -> dict[str, Any]:  # noqa: ANN401
    """An OTLP AnyValue: 64-bit integers are strings, as proto3 JSON has them. {} for None."""
    kind = type(value)
    if kind is int:
        return {"intValue": str(value)}
    if name := SCALARS.get(kind):
        return {name: named(value) if kind is float else value}
    if not value:
        return {} if value is None else {"arrayValue": {}}
    kinds = set(map(type, value))
    if kinds == {float}:
        return {"arrayValue": {"values": _numbers(value, b'{"doubleValue":', b"}")}}
    if kinds == {int}:
        return {"arrayValue": {"values": _numbers(value, b'{"intValue":"', b'"}')}}
    return {"arrayValue": {"values": list(map(_value, value))}}


def _numbers(values: Sequence[float], before: bytes, after: bytes) -> orjson.Fragment:
    """An array of AnyValues, put together as text: arrays over a tree's nodes are most of a capture."""
    inner = dump_numbers(values)[1:-1].replace(b",", after + b"," + before)
    return orjson.Fragment(b"[" + before + inner + after + b"]")


def json_attributes(values: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [{"key": key, "value": _value(value)} for key, value in values.items()]


def span_json(span: Span) -> dict[str, Any]:
    out: dict[str, Any] = {"traceId": f"{span.trace:032x}", "spanId": f"{span.id:016x}"}
    if span.parent:
        out["parentSpanId"] = f"{span.parent:016x}"
    out |= {
        "flags": SAMPLED_LOCAL,
        "name": span.name,
        "kind": span.kind,
        "startTimeUnixNano": str(span.start_ns),
        "endTimeUnixNano": str(span.end_ns),
        "attributes": json_attributes(span.attributes),
    }
    if span.links:
        links = [{"traceId": f"{trace:032x}", "spanId": f"{span_id:016x}"} for trace, span_id in span.links]
        out["links"] = [link | {"flags": SAMPLED_LOCAL} for link in links]
    status = {} if span.error is None else {"code": ERROR} | ({"message": span.error} if span.error else {})
    return out | {"status": status}


def line_json(resource: Mapping[str, Any], spans: Sequence[Span]) -> bytes:
    """One line of a capture file: TracesData with the resource of requests, and the engine's; one scope each."""
    scope = {"name": SCOPE, "version": specscope.__version__}
    kinds = dict.fromkeys(span.of_engine for span in spans) or (False,)
    data = {
        "resourceSpans": [
            {
                "resource": {"attributes": json_attributes(engine_resource(resource) if of_engine else resource)},
                "scopeSpans": [
                    {"scope": scope, "spans": [span_json(span) for span in spans if span.of_engine is of_engine]}
                ],
            }
            for of_engine in kinds
        ]
    }
    return orjson.dumps(data) + b"\n"


class CaptureWriter:
    """A lossless sink that writes a capture file. Raises UserError where the file cannot be written.

    The first line, written at once, holds the resource and no spans, so that even an empty run is a capture.
    Each line goes to the file whole, in one write; what a full disk took only a part of is cut off again, so a torn
    last line can only come from a kill.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        run: RunInfo,
        vocabulary: Vocabulary,
        *,
        existing: Existing = Existing.REPLACE,
        on_full: Callable[[str], None] | None = None,
        service: str = "",
        recorded: bool = False,
    ) -> None:
        """`on_full`: hears of steps that a full disk dropped; None: an error. Others: as resource_attributes."""
        asked = self.path = Path(path)
        self._encoder = Encoder(run, vocabulary)
        self._resource = resource_attributes(run, service, recorded=recorded)  # the first line's
        self._spans: list[Span] = []
        self._steps = 0  # the number of steps that these spans belong to
        self.size = 0  # bytes of whole lines, as they are in the file
        self._written = time.monotonic()
        self._on_full = on_full
        self.dropped = self._told = 0  # steps that the disk did not take; as they were told last
        self.is_gone = False  # set at the end: the file was deleted or replaced while it was written
        self._packer = Packer(asked)
        try:
            self.path, self._file = open_capture(asked, existing)
        except OSError as error:
            raise UserError(f"cannot write {self.path}: {error.strerror}") from error
        self.renamed = "" if self.path == asked else f"{asked} exists: capturing to {self.path}"
        self._opened = os.fstat(self._file.fileno())
        try:
            self._write()
        except UserError:
            if stat.S_ISREG(self._opened.st_mode):  # leave no empty file behind
                self.path.unlink(missing_ok=True)
            self._file.close()
            raise

    def __call__(self, record: StepRecord) -> None:
        """Take a record; a line is written when there is enough for one, or when the engine rests."""
        self._spans += self._encoder.encode(record)
        self._steps += 1
        if len(self._spans) >= LINE_SPANS or time.monotonic() - self._written > LINE_SECONDS:
            self._write()

    def _write(self) -> None:
        line, steps = line_json(self._resource, self._spans), self._steps
        self._resource = brief(self._resource)
        self._spans, self._steps = [], 0
        self._written = time.monotonic()
        try:
            self._put(self._packer.add(line))
        except OSError as error:
            self._cut()
            self._packer.lost()
            if self._on_full is None or not self.size:
                raise UserError(
                    f"cannot continue writing {self.path}: {error.strerror}; the part already written is readable"
                ) from error
            self.dropped += steps
            if self.dropped >= max(2 * self._told, 1):  # the first, and whenever the count has doubled
                self._told, lost = self.dropped, plural(self.dropped, "step")
                self._on_full(f"{self.path}: {error.strerror}: {lost} not captured so far; the run continues")

    def _put(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            view = view[self._file.write(view) :]
        self.size += len(data)

    def _cut(self) -> None:
        """Truncate to the last whole line. Devices and pipes cannot be truncated."""
        with suppress(OSError):
            self._file.truncate(self.size)
            self._file.seek(self.size)

    def flush(self) -> None:
        if self._spans:
            self._write()

    def close(self) -> None:
        """Write what is left. Raises UserError where it cannot; the file is closed in any case."""
        try:
            self.flush()
            try:
                self._put(self._packer.close())
            except OSError:  # all that was written is readable without it
                self._cut()
        finally:
            self.is_gone = self._is_elsewhere()
            self._file.close()

    def losses(self) -> list[str]:
        """After `close`: what the file lacks, a line each."""
        lost = f"{plural(self.dropped, 'step')} not captured: {self.path} could not be written"
        lines = [lost] if self.dropped else []
        if self.is_gone:
            lines.append(f"{self.path} was deleted or replaced during the run: the capture is lost")
        return lines

    def _is_elsewhere(self) -> bool:
        """Whether the name now leads to another file, or to none. Devices and pipes are exempt."""
        try:
            return stat.S_ISREG(self._opened.st_mode) and not os.path.samestat(self._opened, os.stat(self.path))
        except OSError:
            return True
