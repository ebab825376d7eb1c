"""Changed samples into each of our readers: an answer, or a refusal in one line.

SPECSCOPE_SWEEP=100000 tries so many of each.
"""

import contextlib
import json
from datetime import datetime
from functools import cache

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from specscope.analyze.compare.failif import parse as parse_limits
from specscope.debug.breakpoints import EventKind, types_of
from specscope.engine.prompts import PromptSpec, parse_row
from specscope.errors import UserError
from specscope.plans.plan import parse_plan
from specscope.remote.receiver import JSON, PROTOBUF, Export
from specscope.trace.history.conditions import Expression
from specscope.trace.record.params import SamplingParams
from specscope.trace.wire.codec import DamagedError
from specscope.trace.wire.reading import read_capture
from specscope.trace.wire.sampling import read_ratio
from specscope.trace.wire.unspan import Decoder
from specscope.watch.counts import UnreadableError
from specscope.watch.logs import Log
from specscope.watch.pages import Intervals, read_metrics
from specscope.watch.results import read_json
from specscope.watch.source import LOGS
from tests.sweep import cases
from tests.trace.damage import small
from tests.trace.wrappings import WRAPPINGS
from tests.watch.samples import PEOPLE, SGLANG, text

REFUSALS = (UserError, UnreadableError, DamagedError)


@pytest.fixture(scope="module", autouse=True)
def here(tmp_path_factory):
    with contextlib.chdir(tmp_path_factory.mktemp("fuzz")):
        yield


def refused_in_one_line(read, *values, refusals=REFUSALS):
    message = ""
    try:
        read(*values)
    except refusals as error:
        message = str(error)
    assert "\n" not in message


def capture(data):
    with open("capture.jsonl", "wb") as file:
        file.write(data)
    assert not [warning for warning in read_capture("capture.jsonl").warnings if "\n" in warning]


def log(data):
    """Line by line, of which each may be refused."""
    for kind in LOGS:
        reader = Log(kind, datetime(2026, 11, 22, 12, 0), [])
        for line in data.decode("utf-8", "replace").splitlines():
            refused_in_one_line(reader.take, line)
        reader.rest(last=True)


def metrics(data):
    """Two pages, of which the second is the sample."""
    intervals = Intervals()
    for time_ns, page in enumerate((data.decode("utf-8", "replace"), text("metrics_after.txt")), 1):
        intervals.take(read_metrics(page, time_ns))


def responses(data):
    with contextlib.suppress(ValueError, RecursionError):
        read_json(json.loads(data), 7)


def export(kind):
    """Of the body of an export."""

    def reads(data):
        parts = []
        refused_in_one_line(lambda: parts.extend(Export.of(data, kind).parts), refusals=ValueError)
        decoder = Decoder()
        for span in (span for _, spans in parts for span in spans):
            decoder.feed(span)

    return reads


def words(data):
    """Everything that people write as a condition, a tree, a share or a line of prompts."""
    said = data.decode("utf-8", "replace")
    for kind in EventKind:
        names = types_of(kind)
        with contextlib.suppress(UserError):
            assert Expression(said, names)({name: of() for name, of in names.items()}) in (True, False)
    for read in (parse_limits, parse_plan, lambda text: read_ratio(text, "--sample")):
        refused_in_one_line(read, said)
    refused_in_one_line(parse_row, data, PromptSpec("", SamplingParams()))


READERS = {
    "capture": capture,
    "log": log,
    "metrics": metrics,
    "responses": responses,
    "OTLP JSON": export(JSON),
    "OTLP protobuf": export(PROTOBUF),
    "words": words,
}
WRAPPED = ("Jaeger's page in one line", "older Tempo", "proto of the file exporter", "compressed JSON")


@cache
def samples():
    """What each reader is made for."""
    lines = [json.dumps(line).encode() for line in small("planted")[:4]]
    body = ExportTraceServiceRequest()
    spans = body.resource_spans.add().scope_spans.add().spans
    span = spans.add(name="decode_step", trace_id=b"t" * 16, span_id=b"s" * 8)
    span.attributes.add(key="specscope.step").value.int_value = 3
    return {
        "capture": (b"\n".join(lines) + b"\n", *(WRAPPINGS[how](small("planted")[:4]) for how in WRAPPED)),
        "log": (
            text("log.txt").encode(),
            *((PEOPLE / name).read_bytes() for name in ("llamacpp/trace_two_slots.log", "sglang.log")),
        ),
        "metrics": (text("metrics_before.txt").encode(), SGLANG.encode()),
        "responses": (text("chat_greedy.json").encode(), text("get_metrics.json").encode()),
        "OTLP JSON": tuple(lines),
        "OTLP protobuf": (body.SerializeToString(),),
        "words": (
            b"p < 0.5 and not (kind == 'bonus')",
            b"tau drops > 1%",
            b"dynamic:16,depth=5",
            b"[(0,), (0, 0)]",
            b'{"prompt": "a", "stop": ["x"], "seed": 3}',
            b'{"messages": [{"role": "user", "content": "b"}], "top_p": 0.5}',
        ),
    }


WORDS = [b"", b"\0", b"\xff", b"\n", b"NaN", b"-1", b"1e999", b"9" * 30, b"null", b"[", b"{" * 60, b'"', b"\\u202e"]
WORDS.append(b"\x1b[2J")
PLACES = st.lists(
    st.tuples(st.integers(0, 2**20), st.integers(0, 60), st.sampled_from(WORDS) | st.binary(max_size=12)),
    max_size=6,
)


def changed(sample, changes):
    """A sample with pieces of it gone and others in their places."""
    for at, gone, new in changes:
        place = at % (len(sample) + 1)
        sample = sample[:place] + new + sample[place + gone :]
    return sample


@pytest.mark.parametrize("examples", [10, pytest.param(300, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", READERS)
def test_no_bytes_are_a_traceback(name, examples):
    @settings(max_examples=examples if examples == 10 else cases(examples), suppress_health_check=list(HealthCheck))
    @given(st.sampled_from(samples()[name]), PLACES)
    def bytes_of_all_kinds(sample, changes):
        refused_in_one_line(READERS[name], changed(sample, changes))

    refused_in_one_line(READERS[name], b"")
    for sample in samples()[name]:
        READERS[name](sample)  # as it is, it is read
    bytes_of_all_kinds()
