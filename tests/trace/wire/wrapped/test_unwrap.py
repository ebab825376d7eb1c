"""Whatever a trace store or a collector puts around spans, the spans are those that were sent."""

import gzip
import io
import json
import tracemalloc
from pathlib import Path

import pytest

from specscope.errors import UserError
from specscope.trace.kinds import ReadAs, kind_of
from specscope.trace.record.records import RequestStep
from specscope.trace.wire import schema
from specscope.trace.wire.codec import DamagedError
from specscope.trace.wire.otlp_json import read_line
from specscope.trace.wire.reading import read_capture
from specscope.trace.wire.unwrap import unwrapped
from tests.trace.damage import small, spans_of
from tests.trace.wrappings import MICROSECONDS, WRAPPINGS, export

PEOPLE, VLLM = (Path(__file__).parents[3] / "data" / name for name in ("people", "vllm"))


def refuse(number, why):
    raise AssertionError(f"{number}: {why}")


def parts_of(content, leave_out=refuse):
    """The parts of each of its lines, as the capture reader takes them."""
    kind = kind_of(content)
    assert kind is None or kind.reader is ReadAs.CAPTURES, kind
    return [read(line) for _, line in unwrapped(io.BytesIO(content), kind, "x", leave_out)]


def read(line):
    return read_line(line) if isinstance(line, bytes) else line


@pytest.mark.parametrize("how", WRAPPINGS)
def test_a_wrapped_capture_is_read_as_the_capture(how, tmp_path):
    lines = [json.loads(line) for line in gzip.decompress((PEOPLE / "cap.jsonl.gz").read_bytes()).splitlines()]
    plain_file, file = tmp_path / "plain.jsonl", tmp_path / "wrapped"
    plain_file.write_bytes(WRAPPINGS["lines"](lines))
    file.write_bytes(WRAPPINGS[how](lines))
    sent, back = read_capture(plain_file), read_capture(file)
    assert (back.warnings, back.history.run) == ([], sent.history.run)
    assert len(back.history.steps) == len(sent.history.steps) == 11
    for ours, theirs in zip(back.history.steps, sent.history.steps, strict=True):
        assert ours.requests == theirs.requests
        assert how in MICROSECONDS or ours == theirs


@pytest.mark.parametrize("how", WRAPPINGS)
def test_spans_of_other_services_are_named(how, tmp_path):
    lines = [json.loads(line) for line in (VLLM / "sglang_spans.jsonl").read_bytes().splitlines()]
    (tmp_path / "others").write_bytes(WRAPPINGS[how](lines))
    with pytest.raises(UserError, match=r"holds only spans of other services \(sglang\) and no specscope run"):
        read_capture(tmp_path / "others")


@pytest.mark.parametrize("name", ["collector.binpb.gz", "collector.binpb.zstd", "collector.json.zstd"])
def test_files_of_a_real_collector(name):
    """Of its file exporter: messages with their lengths, fields in reverse, each compressed."""
    sent, back = (read_capture(PEOPLE / file) for file in ("cap.jsonl.gz", name))
    assert (back.history.run, back.history.steps, back.warnings) == (sent.history.run, sent.history.steps, [])


def test_what_jaegers_page_saves_is_what_its_api_gives():
    """The same trace by two ways out of a real Jaeger: ends lose a part of a microsecond twice."""
    api, page = (read_capture(PEOPLE / f"jaeger_{name}.json.gz").history for name in ("v3", "page"))
    assert page.run == api.run
    assert len(api.steps) == 22
    for sent, back in zip(api.steps, page.steps, strict=True):
        assert back.requests == sent.requests
        for end, other in zip(sent.finished, back.finished, strict=True):
            assert 0 <= end.finished_ns // 1000 - other.finished_ns // 1000 <= 1


ODD = (  # tags that nobody of ours wrote
    {"key": "n", "type": "string", "value": None},
    {"key": "n", "type": "int64", "value": 12.5},
    {"key": "n", "type": "int64", "value": 10**30},
    {"key": "n", "type": "bool", "value": "maybe"},
    {"key": "n", "type": "string", "value": {"a": 1}},
    {"key": "n", "type": "binary", "value": "!"},
    {"key": "n", "value": 7},
    {"key": 5, "type": "string", "value": "x"},
    {"type": "string", "value": "x"},
)


@pytest.mark.every(3)
@pytest.mark.parametrize("tag", ODD)
def test_an_odd_tag_of_jaegers_and_a_process_without_a_name_cost_no_span(tag, tmp_path):
    page = json.loads(gzip.decompress((PEOPLE / "jaeger_page.json.gz").read_bytes()))
    for trace in page["data"]:
        for process in trace["processes"].values():
            del process["serviceName"]
        for tagged in (*trace["spans"], *trace["processes"].values()):
            tagged["tags"].append(tag)
    (tmp_path / "odd.json").write_text(json.dumps(page))
    sent, back = read_capture(PEOPLE / "jaeger_page.json.gz"), read_capture(tmp_path / "odd.json")
    assert (back.history.run, back.history.steps, back.warnings) == (
        sent.history.run,
        sent.history.steps,
        sent.warnings,
    )


def test_a_text_that_looks_like_an_array_stays_text():
    counts = ("specscope.step", "specscope.request.step", "specscope.context_len", "specscope.prefill_tokens")
    attributes = dict.fromkeys(counts, 3) | {"specscope.request.id": "[1]", "specscope.kv.blocks": "[4, 5]"}
    [told] = schema.PREFILL.read([attributes])
    assert (told[RequestStep].request, told[RequestStep].blocks.tolist()) == ("[1]", [4, 5])
    for damaged in ("[4, 5", "[4, -5]", '{"4": 5}', "[" * 5000, ""):
        with pytest.raises(DamagedError, match=r"`specscope.kv.blocks`"):
            schema.PREFILL.read([attributes | {"specscope.kv.blocks": damaged}])


def test_a_list_of_protobuf_that_is_longer_than_the_bound(monkeypatch):
    """An entry at a time: four times the entries take no more memory."""
    bound = 2**17
    monkeypatch.setattr("specscope.trace.wire.otlp_proto.LARGEST", bound)
    peaks = []
    for count in (6, 24):
        content = WRAPPINGS["protobuf"](lines := small("planted") * count)
        file = io.BytesIO(content)
        tracemalloc.start()
        numbered = unwrapped(file, kind_of(content), "x", refuse)
        spans = sum(len(found) for _, parts in numbered for _, found in parts)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        assert spans == sum(len(spans_of(line)) for line in lines)
    assert len(content) > 3 * bound
    assert peaks[1] < 1.2 * peaks[0]


@pytest.mark.parametrize("how", ["one document", "indented", "Jaeger's page", "Jaeger's page in one line", "Tempo"])
def test_a_document_above_the_bound_is_refused(how, monkeypatch):
    for module in ("kinds", "wire.unwrap"):
        monkeypatch.setattr(f"specscope.trace.{module}.LARGEST", 2**14)
    content = WRAPPINGS[how](small("planted"))
    with pytest.raises((UserError, AssertionError), match=r"over 0 MiB: write one per line|longer than 0 MiB"):
        parts_of(content)


def test_a_trace_that_is_none_is_named_with_its_document():
    faults = []
    content = b'{"data": [{"spans": 1}]}\n{"result": {"resourceSpans": [{"resource": {}}]}}\n'
    assert parts_of(content, lambda number, why: faults.append((number, why))) == [[({}, [])]]
    assert faults == [(1, "a trace without `spans` and `processes`")]


def test_messages_that_cannot_be_read_are_named_and_the_others_are_read(monkeypatch):
    monkeypatch.setattr("specscope.trace.wire.otlp_proto.LARGEST", 2**16)
    good, faults = export(small("planted")[0]), []
    odd = b"\x0a\x05\x12\x03\x12\x01\xff"  # a span of one byte, which is none
    messages = [good, b"\xff" * 9, bytes(2**17), odd, good]
    content = b"".join(len(message).to_bytes(4, "big") + message for message in messages)
    parts = parts_of(content, lambda number, why: faults.append((number, why)))
    assert [list(map(str, spans)) for [(_, spans)] in parts] == [[], ["a span that is not OTLP protobuf"], []]
    assert faults == [(2, "it is not OTLP protobuf"), (3, "a message or a resource's spans of over 128 MiB, the limit")]


@pytest.mark.parametrize("how", ["lines", "Jaeger's API as a stream", "proto of the file exporter", "protobuf"])
def test_a_file_that_is_cut_off_says_so(how, tmp_path):
    lines = [json.loads(line) for line in gzip.decompress((PEOPLE / "cap.jsonl.gz").read_bytes()).splitlines()]
    content = WRAPPINGS[how](lines)
    file = tmp_path / "cut"
    file.write_bytes(content[: len(content) * 3 // 4])
    reader = read_capture(file)
    assert any("was cut off: its last line is incomplete" in warning for warning in reader.warnings)
