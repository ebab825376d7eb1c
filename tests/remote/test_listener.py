"""A server of this machine: whose requests it answers, few open files, damaged and hostile exports, within bounds."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import grpc
import pytest
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan

from specscope.remote.attached import Attached
from specscope.remote.http import address, another_site
from specscope.remote.receiver import JSON, PROTOBUF
from specscope.trace.checked import is_loopback
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


OWN = ["localhost:8000", "LOCALHOST:8000", "127.0.0.1:8000", "127.0.0.1", "[::1]:8000", "[::1]", "localhost:9000"]
STRANGE = ["", "evil.example", "evil.example:8000", "localhost:8000.evil.example", "localhost.evil.example:8000"]
STRANGE += ["127.0.0.1.evil.example", "127.0.0.1@evil.example", "[::1].evil.example", "::1", "0.0.0.0:8000"]
STRANGE += ["192.168.1.7:8000"]


@pytest.mark.parametrize("listens", ["127.0.0.1", "::1", "localhost"])
@pytest.mark.parametrize("host", OWN)
def test_this_machine_by_any_of_its_names_and_by_a_tunnels_port(listens, host):
    assert another_site(listens, host, []) == ""
    assert another_site(listens, host, [f"http://{host.lower()}"]) == ""
    assert "other sites" in another_site(listens, host, ["http://evil.example"])


@pytest.mark.parametrize("host", STRANGE)
def test_a_name_that_was_rebound_to_this_machine(host):
    assert "not " in another_site("127.0.0.1", host, [f"http://{host}"])


@pytest.mark.parametrize("listens", ["0.0.0.0", "::", "192.168.1.7", "gpu-box"])
def test_where_other_machines_reach_it_any_name_may_be_right(listens):
    assert another_site(listens, "gpu-box:8000", []) == ""
    assert another_site(listens, "gpu-box:8000", ["http://gpu-box:8000"]) == ""
    assert another_site(listens, "gpu-box:8000", ["http://evil.example"])
    assert another_site(listens, "gpu-box:8000", ["null"])


def test_addresses():
    assert all(map(is_loopback, ("127.0.0.1", "127.9.9.9", "::1", "localhost")))
    assert not any(map(is_loopback, ("0.0.0.0", "::", "192.168.1.1", "", "localhost.example")))
    assert (address("::1", 80), address("Box", 1)) == ("[::1]:80", "box:1")


SERVER = """
import asyncio, resource, socket, sys
from starlette.responses import PlainTextResponse
from specscope.remote.http import Application, HttpServer, Limits, bind

resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))

async def app(scope, receive, send):
    await PlainTextResponse("here")(scope, receive, send)

async def serve():
    bound = bind("127.0.0.1", 0)
    refuse = lambda refusal: PlainTextResponse(refusal.message, refusal.status)
    server = HttpServer(Application(app, "127.0.0.1", refuse, Limits(header_seconds=2.0)), bound)
    await server.start()
    print(bound.getsockname()[1], flush=True)
    await asyncio.to_thread(sys.stdin.readline)
    await server.close()

asyncio.run(serve())
"""
CLIENTS = """
import socket, sys, urllib.request
port = int(sys.argv[1])
silent = [socket.create_connection(("127.0.0.1", port)) for _ in range(300)]
for connection in silent:
    connection.recv(100)  # a refusal, or that the headers came too late
print(urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=30).read().decode())
"""


def test_silent_connections_leave_files_to_the_server():
    """300 of them where 256 files may be open: it refuses some, says nothing, and answers when they are gone."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", SERVER], **pipes) as server:
        port = server.stdout.readline().strip()
        clients = subprocess.run([sys.executable, "-c", CLIENTS, port], capture_output=True, text=True, timeout=60)
        _, told = server.communicate("end\n", timeout=30)
    assert (clients.stdout.strip(), told) == ("here", "")
