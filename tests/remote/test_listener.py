"""Damaged and hostile exports sent to a real listener: named once, left out, within bounds; the rest is shown."""

import dataclasses
import json
from pathlib import Path

import grpc
import pytest
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan

from specscope.remote.attached import Attached
from specscope.remote.receiver import JSON, PROTOBUF
from specscope.trace.wire.reading import read_capture
from specscope.trace.wire.sending import readable
from specscope.trace.wire.spans import resource_attributes
from tests.remote import test_receiver as receiver
from tests.trace.samples import encoded, records
from tests.trace.strategies import RUN
from tests.trace.wrappings import export
from tests.waiting import until

BESIDE = Path(__file__).parents[1] / "data" / "vllm" / "spans.jsonl"  # vLLM's own spans, and the plugin's


def post(attached: Attached, body: bytes | list[ReadableSpan], kind: str = PROTOBUF) -> int:
    body = body if isinstance(body, bytes) else encode_spans(body).SerializeToString()
    return receiver.post(attached.listening, body, Content_Type=kind)[0]


def spans(run=RUN, change=lambda span: span.attributes) -> list[ReadableSpan]:
    """The sample run as an engine would send it, its attributes changed."""
    resource = Resource(resource_attributes(run))
    return [readable(span._replace(attributes=change(span)), resource) for span in encoded(records(), run)]


def settle(attached: Attached, done) -> None:
    """Take in what comes until `done` says so."""
    until(done, attached.viewer.poll)


def test_faults_of_a_kind_are_told_once_and_again_when_they_are_ten_times_as_many(attached):
    wrong = spans(change=lambda span: span.attributes | {"specscope.step": -1})
    for _ in range(25):
        assert post(attached, [span for span in wrong if span.name == "engine_step"][:1]) == 200
    assert post(attached, spans()) == 200
    settle(attached, lambda: len(attached.viewer.history.steps) == len(records()))
    assert [notice.text.split(":")[0] for notice in attached.viewer.news] == ["left out 1×", "left out 10×"]


def test_exports_that_are_refused_are_counted(attached):
    for body, kind in ((b"[]", JSON), (b"[]", JSON), (b"{}", "text/plain")):
        assert post(attached, body, kind) in (400, 415)
    assert receiver.refused(attached.listening, b"\xff") is grpc.StatusCode.INVALID_ARGUMENT
    settle(attached, lambda: len(attached.viewer.news) == 3)
    assert all(notice.text.startswith("left out 1×: an export: the ") for notice in attached.viewer.news)


@pytest.mark.parametrize("how", [PROTOBUF, JSON])
def test_what_vllm_sends_beside_ours_changes_nothing(attached, how):
    """What is sent is what a file of it holds."""
    sent = read_capture(BESIDE).history
    for line in BESIDE.read_bytes().splitlines():
        assert post(attached, line if how == JSON else export(json.loads(line)), how) == 200
    settle(attached, lambda: attached.others == sent.others == 17 and len(attached.viewer.history.steps) == 20)
    assert attached.viewer.history.steps == sent.steps


def test_runs_without_end_are_bounded(attached, monkeypatch):
    monkeypatch.setattr("specscope.remote.engines.BYTES", 2 * 2**20)
    for n in range(80):
        run = dataclasses.replace(RUN, run_id=f"run{n}")
        assert post(attached, spans(run)) == 200
        attached.viewer.poll()
    settle(attached, lambda: "run79" in attached.runs)
    assert len(attached.runs) <= 64
    assert sum(run.nbytes for run in attached.runs.values()) < 3 * 2**20


def test_evidence_that_is_missing_altogether_is_said(attached):
    keep = ("specscope.request", "specscope.step", "specscope.context", "specscope.prefill", "specscope.draft")
    keep += ("specscope.accepted", "specscope.emitted", "specscope.final.kind")
    summaries = spans(change=lambda span: {k: v for k, v in span.attributes.items() if k.startswith(keep)})
    assert post(attached, [span for span in summaries if span.name == "decode_step"]) == 200
    settle(attached, lambda: attached.viewer.news)
    assert "export at level `trees`" in attached.viewer.news[0].text


def test_special_tokens_without_end_are_bounded(attached):
    """A span may name as many as a tree has nodes; those whose text was never told are of no use."""
    for n in range(3):
        tokens = list(range(n * 10_000, n * 10_000 + 1000))
        many = spans(change=lambda span, tokens=tokens: span.attributes | {"specscope.tree.special": tokens})
        assert post(attached, [span for span in many if span.name == "decode_step"]) == 200
    assert post(attached, spans()) == 200
    settle(attached, lambda: len(attached.viewer.history.steps) == len(records()))
    vocabulary = attached.viewer.history.vocabulary
    assert vocabulary.special <= set(vocabulary.pieces)
