"""Capture files: the official format, value by value; torn tails, full disks, other programs' files."""

import gzip
import io
import json
import os
import random
import signal
import sys
import tracemalloc
import zlib
from dataclasses import replace
from pathlib import Path

import pytest
import zstandard
from hypothesis import given, settings
from opentelemetry.exporter.otlp.json.file import FileSpanExporter
from opentelemetry.sdk.resources import Resource

from specscope.errors import UserError
from specscope.trace.files import CAPTURE, GZIP, ZSTD, Existing, check_output
from specscope.trace.record.records import Absent
from specscope.trace.record.vocabulary import Vocabulary
from specscope.trace.wire.capture import CaptureWriter, line_json
from specscope.trace.wire.reading import CaptureReader, read_capture
from specscope.trace.wire.sending import readable
from specscope.trace.wire.spans import engine_resource, resource_attributes
from tests.processes import room_for
from tests.trace.samples import encoded, written
from tests.trace.samples import record as sample
from tests.trace.samples import records as some_records
from tests.trace.strategies import RUN, runs, vocabularies


@given(runs(), vocabularies)
@settings(max_examples=8)
def test_a_line_is_what_the_official_exporter_writes(records, vocabulary):
    spans = encoded(records, RUN, vocabulary)
    resource = Resource(resource_attributes(RUN))
    stream = io.StringIO()
    of_engine = Resource(engine_resource(resource.attributes))
    FileSpanExporter(stream=stream).export([readable(s, of_engine if s.of_engine else resource) for s in spans])
    official = json.loads(stream.getvalue())
    ours = json.loads(line_json(resource.attributes, spans))
    assert ours == official


NAMES = ("run.jsonl", "run.jsonl.gz", "run.jsonl.zst")


def test_every_cut_is_read_up_to_the_cut(tmp_path):
    path, cut = tmp_path / "run.jsonl", tmp_path / "cut.jsonl"
    records = some_records()
    written(path, records)
    whole = path.read_bytes()
    first = whole.index(b"\n") + 1
    for size in range(first, len(whole), 97):
        cut.write_bytes(whole[:size])
        reader = read_capture(cut)
        assert reader.history.steps == records[: len(reader.history.steps)]
        torn = len(whole[:size]) - (whole[:size].rfind(b"\n") + 1)
        if torn:
            assert f"{torn:,} of {size:,} bytes are lost" in reader.warnings[0]
    cut.write_bytes(whole[: first // 2])
    with pytest.raises(UserError, match="ends in its first line"):
        read_capture(cut)


def test_a_run_that_is_cut_before_its_requests_end_says_so(tmp_path):
    written(tmp_path / "run.jsonl", some_records()[:-1])
    assert read_capture(tmp_path / "run.jsonl").warnings[-1] == "1 of 1 request did not end in this file"


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("{broken}", "line 2: JSON is malformed"),
        ('{"resourceSpans":[{"resource":{"attributes":[RUN]},"scopeSpans":[]}]}', "line 2: the resource names no"),
        ('{"resourceSpans":[{"resource":RESOURCE,"scopeSpans":[{"spans":[7]}]}]}', "a span: a span: Expected `object`"),
    ],
)
def test_a_damaged_line_is_named_and_left_out(tmp_path, line, why):
    path = tmp_path / "run.jsonl"
    written(path, some_records())
    first, *others = path.read_text().splitlines(keepends=True)
    resource = json.loads(first)["resourceSpans"][0]["resource"]
    line = line.replace("RESOURCE", json.dumps(resource))
    line = line.replace("RUN", '{"key":"specscope.run.id","value":{"intValue":"5"}}')
    path.write_text(first + line + "\n" + "".join(others))
    reader = read_capture(path)
    assert reader.history.steps == some_records()
    assert len(reader.warnings) == 1
    assert f"left out 1×: {why}" in reader.warnings[0]


@pytest.mark.parametrize("name", NAMES)
def test_a_full_disk_stops_the_run_and_keeps_what_was_written(tmp_path, monkeypatch, name):
    monkeypatch.setattr("specscope.trace.wire.capture.LINE_SPANS", 1)
    path, records = tmp_path / name, some_records()
    writer = CaptureWriter(path, RUN, Vocabulary())
    writer(records[0])
    with (
        room_for(path.stat().st_size + 10),
        pytest.raises(UserError, match="File too large; the part already written is readable"),
    ):
        writer(records[1])
    writer.close()
    reader = read_capture(path)
    assert reader.history.steps == records[:1]
    assert not [line for line in reader.warnings if "cut off" in line]


@pytest.mark.parametrize("name", NAMES)
def test_a_full_disk_drops_steps_where_that_is_asked_for_and_goes_on_when_there_is_room(tmp_path, monkeypatch, name):
    """What is compressed begins a new stream then: what it would refer to is not there."""
    monkeypatch.setattr("specscope.trace.wire.capture.LINE_SPANS", 1)
    path, told = tmp_path / name, []
    records = [sample(number, ()) for number in range(9)]
    writer = CaptureWriter(path, RUN, Vocabulary(), on_full=told.append)
    writer(records[0])
    with room_for(path.stat().st_size + 10):
        for record in records[1:8]:
            writer(record)
    assert told == [
        f"{path}: File too large: {text} not captured so far; the run continues"
        for text in ("1 step", "2 steps", "4 steps")
    ]
    writer(records[8])
    writer.close()
    assert writer.losses() == [f"7 steps not captured: {path} could not be written"]
    reader = read_capture(path)
    assert reader.history.steps == [records[0], replace(records[8], absent=Absent(steps=7))]
    assert reader.warnings == ["a part of its run, without 7 whole engine steps"]
    assert name == NAMES[0] or whole_again(path) == 2


def whole_again(path):
    """How many streams a compressed file holds, each with its end."""
    data, count = path.read_bytes(), 0
    while data:
        stream = zlib.decompressobj(31) if data.startswith(GZIP) else zstandard.ZstdDecompressor().decompressobj()
        stream.decompress(data)
        assert stream.eof
        data, count = stream.unused_data, count + 1
    return count


@pytest.mark.parametrize(("name", "magic"), [(NAMES[1], GZIP), (NAMES[2], ZSTD)])
def test_a_compressed_capture_is_one_stream_and_is_read_while_it_is_written(tmp_path, monkeypatch, name, magic):
    monkeypatch.setattr("specscope.trace.wire.capture.LINE_SPANS", 1)
    path, records = tmp_path / name, some_records()
    writer = CaptureWriter(path, RUN, Vocabulary())
    for n, record in enumerate(records, 1):
        writer(record)
        assert read_capture(path).history.steps == records[:n]
    writer.close()
    assert writer.size == path.stat().st_size
    assert path.read_bytes().startswith(magic)
    assert whole_again(path) == 1
    with pytest.raises(UserError, match="exists, and --no-clobber keeps it"):
        CaptureWriter(path, RUN, Vocabulary(), existing=Existing.REFUSE)
    other = CaptureWriter(path, RUN, Vocabulary(), existing=Existing.NEW_NAME)
    assert other.path == tmp_path / f"run.jsonl.2{path.suffix}"
    other.close()
    written(path, records[:1])  # ours may be replaced
    assert read_capture(path).history.steps == records[:1]
    path.write_bytes(gzip.compress(b"letters"))
    with pytest.raises(UserError, match="was not written by this command"):
        written(path, records)


def test_zstd_without_a_library_is_one_line_before_anything_is_written(tmp_path, monkeypatch):
    for module in ("zstandard", "compression.zstd"):
        monkeypatch.setitem(sys.modules, module, None)
    path = tmp_path / NAMES[2]
    for refused in (
        lambda: CaptureWriter(path, RUN, Vocabulary()),
        lambda: check_output(str(path), "-o", (), CAPTURE),
    ):
        with pytest.raises(UserError, match=r"zstd needs pip install zstandard, or Python 3\.14; a name in \.gz needs"):
            refused()
    assert not path.exists()
    written(tmp_path / NAMES[1], some_records())


@pytest.mark.parametrize("name", NAMES)
def test_what_a_killed_writer_had_flushed_is_read(tmp_path, name):
    """kill -9, again and again, each at another moment."""
    records = [sample(number, ()) for number in range(400)]
    for turn in range(0, 50, 16):
        path, (told, tells) = tmp_path / f"{turn}-{name}", os.pipe()
        child = os.fork()
        if not child:
            writer = CaptureWriter(path, RUN, Vocabulary())
            for number, record in enumerate(records, 1):
                writer(record)
                if number % 3 == 0:
                    writer.flush()
                    os.write(tells, bytes([number // 3]))
            signal.pause()
        os.close(tells)
        for _ in range(1 + turn * 2):
            os.read(told, 1)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        known = 3 * (1 + turn * 2 + len(os.read(told, 1000)))
        os.close(told)
        steps = read_capture(path).history.steps
        assert steps == records[: len(steps)]
        assert len(steps) >= known


# Spans of other services in the same file

SPANS = Path(__file__).parents[2] / "data" / "vllm" / "spans.jsonl"


@pytest.mark.parametrize("seed", range(4))
def test_lines_of_other_services_may_come_first_last_or_between(tmp_path, seed):
    """What is read is the same in any order."""
    whole = read_capture(SPANS)
    lines = SPANS.read_bytes().splitlines(keepends=True)
    random.Random(seed).shuffle(lines)
    (tmp_path / "mixed.jsonl").write_bytes(b"".join(lines))
    mixed = read_capture(tmp_path / "mixed.jsonl")
    assert mixed.history.steps == whole.history.steps
    assert mixed.warnings == whole.warnings == []
    assert mixed.history.others == whole.history.others == 17
    parts = [part for line in lines for part in json.loads(line)["resourceSpans"]]  # they may share a line
    (tmp_path / "one.jsonl").write_text(json.dumps({"resourceSpans": parts}) + "\n")
    one = read_capture(tmp_path / "one.jsonl").history
    assert (one.steps, one.others) == (whole.history.steps, 17)


def test_while_a_capture_is_read_it_is_told_how_long_the_rest_takes():
    reader = CaptureReader(Path(__file__).parents[3] / "traces" / "eagle.jsonl")
    shares = [reader.progress]
    while reader.read(0):
        shares.append(reader.progress)
        assert (reader.seconds_left is None) == (reader.progress < 0.01)
        assert (reader.seconds_left or 0) >= 0
    assert (shares, reader.progress, reader.seconds_left) == (sorted(shares), 1.0, 0.0)
    assert len(set(shares)) > 2


def test_a_line_without_end_is_left_out_without_being_held(tmp_path, monkeypatch):
    for module in ("kinds", "wire.unwrap"):
        monkeypatch.setattr(f"specscope.trace.{module}.LARGEST", 2**20)
    written(tmp_path / "run.jsonl", some_records())
    first, *rest = (tmp_path / "run.jsonl").read_bytes().splitlines(keepends=True)
    long = b'{"resourceSpans": [' + b"{}, " * 6 * 2**20 + b"{}]}\n"
    (tmp_path / "long.jsonl").write_bytes(b"".join([first, long, *rest, long[:-1]]))
    tracemalloc.start()
    reader = read_capture(tmp_path / "long.jsonl")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert reader.history.steps == some_records()
    assert reader.warnings[0] == "left out 2×: line 2: it is longer than 1 MiB, the limit"
    assert peak < len(long) / 2
    (tmp_path / "long.jsonl").write_bytes(b'{"resourceSpans": [' + long + b"]}")
    with pytest.raises(UserError, match=r"is not a capture: .* \(it is longer than 1 MiB, the limit\)"):
        read_capture(tmp_path / "long.jsonl")
