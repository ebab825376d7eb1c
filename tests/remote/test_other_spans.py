"""Spans of vLLM itself, of SGLang and of anybody, sent to a real listener beside ours or alone."""

from __future__ import annotations

import json
from pathlib import Path

import grpc
import pytest
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans

from specscope.remote.otlp import JSON, PROTOBUF
from specscope.trace.history.timeline import of_request, of_trace, other_traces
from specscope.trace.wire import engine_spans
from specscope.trace.wire.reading import CaptureReader, read_capture
from specscope.tui.app import ScopeApp
from tests.remote.test_listener import call, post, settle, spans
from tests.trace.samples import records
from tests.trace.wrappings import export

DATA = Path(__file__).parents[1] / "data" / "vllm"
VLLM, SGLANG = (DATA / name for name in ("spans.jsonl", "sglang_spans.jsonl"))


def lines(*paths: Path) -> list[bytes]:
    return [line for path in paths for line in path.read_bytes().splitlines()]


def protobuf(line: bytes) -> bytes:
    """The same export as an exporter sends it."""
    return export(json.loads(line))


def send(attached, line: bytes, how: str) -> None:
    """One line of a file, as OTLP over gRPC or HTTP."""
    if how == "http json":
        assert post(attached, line, JSON) == 200
        return
    body = protobuf(line)
    if how == "grpc":
        assert call(attached, body) is grpc.StatusCode.OK
    else:
        assert post(attached, body, PROTOBUF) == 200


@pytest.mark.parametrize("how", ["grpc", "http", "http json"])
def test_what_is_sent_is_what_a_file_of_it_holds(attached, how):
    reader = read_capture(VLLM)
    for line in lines(VLLM):
        send(attached, line, how)
    history = attached.viewer.history
    settle(attached, lambda: len(history.others) == len(reader.history.others) and len(history.steps) == 20)
    assert history.steps == reader.history.steps
    for name, request in reader.history.requests.items():
        assert of_request(history, history.requests[name]) == of_request(reader.history, request)
    for trace in other_traces(reader.history):
        assert of_trace(history, trace) == of_trace(reader.history, trace)
    assert [notice.text for notice in attached.viewer.news] == [
        "spans of another service: unknown_service:python (w shows them)"
    ]


@pytest.mark.parametrize("turn", [1, -1])
def test_before_or_after_ours_is_the_same(attached, turn):
    for line in lines(VLLM)[::turn]:
        send(attached, line, "grpc")
    history = attached.viewer.history
    settle(attached, lambda: len(history.others) == 17 and len(history.steps) == 20)
    first = next(iter(history.requests.values()))
    assert [row.name for row in of_request(history, first).rows][:2] == ["llm_request", f"request {first.id}"]


async def test_sglang_alone_is_on_the_screen(attached):
    for line in lines(SGLANG):
        send(attached, line, "grpc")
    settle(attached, lambda: len(attached.others) == 19)
    assert attached.status == "loading"  # no engine of ours
    assert "19 spans of other services: press w" in attached.progress[0]
    async with ScopeApp(attached.viewer).run_test(size=(120, 40)) as pilot:
        await pilot.press("w")
        await pilot.pause()
        shown = "\n".join(
            "".join(text for text, _ in line) for line in pilot.app.screen.query_one("#spans").sheet.lines
        )
        assert "Req 5e0f1a2b" in shown
        assert "No specscope records belong to this trace" in shown
    reader = CaptureReader(SGLANG, others_alone=True)
    while reader.read():
        pass
    (trace,) = other_traces(attached.viewer.history)
    assert of_trace(attached.viewer.history, trace) == of_trace(reader.history, trace)


def test_every_engine_has_them(attached):
    """Two runs and another service: whichever run is on the screen, its requests find the service's spans."""
    assert call(attached, encode_spans(spans()).SerializeToString()) is grpc.StatusCode.OK
    for line in lines(VLLM):
        send(attached, line, "http")
    settle(attached, lambda: len(attached.runs) == 2 and len(attached.others) == 17)
    settle(attached, lambda: sorted(len(run.history.steps) for run in attached.runs.values()) == [len(records()), 20])
    assert all(run.history.others is attached.others for run in attached.runs.values())


def test_a_flood_is_bounded_and_counted(attached, monkeypatch):
    monkeypatch.setattr(engine_spans, "MOST", 30)
    for number in range(20):
        changed = [json.loads(line) for line in lines(SGLANG)[:5]]
        for line in changed:
            line["resourceSpans"][0]["scopeSpans"][0]["spans"][0]["traceId"] = f"{number + 1:032x}"
            assert post(attached, json.dumps(line).encode(), JSON) == 200
    settle(attached, lambda: attached.others.dropped == 70)
    assert len(attached.others) == 30
    assert attached.others.traces == [f"{number + 1:032x}" for number in range(14, 20)]


def test_what_the_screen_could_not_take_in_time_is_counted(attached, monkeypatch):
    monkeypatch.setattr("specscope.remote.attached.WAITING_BYTES", 0)
    for line in lines(SGLANG):
        send(attached, line, "http")
    settle(attached, lambda: attached.others.dropped == 19)
    assert len(attached.others) == 0


def test_damaged_spans_are_named_and_the_rest_is_kept(attached):
    """No start, an end before it, and attributes of every kind."""
    line = json.loads(lines(SGLANG)[0])
    (good,) = line["resourceSpans"][0]["scopeSpans"][0]["spans"]
    odd = [{"key": "map", "value": {"kvlistValue": {"values": [{"key": "a", "value": {"intValue": "1"}}]}}}]
    odd += [{"key": "raw", "value": {"bytesValue": "AAAA"}}, {"key": "none", "value": {}}]
    odd += [{"key": "\u001b[2J", "value": {"stringValue": "\u001b[2J"}}]
    many = [
        good | {"startTimeUnixNano": "0"},
        good | {"startTimeUnixNano": good["endTimeUnixNano"], "endTimeUnixNano": good["startTimeUnixNano"]},
        good | {"attributes": odd},
    ]
    line["resourceSpans"][0]["scopeSpans"][0]["spans"] = many
    send(attached, json.dumps(line).encode(), "http json")
    settle(attached, lambda: len(attached.others) == 1 and attached.others.faults.total == 2)
    (kept,) = attached.others.of(good["traceId"])
    assert kept.left_out == 3
    assert kept.attributes == {"\\x1b[2J": "\\x1b[2J"}
    assert "left out 2×: a span of another service: it has no start, or ends before it" in attached.viewer.news[0].text
    assert attached.error == ""
