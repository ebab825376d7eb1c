"""Spans to an endpoint that is there, that is not, that comes back, that refuses, and that says nothing."""

import contextlib
import http.server
import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.resources import Resource

from specscope.errors import UserError
from specscope.remote.receiver import Receiver
from specscope.trace.wire.sending import sender as sending
from specscope.trace.wire.sending.endpoint import failure_of
from specscope.trace.wire.sending.export import make_sender, readable
from specscope.trace.wire.spans import Span
from tests.processes import free_port
from tests.waiting import HANG_SECONDS, ends, until

PROTOCOLS = ("grpc", "http/protobuf")
RESOURCE = Resource({})
both = pytest.mark.parametrize("protocol", PROTOCOLS)


@pytest.fixture(autouse=True)
def patience(monkeypatch):
    """No test fails because the machine is busy; and whoever waits for what never comes waits for a hang."""
    monkeypatch.setattr(sending, "UNKNOWN", 4 * HANG_SECONDS)
    monkeypatch.setattr(sending, "TIMEOUT", 4 * HANG_SECONDS)


def batch(first, count=1):
    return [readable(Span("decode_step", 1, first + i, 0, 1, 2, {}, ()), RESOURCE) for i in range(count)]


class Taken:
    """The ids of the spans that a receiver takes, in their order."""

    def __init__(self):
        self.ids, self.gate = [], threading.Event()
        self.gate.set()

    def __call__(self, export):
        self.gate.wait(HANG_SECONDS)
        resources = ExportTraceServiceRequest.FromString(bytes(export.body)).resource_spans
        spans = (span for resource in resources for scope in resource.scope_spans for span in scope.spans)
        self.ids += [int.from_bytes(span.span_id) for span in spans]


def listening(taken, port, protocol):
    ports = {"grpc_port": port, "http_port": None} if protocol == "grpc" else {"grpc_port": None, "http_port": port}
    return Receiver(taken, **ports)


@both
def test_all_arrive_in_their_order_and_who_is_faster_waits(protocol):
    taken = Taken()
    with listening(taken, port := free_port(), protocol):
        sender = make_sender(f"127.0.0.1:{port}", protocol)
        taken.gate.clear()
        giving = ThreadPoolExecutor(1).submit(lambda: [sender.put(batch(1 + 64 * i, 64)) for i in range(100)])
        until(lambda: sender._queued == sending.QUEUED)
        taken.gate.set()
        giving.result(HANG_SECONDS)
        sender.close()
    assert taken.ids == list(range(1, 6401))
    assert not sender.lost


@both
def test_one_that_comes_back_gets_what_was_queued(protocol):
    taken, port = Taken(), free_port()
    sender = make_sender(f"127.0.0.1:{port}", protocol)
    with listening(taken, port, protocol):
        sender.put(batch(1))
        until(lambda: taken.ids)
    for i in range(2, 5):
        sender.put(batch(i))
    until(lambda: sender._failure is not None)
    with listening(taken, port, protocol):
        until(lambda: len(taken.ids) == 4)
        sender.put(batch(5))
        sender.close()
    assert taken.ids == [1, 2, 3, 4, 5]
    assert not sender.lost


@both
def test_meanwhile_the_oldest_give_way_and_nobody_waits(protocol):
    taken, port = Taken(), free_port()
    sender = make_sender(f"127.0.0.1:{port}", protocol)
    sender.put(batch(1))
    until(lambda: sender._failure is not None)
    more = sending.QUEUED + 100
    for i in range(2, 2 + more):
        ends(sender.put, batch(i))
    with listening(taken, port, protocol):
        sender.close()
    assert sum(sender.lost.values()) == 1 + more - len(taken.ids)
    assert taken.ids == list(range(2 + more - len(taken.ids), 2 + more))
    assert len(taken.ids) in (sending.QUEUED, sending.QUEUED + 1)  # with the one that was being tried
    assert list(sender.lost) == [f"nobody listens at 127.0.0.1:{port} (connection refused)"]


@contextlib.contextmanager
def answering(protocol, *statuses, body=b"", kind=None):
    """A port that answers each export with the next of these statuses, the last of them for ever; "" drops it.

    `body`, `kind`: of what it answers by HTTP, the kind being a content type.
    """
    left, port = list(statuses), 0

    def status():
        return left.pop(0) if len(left) > 1 else left[0]

    if protocol == "grpc":

        def export(body, context):
            if code := status():
                context.abort(code, "as asked")
            return b""

        handlers = {"Export": grpc.unary_unary_rpc_method_handler(export)}
        name = "opentelemetry.proto.collector.trace.v1.TraceService"
        server = grpc.server(ThreadPoolExecutor(1), [grpc.method_handlers_generic_handler(name, handlers)])
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        yield port
        server.stop(0).wait()
        return

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self):
            self.rfile.read(int(self.headers["Content-Length"]))
            if code := status():
                self.send_response(code)
                self.send_header("Content-Length", str(len(body)))
                if kind is not None:
                    self.send_header("Content-Type", kind)
                self.end_headers()
                self.wfile.write(body)
            else:
                self.close_connection = True

        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        yield server.server_port
        server.shutdown()


@pytest.mark.parametrize(
    ("protocol", "status", "text"),
    [
        ("grpc", grpc.StatusCode.PERMISSION_DENIED, "PERMISSION_DENIED as asked"),
        ("grpc", grpc.StatusCode.RESOURCE_EXHAUSTED, "RESOURCE_EXHAUSTED as asked"),
        ("grpc", grpc.StatusCode.UNAVAILABLE, "UNAVAILABLE as asked"),
        ("http/protobuf", 401, "401 Unauthorized"),
        ("http/protobuf", 302, "302 Found"),
        ("http/protobuf", 503, "503 Service Unavailable"),
    ],
)
def test_a_refusal_is_told_with_its_status(protocol, status, text):
    with answering(protocol, status) as port:
        sender = make_sender(f"127.0.0.1:{port}", protocol)
        sender.put(batch(1, 2))
        sender.put(batch(3))
        ends(sender.close)
    assert sender.lost == {f"127.0.0.1:{port} refused them: {text}": 3}


@pytest.mark.parametrize(
    ("kind", "body", "lost"),
    [
        ("text/html; charset=utf-8", b"<!doctype html>", 3),
        ("text/plain", b"ok", 3),
        ("text/html", b"", 0),
        ("application/x-protobuf", b"\n\0", 0),
        ("Application/JSON; charset=utf-8", b"{}", 0),
        (None, b"{}", 0),
    ],
)
def test_a_page_is_no_answer_of_an_endpoint(kind, body, lost):
    with answering("http/protobuf", 200, body=body, kind=kind) as port:
        sender = make_sender(f"127.0.0.1:{port}", "http/protobuf")
        sender.put(batch(1, 3))
        ends(sender.close)
    text = f"127.0.0.1:{port} is no OTLP endpoint: it answered with {str(kind).partition(';')[0]}"
    assert sender.lost == ({text: lost} if lost else {})


@pytest.mark.parametrize("address", ["http://user:secret@127.0.0.1:1", "user:secret@127.0.0.1:1"])
def test_a_login_that_cannot_be_sent_is_refused(address, monkeypatch):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", address)
    for make in (lambda: make_sender(address, "grpc"), lambda: make_sender(None)):
        with pytest.raises(UserError, match=r"127\.0\.0\.1:1.*OTEL_EXPORTER_OTLP_HEADERS") as error:
            make()
        assert "secret" not in str(error.value)


@pytest.mark.parametrize(
    ("statuses", "count", "lost"),
    [
        ((200, 503, 200), 3, 0),
        ((200, "", 200), 3, 0),
        ((200, 400, 200), 3, 1),
        ((200, "", 200), 2, 0),  # dropped at the end
    ],
)
def test_what_may_pass_is_tried_again(statuses, count, lost):
    with answering("http/protobuf", *statuses) as port:
        sender = make_sender(f"127.0.0.1:{port}", "http/protobuf")
        for i in range(1, count):
            sender.put(batch(i))
            until(lambda: not sender._batches and sender._sending is None)
        sender.put(batch(count))
        ends(sender.close)
    assert sum(sender.lost.values()) == lost


@both
def test_one_that_says_nothing_holds_nobody(protocol, monkeypatch):
    monkeypatch.setattr(sending, "UNKNOWN", 0.1)
    monkeypatch.setattr("specscope.trace.wire.sending.export.TIMEOUT", 4 * HANG_SECONDS)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        sender = make_sender(f"127.0.0.1:{port}", protocol)
        for i in range(3):
            ends(sender.put, batch(1 + 1000 * i, 1000))
        ends(sender.close)
    assert sum(sender.lost.values()) == 3000
    assert all(why.startswith(f"127.0.0.1:{port} did not answer in ") for why in sender.lost)


def test_what_cannot_be_encoded_is_counted_and_ends_nothing():
    with answering("http/protobuf", 200) as port:
        sender = make_sender(f"127.0.0.1:{port}", "http/protobuf")
        sender.put([object()])
        sender.put(batch(1))
        ends(sender.close)
    ((why, count),) = sender.lost.items()
    assert count == 1
    assert "object" in why


@pytest.mark.parametrize(
    ("status", "details", "text"),
    [
        ("UNAVAILABLE", "errors resolving x:1: [field: Domain name not found]", "the host name of x:1 is not known"),
        (None, "Failed to resolve 'x' ([Errno -2] Name or service not known)", "the host name of x:1 is not known"),
        ("DEADLINE_EXCEEDED", "Deadline Exceeded", "x:1 did not answer in time"),
        (None, "HTTPConnectionPool(host='x', port=1): Read timed out.", "x:1 did not answer in time"),
        ("UNAVAILABLE", "data refused due to high memory usage", "x:1 refused them: UNAVAILABLE data refused due to"),
        (None, "", "x:1 cannot be reached"),
        (400, "bad\x1b[2J\nrequest", "x:1 refused them: 400 bad\\x1b[2J request"),
    ],
)
def test_words(status, details, text):
    assert failure_of(status, details, "x:1").text.startswith(text)
