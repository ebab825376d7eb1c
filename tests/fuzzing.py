"""Bytes from outside into each of our readers: an answer, or a refusal in one line.

tests/test_fuzzing.py gives them changed samples by hypothesis.
"""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Callable
from datetime import datetime
from functools import cache
from pathlib import Path

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from specscope.analyze.compare.failif import parse as parse_limits
from specscope.debug.breakpoints import EventKind, types_of
from specscope.errors import UserError
from specscope.plans.plan import parse_plan
from specscope.remote.receiver import JSON, PROTOBUF, Export
from specscope.trace.history.conditions import Expression
from specscope.trace.wire.codec import DamagedError
from specscope.trace.wire.reading import read_capture
from specscope.trace.wire.sampling import read_ratio
from specscope.trace.wire.unspan import Decoder
from specscope.watch.counts import UnreadableError
from specscope.watch.logs import Log
from specscope.watch.pages import Intervals, read_metrics
from specscope.watch.results import read_json
from specscope.watch.source import LOGS
from tests.trace.damage import small
from tests.trace.wrappings import WRAPPINGS
from tests.watch.samples import PEOPLE, SGLANG, text

WRAPPED = ("Jaeger's page in one line", "older Tempo", "proto of the file exporter", "compressed JSON")
REFUSALS = (UserError, UnreadableError, DamagedError)


def one_line(error: BaseException) -> None:
    """A refusal is one line."""
    assert "\n" not in str(error), error


@cache
def _place() -> Path:
    return Path(tempfile.mkdtemp(prefix="specscope-fuzz-")) / "capture.jsonl"


def capture(data: bytes) -> None:
    """A capture file."""
    _place().write_bytes(data)
    reader = read_capture(str(_place()))
    for warning in reader.warnings:
        assert "\n" not in warning


def log(data: bytes) -> None:
    """A log, line by line, of which each may be refused."""
    for kind in LOGS:
        reader = Log(kind, datetime(2026, 11, 22, 12, 0), [])
        for line in data.decode("utf-8", "replace").splitlines():
            with contextlib.suppress(UnreadableError):
                reader.take(line)
        reader.rest(last=True)


def metrics(data: bytes) -> None:
    """Two pages of metrics, of which the second is the sample."""
    intervals = Intervals()
    for time_ns, page in enumerate((data.decode("utf-8", "replace"), text("metrics_after.txt")), 1):
        intervals.take(read_metrics(page, time_ns))


def responses(data: bytes) -> None:
    """Answers of servers."""
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        return
    read_json(value, 7)


def _export(data: bytes, kind: str) -> None:
    try:
        parts = Export.of(data, kind).parts
    except ValueError as error:
        one_line(error)
        return
    decoder = Decoder()
    for span in (span for _, spans in parts for span in spans):
        decoder.feed(span)


def otlp_json(data: bytes) -> None:
    """The body of an export as JSON."""
    _export(data, JSON)


def otlp_protobuf(data: bytes) -> None:
    """The same in protobuf."""
    _export(data, PROTOBUF)


def conditions(data: bytes) -> None:
    """Everything that people write as a condition, or as a tree."""
    words = data.decode("utf-8", "replace")
    for kind in EventKind:
        names = types_of(kind)
        with contextlib.suppress(UserError):
            assert Expression(words, names)({name: of() for name, of in names.items()}) in (True, False)
    for read in (parse_limits, parse_plan, lambda text: read_ratio(text, "--sample")):
        try:
            read(words)
        except UserError as error:
            one_line(error)


LOG_FILES = ("llamacpp/trace_two_slots.log", "sglang.log")


@cache
def samples() -> dict[str, tuple[bytes, ...]]:
    """What each reader is made for."""
    lines = [json.dumps(line).encode() for line in small("planted")[:4]]
    exports = [ExportTraceServiceRequest() for _ in lines]
    answers = [text(name) for name in ("chat_greedy.json", "get_metrics.json")]
    for span in (export.resource_spans.add().scope_spans.add().spans.add() for export in exports):
        span.name, span.trace_id, span.span_id = "decode_step", b"t" * 16, b"s" * 8
        span.attributes.add(key="specscope.step").value.int_value = 3
    return {
        "capture": (b"\n".join(lines) + b"\n", *(WRAPPINGS[how](small("planted")[:4]) for how in WRAPPED)),
        "log": (text("log.txt").encode(), *((PEOPLE / name).read_bytes() for name in LOG_FILES)),
        "metrics": (text("metrics_before.txt").encode(), SGLANG.encode()),
        "responses": tuple(answer.encode() for answer in answers),
        "otlp_json": tuple(lines),
        "otlp_protobuf": tuple(export.SerializeToString() for export in exports),
        "conditions": (
            b"p < 0.5 and not (kind == 'bonus')",
            b"tau drops > 1%",
            b"dynamic:16,depth=5",
            b"[(0,), (0, 0)]",
        ),
    }


TARGETS: dict[str, Callable[[bytes], None]] = {
    function.__name__: function for function in (capture, log, metrics, responses, otlp_json, otlp_protobuf, conditions)
}


def run(name: str, data: bytes) -> None:
    """A reader and some bytes. Raises what it must not."""
    try:
        TARGETS[name](data)
    except REFUSALS as error:
        one_line(error)
