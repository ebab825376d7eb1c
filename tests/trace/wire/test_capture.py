"""Capture files: the official format, torn tails, full disks, other programs' files; and samples of traces."""

import gzip
import io
import json
import os
import random
import signal
import sys
import tracemalloc
import zlib
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import zstandard
from hypothesis import example, given, settings
from hypothesis import strategies as st
from opentelemetry.exporter.otlp.json.file import FileSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace.sampling import Decision, ParentBased, TraceIdRatioBased
from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags, set_span_in_context

from specscope.errors import UserError
from specscope.trace.files import CAPTURE, GZIP, ZSTD, Existing, check_output
from specscope.trace.history.history import History
from specscope.trace.history.interval import interval_record
from specscope.trace.record.aggregate import Aggregate, LeftOut, Reason, Sampled
from specscope.trace.record.records import Absent, FinishReason
from specscope.trace.record.vocabulary import Vocabulary
from specscope.trace.wire.capture import CaptureWriter, line_json
from specscope.trace.wire.reading import CaptureReader, read_capture
from specscope.trace.wire.sampling import Sampler, ratio_keeps, read_ratio
from specscope.trace.wire.sending import readable
from specscope.trace.wire.spans import SpanLevel, engine_resource, resource_attributes
from tests.processes import room_for
from tests.trace.sampled_runs import NOT_SAMPLED, SAMPLED, FakeEngine, sampled_runs
from tests.trace.samples import decode, encoded, written
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
    with pytest.raises(UserError, match=r"ends in its first line or document, .* \(unexpected end of data: "):
        read_capture(cut)
    cut.write_bytes(b'{\n"resourceSpans": [\n{"scopeSpans": [{}]\n, {}]\n')
    with pytest.raises(UserError, match=r"read \(unexpected character, .*: line 4 column 3 "):
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
def test_what_a_killed_writer_had_flushed_is_read_and_it_leaves_no_lock(tmp_path, name):
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
        with pytest.raises(UserError, match="is being written by another process"):
            CaptureWriter(path, RUN, Vocabulary())
        assert read_capture(path).warnings == []  # it is being written
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        known = 3 * (1 + turn * 2 + len(os.read(told, 1000)))
        os.close(told)
        steps = read_capture(path).history.steps
        assert steps == records[: len(steps)]
        assert len(steps) >= known
        CaptureWriter(path, RUN, Vocabulary()).close()
        assert {one.name for one in tmp_path.iterdir()} == {f"{at}-{name}" for at in range(0, turn + 1, 16)}


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


LONG = (3, 3)  # a draft of three tokens, all accepted
ratios = st.floats(0, 1) | st.sampled_from([0.0, 1.0, 0.5, 2**-64, 0.1])


def through(records, ratio):
    """(the sampler, what it gives)."""
    sampler = Sampler(RUN.run_id, ratio)
    return sampler, [sampled for record in records if (sampled := sampler(record)) is not None]


@given(st.integers(1, 2**128 - 1), ratios, st.sampled_from([None, 0, 1]), st.booleans())
@example(2**64 - 1, 1.0, None, True)
@example(2**64, 2**-64, None, True)
@example(7, 0.0, None, True)
def test_parent_flag_and_ratio_agree_with_the_sdk(trace, ratio, flag, remote):
    context, caller = None, ""
    if flag is not None:
        parent = SpanContext(trace, 9, remote, TraceFlags(flag))
        context, caller = set_span_in_context(NonRecordingSpan(parent)), f"00-{trace:032x}-{9:016x}-{flag:02x}"
    told = ParentBased(TraceIdRatioBased(ratio)).should_sample(context, trace, "text_completion")
    kept = ratio_keeps(trace, caller, ratio)
    assert (kept is not None) == (told.decision is Decision.RECORD_AND_SAMPLE)
    assert kept in ((None, Reason.RATIO) if flag is None else (None, Reason.PARENT))
    for caller in (f"00-{0:032x}-{9:016x}-01", f"00-{5:032x}-{0:016x}-01"):  # which is none
        assert ratio_keeps(trace, caller, 1.0) is Reason.RATIO


def requests(spans):
    return Counter((s.trace, s.id, s.name) for s in spans if s.name in ("queue", "prefill", "decode_step"))


@given(sampled_runs(), ratios)
@settings(max_examples=30, deadline=None)
def test_whole_traces_are_kept_as_the_sdk_would_and_a_step_says_what_was_left_out_of_it(records, ratio):
    """By the trace ids that the spans really have. It is read again as it was, and nothing counts as lost."""
    sampler, out = through(records, ratio)
    every, kept = encoded(records), encoded(out)
    callers = {int(SAMPLED[3:35], 16): True, int(NOT_SAMPLED[3:35], 16): False}

    def wanted(trace):
        told = TraceIdRatioBased(ratio).should_sample(None, trace, "").decision
        return callers.get(trace, told is Decision.RECORD_AND_SAMPLE)

    assert requests(kept) == Counter({key: n for key, n in requests(every).items() if wanted(key[0])})
    assert sampler.kept.total() + sampler.left_out == len({name for record in records for name in _names(record)})
    whole, sent = {record.step: record for record in records}, -1
    for record in out:
        for end in record.finished:
            reason = Reason.PARENT if end.info.traceparent else Reason.RATIO
            assert end.sampled == Sampled(reason, 0 if end.info.traceparent else ratio, False)
        own = {part.request for part in record.requests}
        gone = [part for part in whole[record.step].requests if part.request not in own]
        assert (record.left_out or LeftOut()) == LeftOut(
            steps=record.step - sent - 1,
            requests=len(gone),
            prefill_tokens=sum(part.prefill_tokens for part in gone),
            drafted=sum(len(part.tree) for part in gone),
            accepted=sum(part.verdict.accepted for part in gone),
            emitted=sum(part.emitted for part in gone),
        )
        assert _names(record)  # one of its requests is kept
        assert record.step > sent
        sent = record.step
    decoder, back = decode(kept)
    assert (back, decoder.lost) == (out, 0)


def _names(record):
    told = (*(i.id for i in record.admitted), *(p.request for p in record.requests), *record.preempted)
    return {*told, *(end.info.id for end in record.finished)}


@given(sampled_runs())
@settings(max_examples=30, deadline=None)
def test_a_history_of_what_was_kept_stands_on_the_same_branch(records):
    """Where the step after which a branch begins is left out, the branch follows the last one before it."""
    _, out = through(records, 0.4)
    whole, sampled = History(), History()
    for record in records:
        whole.append(record)
    for record in out:
        sampled.append(record)
    kept = {record.step for record in out}
    if out and out[-1].step == records[-1].step:
        assert [r.step for r in sampled.steps] == [r.step for r in whole.steps if r.step in kept]
    for branch in sampled.branches:
        sampled.show(branch)
        whole.show(branch)
        last = sampled.last_step
        assert [r.step for r in sampled.steps] == [r.step for r in whole.steps if r.step in kept and r.step <= last]


@pytest.mark.parametrize("asked", ["2", "-1", "nan", "1_0"])
def test_what_cannot_be_used_is_refused_in_one_line(asked):
    with pytest.raises(UserError, match=rf"^--sample must be (a number|between 0 and 1, such as 0.01), not '?{asked}"):
        read_ratio(asked, "--sample")


def test_another_request_of_the_same_name_is_decided_anew():
    records = [
        FakeEngine(next=number).step([(caller, {})], [(0, FinishReason.EOS)], [LONG])
        for number, caller in enumerate((NOT_SAMPLED, SAMPLED))
    ]
    _, out = through(records, 0.5)
    assert [record.step for record in out] == [1]


def test_what_ended_long_ago_is_forgotten(monkeypatch):
    monkeypatch.setattr("specscope.trace.wire.sampling.REMEMBERED", 3)
    engine, sampler = FakeEngine(), Sampler(RUN.run_id, 0.5)
    for _ in range(9):
        sampler(engine.step([("", {})], [(0, FinishReason.EOS)], [LONG]))
    assert (list(sampler._decided), sampler.kept.total() + sampler.left_out) == (["r6", "r7", "r8"], 9)


def test_intervals_of_an_engine_that_tells_counts_go_on():
    told = [interval_record(n, n * 10**9, (n + 1) * 10**9, Aggregate("vLLM /metrics", drafts=n)) for n in range(3)]
    assert through(told, 0.0)[1] == told


def test_levels_below_trees_say_why_too():
    _, out = through([FakeEngine().step([("", {})], [(0, FinishReason.EOS)], [LONG])], 1.0)
    for level in (SpanLevel.REQUESTS, SpanLevel.STEPS, SpanLevel.TREES):
        root = encoded(out[:1], level=level)[-1]
        told = {key.rpartition(".")[2]: value for key, value in root.attributes.items() if "sampling" in key}
        assert told == {"reason": "ratio", "early": False, "ratio": 1.0}
