"""Every bad spelling, and changed samples, into each of our readers: an answer, or a refusal in one line.

SPECSCOPE_SWEEP=100000 tries so many of each. test_bad_input.py: the flags.
"""

import contextlib
import json
import re
from datetime import datetime
from functools import cache

import click
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from specscope.analyze.compare.failif import parse as parse_limits
from specscope.cli.options import checked_endpoint, real_from, whole_from
from specscope.debug.breakpoints import EventKind, types_of
from specscope.debug.commands import Commands
from specscope.debug.session import Session
from specscope.engine.config import EngineConfig
from specscope.engine.prompts import PromptSpec, parse_row, read_prompts
from specscope.errors import UserError
from specscope.plans.plan import parse_plan
from specscope.remote.attached import checked_address
from specscope.remote.receiver import JSON, PROTOBUF, Export
from specscope.trace.history.conditions import Expression
from specscope.trace.record.params import PARAM_NAMES, SamplingParams
from specscope.trace.wire.codec import DamagedError
from specscope.trace.wire.reading import read_capture
from specscope.trace.wire.sampling import read_ratio
from specscope.trace.wire.unspan import Decoder
from specscope.watch.counts import UnreadableError
from specscope.watch.logs import Log
from specscope.watch.pages import Intervals, read_metrics
from specscope.watch.results import read_json
from specscope.watch.source import LOGS
from tests import bad_inputs as bad
from tests.support.samples import PLANTED
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


FLAG = click.Option(["--number"])
RECORDED = read_capture(PLANTED).history


def refusal(read, *values, most=3000):
    """The one line with which a value is refused; None where it is taken."""
    try:
        read(*values)
    except UserError as error:
        message = str(error)
    else:
        return None
    assert "\n" not in message
    assert len(message) < most, message
    return message


def number(kind):
    return lambda text: kind.convert(text, FLAG, None)


def in_file(read):
    """A reader of files, given what the file holds."""

    def reads(content):
        with open("p.jsonl", "wb") as file:
            file.write(content)
        return read("p.jsonl")

    return reads


def third(lines):
    """Each as the third line of a file."""
    return [b'{"prompt": "fine"}\n\n' + line + b"\n" for line in lines]


def prompts(path):
    return read_prompts(path, PromptSpec("", SamplingParams()))


def row_of(text):
    return parse_row(text, PromptSpec("", SamplingParams()))


def over(first, words=""):
    """A line of the console over a recording, behind another line."""

    def run(text):
        commands = Commands(Session(RECORDED))
        commands.run(first)
        commands.run(words + text)

    return run


TEXTS = [text for text in bad.CONDITIONS if text and "@" not in text]
SPELLINGS = {
    "whole number": (number(whole_from(1, 2**40)), bad.NO_NUMBERS + bad.NO_WHOLE + bad.HUGE, "--number must be"),
    "number": (number(real_from(1e-9, 1e9)), bad.NO_NUMBERS + bad.NO_REAL, "--number must be"),
    "tree": (parse_plan, bad.TREES, ""),
    "endpoint": (lambda text: checked_endpoint(text, "--flag"), bad.ENDPOINTS, "--flag"),
    "address": (lambda text: checked_address(text, "--flag"), bad.ADDRESSES, "--flag"),
    "drafter": (lambda text: EngineConfig(drafter=text), bad.DRAFTERS, ""),
    "layers": (lambda text: EngineConfig(draft_model=text), bad.LAYERS, "self:N"),
    "stop texts": (lambda texts: SamplingParams(stop=texts), bad.STOPS, "stop"),
    "prompts": (in_file(prompts), third(bad.LINES), "p.jsonl, line 3: "),
    **{
        name: (in_file(prompts), third(lines), f"p.jsonl, line 3: .*({name}|is not JSON)")
        for name, lines in bad.PARAMS.items()
    },
    "file of prompts": (in_file(prompts), bad.FILES, "p.jsonl"),
    "data set": (in_file(prompts), third(bad.ROWS), "p.jsonl, line 3: "),
    "data set in an array": (in_file(prompts), bad.ARRAYS, "p.jsonl"),
    "capture": (in_file(read_capture), bad.FILES, "p.jsonl"),
    "path of a capture": (read_capture, [".", "./none", "/dev/zero", "/proc/self/mem"], ""),
    **{
        f"condition on {kind.value}": (lambda text, kind=kind: Expression(text, types_of(kind)), bad.CONDITIONS, "")
        for kind in EventKind
    },
    "command": (over("break reject"), bad.COMMANDS, ""),
    "break": (over("next", "break reject if "), bad.CONDITIONS, ""),
    "until": (over("next", "until "), bad.CONDITIONS, ""),
    "print": (over("next 4", "print "), TEXTS, ""),
}


@pytest.mark.parametrize("name", SPELLINGS)
def test_every_bad_spelling_is_refused_in_one_line(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    read, values, says = SPELLINGS[name]
    messages = [(ascii(value)[:60], refusal(read, value, most=650)) for value in values]
    assert [value for value, message in messages if message is None] == []  # taken
    assert [(value, message) for value, message in messages if not re.search(says, message)] == []


def test_good_spellings_are_taken(tmp_path, monkeypatch):
    """Else a reader that refuses everything would pass."""
    monkeypatch.chdir(tmp_path)
    good = {
        "whole number": ["1", "+12", "007"],
        "number": ["1", "1.", ".5", "+1e3", "2.5E-3"],
        "tree": ["5", "3x4", "[(0,), (1,), (0, 0)]", "dynamic:24,depth=6,top=4", "top:3x4", "sampled:5"],
        "endpoint": ["http://x:4317", "https://x", "localhost:4317"],
        "address": ["127.0.0.1:4317", "[::1]:0"],
        "drafter": ["ngram", "suffix"],
        "layers": ["self:2"],
        "stop texts": [["x"], []],
        "prompts": [b'{"prompt": "fine"}\n'],
        "data set": [b'{"turns": ["fine"]}\n'],
        "data set in an array": [b'["x"]'],
        "path of a capture": [PLANTED],
        "condition on reject": ["p < 0.5 and depth == 1"],
        "command": ["info step", "next 2"],
        "until": ["step > 2"],
        "print": ["p @ 0"],
    }
    for name, values in good.items():
        assert [value for value in values if refusal(SPELLINGS[name][0], value) is not None] == []


# Whatever the text: an answer or a UserError of one line.


odd_text = st.text(st.characters(), max_size=60)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | odd_text,
    lambda x: st.lists(x) | st.dictionaries(odd_text, x),
    max_leaves=8,
)


@given(st.dictionaries(st.sampled_from([*sorted(PARAM_NAMES), "prompt", "messages", "label"]), json_values, max_size=4))
def test_any_json_line(values):
    line = json.dumps(values).encode()
    if refusal(row_of, line) is None:
        row = row_of(line)
        json.dumps(row.params.to_dict()).encode()
        assert SamplingParams.from_dict(row.params.to_dict()) == row.params


@given(odd_text | st.text("htps:/[]0123456789.x@", max_size=30))
def test_any_address_and_endpoint(text):
    refusal(checked_address, text, "--listen")
    refusal(checked_endpoint, text, "--otlp-endpoint")


names = st.sampled_from(["break", "watch", "until", "goto", "next", "step", "print", "commands", "node", "info"])
names |= st.sampled_from(
    ["continue", "reverse-next", "reverse-continue", "finish", "request", "tree", "where", "check"]
)
rest = st.lists(
    st.sampled_from(
        ["reject", "step", "if", "p", ">", "0.5", "1", "2", "3", "r0", "99", "x", ";", "goto 0", "continue", "@", ","]
    )
    | odd_text,
    max_size=6,
).map(" ".join)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(names, rest).map(" ".join), max_size=12))
@example(["break reject 0\n0"])
def test_any_session_over_a_recording(lines):
    commands = Commands(Session(RECORDED))
    for line in lines:
        refusal(commands.run, line)
