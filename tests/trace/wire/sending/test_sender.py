"""Spans to an endpoint that is there, that is not, that comes back, that refuses; and their place in the run's page."""

import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.resources import Resource

from specscope.errors import UserError
from specscope.remote.receiver import Receiver
from specscope.trace.record.vocabulary import Vocabulary
from specscope.trace.wire import sending
from specscope.trace.wire.sending import PAGE_URL, Sender, SpanSink, most_bytes, readable
from specscope.trace.wire.spans import Span, SpanLevel
from tests.processes import free_port
from tests.remote.store import Answer, Store
from tests.trace.samples import records, written
from tests.trace.strategies import RUN
from tests.waiting import HANG_SECONDS, ends, until

RESOURCE = Resource({})
both = pytest.mark.parametrize("protocol", ["grpc", "http/protobuf"])


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
        sender = Sender(f"127.0.0.1:{port}", protocol)
        taken.gate.clear()
        giving = ThreadPoolExecutor(1).submit(lambda: [sender.put(batch(1 + 64 * i, 64)) for i in range(100)])
        until(lambda: sender.queued == sending.QUEUED)
        taken.gate.set()
        giving.result(HANG_SECONDS)
        sender.close()
    assert taken.ids == list(range(1, 6401))
    assert not sender.lost


@pytest.mark.every(2)
@both
def test_no_export_is_too_large_for_a_receiver(protocol):
    """A step of 256 nodes has 85 kB; here are 21 of 200 kB, and one that is too large by itself."""
    taken, port = Taken(), free_port()
    numbers = {"coins": [0.1] * 500, "ids": [-(2**63)] * 500, "pieces": ["\U0001f600" * 9] * 50, "text": "é" * 100_000}
    large = [Span("decode_step", 1, i, 0, 1, 2, numbers, ((1, 1),) * 50, error="é" * 300) for i in range(1, 22)]
    large.insert(9, large[8]._replace(id=999, attributes={"text": "é" * 3 * 2**20}))
    assert encode_spans([readable(large[0], RESOURCE)]).ByteSize() <= most_bytes(large[0])
    sender = Sender(f"127.0.0.1:{port}", protocol)
    with listening(taken, port, protocol):
        sink = SpanSink(sender, RUN, Vocabulary(), SpanLevel.TREES)
        sink._encoder = SimpleNamespace(encode=lambda _: large)
        sink(records()[0])
        sink.close()
    assert taken.ids == list(range(1, 22))
    (line,) = sink.losses()
    assert line.startswith(f"1 span not sent: 127.0.0.1:{port} refused the spans: ")


@both
def test_one_that_comes_back_gets_what_was_queued(protocol):
    taken, port = Taken(), free_port()
    sender = Sender(f"127.0.0.1:{port}", protocol)
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
def test_meanwhile_the_oldest_give_way_and_nobody_waits(protocol, monkeypatch):
    monkeypatch.setattr(sending, "QUEUED", 200)
    taken, port = Taken(), free_port()
    sender = Sender(f"127.0.0.1:{port}", protocol)
    sender.put(batch(1))
    until(lambda: sender._failure is not None)
    more = sending.QUEUED + 100
    for i in range(2, 2 + more):
        ends(sender.put, batch(i))
    with listening(taken, port, protocol):
        sender.close()
    assert taken.ids == list(range(2 + more - len(taken.ids), 2 + more))
    assert len(taken.ids) in (sending.QUEUED, sending.QUEUED + 1)  # with the one that was being tried
    assert sender.lost == {f"nothing listens at 127.0.0.1:{port} (connection refused)": 1 + more - len(taken.ids)}


def test_what_speaks_http_is_named_where_grpc_was_sent(patient):
    port = free_port()
    with Receiver(lambda export: None, grpc_port=None, http_port=port):
        sender = Sender(f"127.0.0.1:{port}", "grpc")
        sender.put(batch(1))
        sender.close()
    assert sender.lost == {f"127.0.0.1:{port} speaks HTTP, not gRPC: give --otlp-protocol http/protobuf": 1}


class Endpoint(Store):
    """Answers each export with the next of these statuses, the last for ever; 0 drops it."""

    def __init__(self, *statuses, body=b"", kind=None):
        super().__init__({})
        self._left, self._body, self._headers = list(statuses), body, [("Content-Type", kind)] if kind else []

    def answer(self, path):
        return Answer(self._body, self._left.pop(0) if len(self._left) > 1 else self._left[0], tuple(self._headers))


HTTP, PAGE = "http/protobuf", "is not an OTLP endpoint: it answered text/html"
ANSWERS = [  # the statuses, what comes with them, how many of three spans are lost, and why
    ((401,), {}, 3, "refused the spans: 401 Unauthorized"),
    ((503,), {}, 3, "refused the spans: 503 Service Unavailable"),
    ((200,), {"kind": "text/html; charset=utf-8", "body": b"<!doctype html>"}, 3, PAGE),
    ((200,), {"kind": "text/html"}, 0, ""),
    ((200,), {"kind": "Application/JSON; charset=utf-8", "body": b"{}"}, 0, ""),
    ((200,), {"body": b"{}"}, 0, ""),
    ((200, 503, 200), {}, 0, ""),
    ((200, 0, 200), {}, 0, ""),
    ((200, 200, 0, 200), {}, 0, ""),  # the last, at the end
    ((200, 400, 200), {}, 1, "refused the spans: 400 Bad Request"),
]


@pytest.mark.parametrize(("statuses", "answer", "lost", "text"), ANSWERS)
def test_a_refusal_is_told_a_page_is_no_answer_and_what_may_pass_is_tried_again(statuses, answer, lost, text):
    with Endpoint(*statuses, **answer) as endpoint:
        sender = Sender(endpoint.host, HTTP)
        for i in range(1, 4):
            sender.put(batch(i))
            if len(statuses) > 1 and i < 3:
                until(lambda: not sender.queued and not sender._sending)
        ends(sender.close)
    assert sender.lost == ({f"{endpoint.host} {text}": lost} if lost else {})


@pytest.mark.parametrize("address", ["http://user:secret@127.0.0.1:1", "user:secret@127.0.0.1:1"])
def test_a_login_that_cannot_be_sent_is_refused(address, monkeypatch):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", address)
    for words in ((address, "grpc"), (None,)):
        with pytest.raises(UserError, match=r"127\.0\.0\.1:1.*OTEL_EXPORTER_OTLP_HEADERS") as error:
            Sender(*words)
        assert "secret" not in str(error.value)


@pytest.mark.parametrize("name", ["OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"])
def test_a_variable_without_http_is_taken_like_the_flag(name, monkeypatch):
    with Endpoint(200) as endpoint:
        monkeypatch.setenv(name, endpoint.host)
        sender = Sender(None, HTTP)
        sender.put(batch(1))
        ends(sender.close)
        assert not sender.lost
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_INSECURE", "false")  # where it asks for TLS it gets no plain text
    made = Sender(None, HTTP)
    assert made._endpoint.exporter._endpoint == f"https://{endpoint.host}/v1/traces"
    ends(made.close)


READ = {"HEADERS": "a=b, c = d=e,", "TRACES_HEADERS": "authorization=Basic%20x", "COMPRESSION": "GZIP"}


def test_variables_that_cannot_be_read_are_named_without_their_values(monkeypatch):
    for name, value in READ.items():
        monkeypatch.setenv(f"OTEL_EXPORTER_OTLP_{name}", value)
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "")
    assert sending.unread() == []
    for name in (*(f"OTEL_EXPORTER_OTLP_{name}" for name in READ), "OTEL_RESOURCE_ATTRIBUTES"):
        with monkeypatch.context() as changed:
            changed.setenv(name, "secret")
            (line,) = sending.unread()
            assert line.startswith(f"{name} cannot be read, so it is left out: write ")
            assert "secret" not in line


@both
def test_one_that_says_nothing_holds_nobody(protocol, monkeypatch):
    monkeypatch.setattr(sending, "UNKNOWN", 0.1)
    monkeypatch.setattr("specscope.trace.wire.sending.TIMEOUT", 4 * HANG_SECONDS)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        sender = Sender(f"127.0.0.1:{port}", protocol)
        for i in range(3):
            ends(sender.put, batch(1 + 1000 * i, 1000))
        ends(sender.close)
    assert sum(sender.lost.values()) == 3000
    assert all(why.startswith(f"127.0.0.1:{port} did not answer in ") for why in sender.lost)


def sent(level):
    """(name, page, request, step) of each span of the sample run that arrives."""
    found, port = [], free_port()

    def take(export):
        for resource in ExportTraceServiceRequest.FromString(bytes(export.body)).resource_spans:
            for span in (span for scope in resource.scope_spans for span in scope.spans):
                told = {each.key: each.value for each in span.attributes}
                page = told["specscope.page"].string_value if "specscope.page" in told else None
                place = told.get("specscope.request.id"), told.get("specscope.request.step")
                found.append((span.name, page, *place))

    with Receiver(take, grpc_port=port, http_port=None):
        sink = SpanSink(Sender(f"127.0.0.1:{port}", "grpc"), RUN, Vocabulary(), level)
        for record in records():
            sink(record)
        sink.close()
    return found


@pytest.mark.parametrize("level", [SpanLevel.STEPS, SpanLevel.TREES])
def test_each_decode_step_links_to_its_place(level, monkeypatch, tmp_path):
    monkeypatch.setenv(PAGE_URL, "https://host/pages/{run}.html?x=1")
    spans = sent(level)
    assert {name for name, page, *_ in spans if page} == {"decode_step"} < {name for name, *_ in spans}
    for name, page, request, step in spans:
        if name == "decode_step":
            place = f"{request.string_value}@{step.int_value}"
            assert page == f"https://host/pages/{RUN.run_id}.html?x=1#{place}"
    assert "specscope.page" not in written(tmp_path / "run.jsonl").read_text()


def test_without_it_there_is_no_link(monkeypatch):
    monkeypatch.delenv(PAGE_URL, raising=False)
    assert {page for _, page, *_ in sent(SpanLevel.TREES)} == {None}


@pytest.mark.parametrize(
    ("template", "says"),
    [("https://host/run.html", "write {run} where the run's id stands"), ("host/{run}", "write an address, such as")],
)
def test_a_template_that_leads_nowhere_is_refused(template, says, monkeypatch):
    monkeypatch.setenv(PAGE_URL, template)
    with pytest.raises(UserError, match=says):
        sent(SpanLevel.TREES)
