"""The OTLP receiver, fed by the real exporters over real sockets: what is damaged, hostile or too much is left out."""

import contextlib
import dataclasses
import gzip
import http.client
import json
import resource
import socket
import subprocess
import sys
import threading
import tracemalloc
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import grpc
import pytest
from opentelemetry.exporter.otlp.json.common.trace_encoder import encode_spans as encode_json
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as GrpcExporter
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as HttpExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.trace import SpanContext

from specscope.errors import UserError
from specscope.remote.attached import Attached
from specscope.remote.http import Limits, address, another_site
from specscope.remote.receiver import JSON, LIMITS, PROTOBUF, Export, Receiver
from specscope.trace.checked import is_loopback
from specscope.trace.wire.codec import DamagedError
from specscope.trace.wire.reading import read_capture
from specscope.trace.wire.sending import readable
from specscope.trace.wire.spans import resource_attributes
from tests.trace.samples import encoded, records
from tests.trace.strategies import RUN
from tests.trace.wrappings import export, field
from tests.waiting import HANG_SECONDS, until

RESOURCE = Resource({"service.name": "specscope", "specscope.eos": (1, 2), "ratio": 0.5}, "https://example.test/schema")
ATTRIBUTES = {"text": "naïve ⏎ \x00 \U0001f600", "empty": "", "yes": True, "no": False, "double": 0.1, "whole": 3.0}
ATTRIBUTES |= {"zero": 0, "large": 2**63 - 1, "negative": -(2**63), "tokens": (1, 2, -3), "coins": (0.25, 5e-324)}
ATTRIBUTES |= {"flags": (True, False), "pieces": ("a", "", "é"), "nothing": ()}
ATTRIBUTES |= {"wrong": (float("nan"), float("inf"), float("-inf"))}
NS = 1_700_000_000_123_456_789
EXPORT = "/opentelemetry.proto.collector.trace.v1.TraceService/Export"


def span(number: int = 1, **change: object) -> ReadableSpan:
    values: dict = {"resource": RESOURCE, "attributes": ATTRIBUTES, "start_time": NS, "end_time": NS + 7} | change
    return ReadableSpan(f"decode_step {number}", SpanContext(0xABC << 64 | number, number, False), **values)


def told(taken: Sequence[Export]) -> list[str]:
    """What the decoder is given of each span, in letters: there 1, True and 1.0 are three values."""
    parts = [part for export in taken for part in export.parts]
    return [repr((resource, x.name, x.start_ns, x.end_ns, x.attributes)) for resource, spans in parts for x in spans]


def sent(*spans: ReadableSpan) -> list[str]:
    def plain(values: object) -> dict:
        return {key: list(value) if isinstance(value, tuple) else value for key, value in (values or {}).items()}

    return [
        repr((plain(one.resource.attributes), one.name, one.start_time, one.end_time, plain(one.attributes)))
        for one in spans
    ]


def limits(**change: float) -> Limits:
    return dataclasses.replace(LIMITS, **change)


class Taken(list):
    """Collects what a receiver hands over, and why it refused something."""

    def __init__(self) -> None:
        super().__init__()
        self.refused: list[str] = []

    __call__ = list.append


@pytest.fixture
def taken() -> Taken:
    return Taken()


@pytest.fixture
def receiver(taken: Taken) -> Iterator[Receiver]:
    with Receiver(taken, on_refused=taken.refused.append) as one:
        yield one


WAYS = ["grpc", "grpc+gzip", "http"]


def exporter(receiver: Receiver, name: str) -> SpanExporter:
    if name == "http":
        return HttpExporter(f"http://127.0.0.1:{receiver.http_port}/v1/traces", timeout=HANG_SECONDS)
    compression = grpc.Compression.Gzip if name == "grpc+gzip" else None
    return GrpcExporter(f"127.0.0.1:{receiver.grpc_port}", insecure=True, compression=compression, timeout=HANG_SECONDS)


@pytest.mark.parametrize("way", WAYS)
def test_a_span_survives_the_trip(receiver: Receiver, taken: Taken, way: str) -> None:
    spans = [span(), span(2, attributes={})]
    out = exporter(receiver, way)
    assert out.export(spans) is SpanExportResult.SUCCESS
    out.shutdown()
    assert told(taken) == sent(*spans)
    assert [export.spans for export in taken] == [2]
    assert not taken.refused
    taken.clear()
    assert post(receiver, GOOD_JSON, Content_Type="application/json; charset=utf-8") == (200, JSON, b"{}")
    assert post(receiver, GOOD, Content_Type=PROTOBUF) == (200, PROTOBUF, b"")
    assert told(taken) == sent(span(), span())


GOOD = encode_spans([span()]).SerializeToString()
GOOD_JSON = encode_json([span()]).to_json().encode()
HEAD = (
    b"POST /v1/traces HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/x-protobuf\r\nContent-Length: %d\r\n\r\n"
)


def post(receiver: Receiver, body: bytes, path: str = "/v1/traces", **headers: str) -> tuple[int, str, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", receiver.http_port, timeout=HANG_SECONDS)
    connection.request("POST", path, body, {name.replace("_", "-"): value for name, value in headers.items()})
    answer = connection.getresponse()
    got = answer.status, answer.headers["Content-Type"], answer.read()
    connection.close()
    return got


def call(receiver: Receiver, body: bytes, path: str = EXPORT) -> bytes:
    with grpc.insecure_channel(f"127.0.0.1:{receiver.grpc_port}") as channel:
        return channel.unary_unary(path)(body, timeout=HANG_SECONDS)


def refused(receiver: Receiver, body: bytes, path: str = EXPORT) -> grpc.StatusCode:
    """Why gRPC refuses it, in one line."""
    with pytest.raises(grpc.RpcError) as caught:
        call(receiver, body, path)
    assert "\n" not in caught.value.details()
    return caught.value.code()


def connected(receiver: Receiver) -> socket.socket:
    return socket.create_connection(("127.0.0.1", receiver.http_port), timeout=HANG_SECONDS)


def memory() -> int:
    """The most that this process has had resident, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def json_of(*changes: dict[str, object]) -> bytes:
    """A span for each of these changes."""
    spans = [{"name": "n", "startTimeUnixNano": 1, "endTimeUnixNano": 2} | change for change in changes]
    return json.dumps({"resourceSpans": [{"scopeSpans": [{"spans": spans}]}]}).encode()


BAD = [
    (b"\xff\xff not protobuf", {"Content_Type": PROTOBUF}, 400),
    (GOOD[:-3], {"Content_Type": PROTOBUF}, 400),
    (b"[1, 2]", {"Content_Type": JSON}, 400),
    (b"[" * 100_000, {"Content_Type": JSON}, 400),
    (GOOD, {"Content_Type": "text/plain"}, 415),
    (GOOD, {}, 415),
    (GOOD, {"Content_Type": PROTOBUF, "Content_Encoding": "br"}, 415),
    (GOOD, {"Content_Type": PROTOBUF, "Content_Encoding": "gzip"}, 400),
    (gzip.compress(GOOD, mtime=0)[:-9], {"Content_Type": PROTOBUF, "Content_Encoding": "gzip"}, 400),
    (b"", {"Content_Type": PROTOBUF, "Content_Length": "-5"}, 400),
]


@pytest.mark.parametrize(("body", "headers", "status"), BAD, ids=range(len(BAD)))
def test_bad_requests_are_refused_in_one_line(receiver: Receiver, taken: Taken, body, headers, status) -> None:
    got, kind, text = post(receiver, body, **headers)
    assert (got, kind, text.count(b"\n")) == (status, "text/plain; charset=utf-8", 1)
    assert 10 < len(text) < 400
    assert (taken, len(taken.refused)) == ([], 1)
    assert post(receiver, GOOD, Content_Type=PROTOBUF)[0] == 200  # and it goes on


def test_an_export_without_spans_is_answered_as_one(receiver: Receiver, taken: Taken) -> None:
    assert (post(receiver, b"{}", Content_Type=JSON)[0], taken.refused) == (200, [])


def test_other_paths_methods_and_bytes(receiver: Receiver, taken: Taken) -> None:
    assert post(receiver, GOOD, "/v1/metrics", Content_Type=PROTOBUF)[0] == 404
    assert refused(receiver, GOOD, EXPORT.replace("Export", "Other")) is grpc.StatusCode.UNIMPLEMENTED
    before = len(taken.refused)
    assert refused(receiver, b"\xff\xff\xff") is grpc.StatusCode.INVALID_ARGUMENT
    with connected(receiver) as raw:  # a body that ends early
        raw.sendall(HEAD % 999 + b"\n")
        raw.shutdown(socket.SHUT_WR)
        assert raw.recv(100) == b""
    until(lambda: len(taken.refused) == before + 2)
    assert taken == []
    assert call(receiver, GOOD) == b""


@pytest.mark.parametrize(("encoding", "pack"), [("identity", bytes), ("gzip", gzip.compress)])
def test_bodies_over_the_limit_are_refused_however_packed(taken: Taken, encoding, pack) -> None:
    with Receiver(taken, limits=limits(body_bytes=100_000)) as one:
        for size, answer in ((30_000, 200), (70_000, 400)):  # a resource has a bound of its own
            body = encode_spans([span(resource=Resource({"k": "x" * size}))]).SerializeToString()
            assert post(one, pack(body), Content_Type=PROTOBUF, Content_Encoding=encoding)[0] == answer
        status, _, text = post(one, pack(bytes(1_000_000)), Content_Type=PROTOBUF, Content_Encoding=encoding)
        assert (status, b"100000 bytes" in text) == (413, True)
        assert post(one, pack(GOOD), Content_Type=PROTOBUF, Content_Encoding=encoding)[0] == 200
        assert refused(one, bytes(200_000)) is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert call(one, GOOD) == b""


def test_a_consumer_that_fails_is_told_to_the_sender() -> None:
    def fail(export: Export) -> None:
        raise RuntimeError("full\nup")

    with Receiver(fail) as one:
        assert post(one, GOOD, Content_Type=PROTOBUF)[0] == 500
        assert refused(one, GOOD) is grpc.StatusCode.INTERNAL


def test_a_port_in_use_is_one_clear_line_and_the_other_is_left_again(receiver: Receiver, taken: Taken) -> None:
    for name in ("grpc_port", "http_port"):
        port = getattr(receiver, name)
        second = Receiver(taken, **{name: port})
        with pytest.raises(UserError, match=rf"127\.0\.0\.1:{port}.*choose another port"):
            second.start()
    with Receiver(taken, grpc_port=second.grpc_port, http_port=None):
        pass


def test_close_ends_open_connections_too_and_can_be_repeated(taken: Taken) -> None:
    one = Receiver(taken).start()
    connection = http.client.HTTPConnection("127.0.0.1", one.http_port, timeout=HANG_SECONDS)
    connection.request("POST", "/v1/traces", GOOD, {"Content-Type": PROTOBUF})
    assert connection.getresponse().read() == b""
    one.close()
    one.close()
    assert connection.sock.recv(1) == b""
    assert len(taken) == 1
    with pytest.raises(ConnectionRefusedError):
        connected(one)


def test_listens_on_loopback_only_by_default(receiver: Receiver) -> None:
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", receiver.http_port), timeout=HANG_SECONDS)


SITES = [
    ({"Host": "evil.example", "Origin": "http://evil.example"}, 403),  # DNS rebinding
    ({"Origin": "http://evil.example"}, 403),
    ({"Host": "localhost:9", "Origin": "http://localhost:9"}, 200),
]


@pytest.mark.parametrize(("headers", "status"), SITES)
def test_a_web_page_cannot_send_spans(receiver: Receiver, taken: Taken, headers, status) -> None:
    got, _, text = post(receiver, GOOD, Content_Type=PROTOBUF, **headers)
    assert (got, len(taken.refused), len(taken)) == (status, status != 200, status == 200)
    assert text.count(b"\n") == (status != 200)


def test_of_a_span_that_cannot_be_read_the_others_are_taken(receiver: Receiver, taken: Taken) -> None:
    bad = {"name": "bad", "attributes": [{"key": "k", "value": {"intValue": "one"}}]}
    assert post(receiver, json_of(bad, {"name": "good"}), Content_Type=JSON)[0] == 200
    [(_, [damaged, read])] = taken[0].parts
    why = "a span: Expected `int`, got `str` in `attributes[0].value.intValue`"
    assert (str(damaged), read.name) == (why, "good")


def test_calls_that_never_send_their_export_do_not_hold_grpc_for_good(taken: Taken, monkeypatch) -> None:
    monkeypatch.setattr("specscope.remote.receiver.MAX_CALLS", 2)
    monkeypatch.setattr("specscope.remote.receiver.GRPC_AGE_MS", 500)
    monkeypatch.setattr("specscope.remote.receiver.GRPC_GRACE_MS", 500)
    gone = threading.Event()

    def nothing() -> Iterator[bytes]:
        gone.wait(HANG_SECONDS)
        yield from ()

    with Receiver(taken, http_port=None) as one, grpc.insecure_channel(f"127.0.0.1:{one.grpc_port}") as channel:
        before = set(threading.enumerate())
        stuck = [channel.stream_unary(EXPORT).future(nothing()) for _ in range(2)]
        until(lambda: sum("otlp" in each.name for each in set(threading.enumerate()) - before) == 2)  # they hold it

        def try_again() -> None:
            with contextlib.suppress(grpc.RpcError):  # it waits behind them, and exporters try again
                call(one, GOOD)

        until(lambda: taken, try_again)
        assert len(taken) == 1
        gone.set()
        for each in stuck:
            with pytest.raises(grpc.RpcError):
                each.result(HANG_SECONDS)


def deep_protobuf(depth: int) -> bytes:
    """A span with an attribute whose value is an array in an array in an array."""
    value = b"\x18\x05"
    for _ in range(depth):
        value = field(0x2A, field(0x0A, value))
    pair = field(0x0A, b"k") + field(0x12, value)
    one = field(0x0A, b"a" * 16) + field(0x12, b"b" * 8) + field(0x4A, pair)
    return field(0x0A, field(0x12, field(0x12, one)))


def deep_json(before: str, after: str) -> bytes:
    """The same in JSON, of arrays or of maps."""
    value = before * 20_000 + '{"intValue":1}' + after * 20_000
    body = json_of({"attributes": [{"key": "k", "value": "VALUE"}]})
    return body.replace(b'"VALUE"', value.encode())


# Two bytes can stand for a whole message: decoded at once, these take gigabytes
MILLIONS = {
    "resources": (b"\x0a\x00" * 2**20, PROTOBUF),
    "spans": (field(0x0A, field(0x12, b"\x12\x00" * 2**20)), PROTOBUF),
    "json resources": (b'{"resourceSpans":[' + b"{}," * 1_300_000 + b"{}]}", JSON),
    "json spans": (b'{"resourceSpans":[{"scopeSpans":[{"spans":[' + b"{}," * 1_300_000 + b"{}]}]}]}", JSON),
}
NESTED = {
    "nested": (deep_protobuf(20_000), PROTOBUF),
    "nested arrays": (deep_json('{"arrayValue":{"values":[', "]}}"), JSON),
    "nested maps": (deep_json('{"kvlistValue":{"values":[{"key":"k","value":', "}]}}"), JSON),
}


@pytest.mark.parametrize("name", [*MILLIONS, *NESTED])
def test_values_nested_without_end_and_millions_of_empty_messages_are_not_decoded(receiver, taken, name) -> None:
    (body, kind), before = (MILLIONS | NESTED)[name], memory()
    status, _, text = post(receiver, body, Content_Type=kind)
    if name in MILLIONS:
        assert (status, b"more than" in text) == (400, True)
        assert kind == JSON or refused(receiver, body) is grpc.StatusCode.INVALID_ARGUMENT
    spans = [span for export in taken for _, spans in export.parts for span in spans]
    assert all(isinstance(span, DamagedError) for span in spans)
    assert spans or status == 400
    assert memory() - before < 600 * 2**20


def test_a_small_body_that_unpacks_to_a_huge_one_is_not_unpacked(taken: Taken) -> None:
    bomb = gzip.compress(bytes(200 * 2**20), 1)
    with Receiver(taken, grpc_port=None, limits=limits(body_bytes=2**20)) as one:
        tracemalloc.start()
        status = post(one, bomb, Content_Type=PROTOBUF, Content_Encoding="gzip")[0]
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert status == 413
    assert peak < 20 * 2**20


BESIDE = Path(__file__).parents[1] / "data" / "vllm" / "spans.jsonl"  # vLLM's own spans, and the plugin's


def push(attached: Attached, body: bytes | list[ReadableSpan], kind: str = PROTOBUF) -> int:
    body = body if isinstance(body, bytes) else encode_spans(body).SerializeToString()
    return post(attached.listening, body, Content_Type=kind)[0]


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
        assert push(attached, [span for span in wrong if span.name == "engine_step"][:1]) == 200
    assert push(attached, spans()) == 200
    settle(attached, lambda: len(attached.viewer.history.steps) == len(records()))
    assert [notice.text.split(":")[0] for notice in attached.viewer.news] == ["left out 1×", "left out 10×"]


def test_the_engine_in_view_has_the_name_of_its_service(attached):
    for number, service in enumerate(("alpha", "beta")):
        run = replace(RUN, run_id=f"{number:032x}")
        resource = Resource(resource_attributes(run, service))
        assert push(attached, [readable(span, resource) for span in encoded(records(), run)]) == 200
    settle(attached, lambda: len(attached.runs) == 2)
    assert attached.viewer.history.name == "alpha"
    attached.next_engine()
    assert attached.viewer.history.name == "beta"
    assert any("another engine: beta: " in notice.text for notice in attached.viewer.news)


def test_exports_that_are_refused_are_counted(attached):
    for body, kind in ((b"[]", JSON), (b"[]", JSON), (b"{}", "text/plain")):
        assert push(attached, body, kind) in (400, 415)
    assert refused(attached.listening, b"\xff") is grpc.StatusCode.INVALID_ARGUMENT
    settle(attached, lambda: len(attached.viewer.news) == 3)
    assert all(notice.text.startswith("left out 1×: an export: the ") for notice in attached.viewer.news)


@pytest.mark.parametrize("how", [PROTOBUF, JSON])
def test_what_vllm_sends_beside_ours_changes_nothing(attached, how):
    """What is sent is what a file of it holds."""
    sent = read_capture(BESIDE).history
    for line in BESIDE.read_bytes().splitlines():
        assert push(attached, line if how == JSON else export(json.loads(line)), how) == 200
    settle(attached, lambda: attached.others == sent.others == 17 and len(attached.viewer.history.steps) == 20)
    assert attached.viewer.history.steps == sent.steps


def test_runs_without_end_are_bounded(attached, monkeypatch):
    monkeypatch.setattr("specscope.remote.engines.BYTES", 2 * 2**20)
    for n in range(80):
        run = dataclasses.replace(RUN, run_id=f"run{n}")
        assert push(attached, spans(run)) == 200
        attached.viewer.poll()
    settle(attached, lambda: "run79" in attached.runs)
    assert len(attached.runs) <= 64
    assert sum(run.nbytes for run in attached.runs.values()) < 3 * 2**20


def test_evidence_that_is_missing_altogether_is_said(attached):
    keep = ("specscope.request", "specscope.step", "specscope.context", "specscope.prefill", "specscope.draft")
    keep += ("specscope.accepted", "specscope.emitted", "specscope.final.kind")
    summaries = spans(change=lambda span: {k: v for k, v in span.attributes.items() if k.startswith(keep)})
    assert push(attached, [span for span in summaries if span.name == "decode_step"]) == 200
    settle(attached, lambda: attached.viewer.news)
    assert "export at level `trees`" in attached.viewer.news[0].text


def test_special_tokens_without_end_are_bounded(attached):
    """A span may name as many as a tree has nodes; those whose text was never told are of no use."""
    for n in range(3):
        tokens = list(range(n * 10_000, n * 10_000 + 1000))
        many = spans(change=lambda span, tokens=tokens: span.attributes | {"specscope.tree.special": tokens})
        assert push(attached, [span for span in many if span.name == "decode_step"]) == 200
    assert push(attached, spans()) == 200
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
