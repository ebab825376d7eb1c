"""Metrics, through real readers, a real exporter and a real Prometheus parser."""

from __future__ import annotations

import socket
import urllib.request
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from prometheus_client.parser import text_string_to_metric_families

from specscope.errors import UserError
from specscope.remote.receiver import Receiver
from specscope.trace.history.stats import Acceptance
from specscope.trace.metrics import metrics as exported
from specscope.trace.metrics.metrics import Metrics, log_line
from specscope.trace.record.records import (
    FinishReason,
    Phase,
    RequestEnd,
    RequestInfo,
    RequestStep,
    StepRecord,
)
from tests.counting import lines_run
from tests.support import records as made
from tests.waiting import HANG_SECONDS, ends

MS = 1_000_000


def part(drafted: int, accepted: int, emitted: int | None = None, request: str = "a") -> RequestStep:
    """A chain of `drafted` tokens of which the first `accepted` were accepted."""
    outcome = made.outcomes(drafted, range(accepted), range(accepted, min(accepted + 1, drafted)))
    tree, path = made.chain(range(drafted)), range(accepted)
    judged = made.verdict(outcome, path, kind=made.kind_of(tree.parent.tolist(), path))
    return made.part(request, tree, judged, context=10, emitted=emitted)


def record(step: int, parts: Sequence[RequestStep], start_ms: int | None = None, **change: object) -> StepRecord:
    start = (step * 100 if start_ms is None else start_ms) * MS
    during = (Phase("schedule", start, start + MS), Phase("commit", start + MS, start + 50 * MS))
    return made.record(step, parts, during, **{"blocks_used": 30, "blocks_free": 70} | change)


def info(name: str, prompt_tokens: int) -> RequestInfo:
    return made.info(name, tokens=[0] * prompt_tokens)


def end(name: str, reason: FinishReason) -> RequestEnd:
    return made.end(info(name, 1), reason=reason)


RECORDS = [
    record(
        0,
        [replace(part(0, 0), found=8), part(0, 0, request="b")],
        admitted=(info("a", 12), info("b", 5)),
        waiting=4,
        queried=17,
    ),
    record(1, [part(3, 3), part(3, 1, request="b")]),
    record(2, [part(2, 0), part(3, 2, emitted=1, request="b")], preempted=("c",), waiting=3),
    record(3, [part(1, 1)], finished=(end("b", FinishReason.EOS), end("c", FinishReason.CANCELLED)), blocks_used=60),
    record(4, [], finished=(end("a", FinishReason.STOP),), waiting=1, blocks_used=60, blocks_free=40),
]
COUNTERS = {
    "spec_decode_num_drafts": {(): 5},
    "spec_decode_num_draft_tokens": {(): 12},
    "spec_decode_num_accepted_tokens": {(): 7},
    "spec_decode_num_accepted_tokens_per_pos": {("0",): 4, ("1",): 2, ("2",): 1},
    "prompt_tokens": {(): 17},
    "generation_tokens": {(): 12},
    "num_preemptions": {(): 1},
    "prefix_cache_queries": {(): 17},
    "prefix_cache_hits": {(): 8},
    "request_success": {("stop",): 2, ("length",): 0, ("abort",): 1, ("error",): 0},
}
GAUGES = {"num_requests_running": 0, "num_requests_waiting": 1, "kv_cache_usage_perc": 0.6}


def own(labels: dict) -> tuple[str, ...]:
    """The labels besides vLLM's two, which every series must carry."""
    assert labels["model_name"] == 'SmolLM2 "135M"'
    assert labels["engine"] == "0"
    return tuple(value for name, value in labels.items() if name not in ("model_name", "engine"))


def filled(**options: object) -> Metrics:
    metrics = Metrics('SmolLM2 "135M"', **options)
    for one in RECORDS:
        metrics(one)
    return metrics


def test_the_otel_instruments() -> None:
    reader = InMemoryMetricReader()
    metrics = Metrics('SmolLM2 "135M"', provider=MeterProvider([reader]), lost=lambda: 3)
    for one in RECORDS:
        metrics(one)
    [scope] = reader.get_metrics_data().resource_metrics[0].scope_metrics
    found = {metric.name: metric for metric in scope.metrics}
    for name, want in COUNTERS.items():
        assert {own(p.attributes): p.value for p in found[name].data.data_points} == want
        assert found[name].data.is_monotonic
    for name, value in GAUGES.items():
        [point] = found[name].data.data_points
        assert point.value == pytest.approx(value)
        assert not hasattr(found[name].data, "is_monotonic")
    [point] = found["specscope.lost_records"].data.data_points
    assert point.value == 3
    assert set(found) == {*COUNTERS, *GAUGES, "specscope.lost_records"}


def test_counters_are_cumulative_over_collections() -> None:
    reader = InMemoryMetricReader()
    metrics = Metrics("m", provider=MeterProvider([reader]))
    seen = []
    for one in RECORDS:
        metrics(one)
        [scope] = reader.get_metrics_data().resource_metrics[0].scope_metrics
        [drafts] = [m for m in scope.metrics if m.name == "spec_decode_num_drafts"]
        seen.append(drafts.data.data_points[0].value)
    assert seen == [0, 2, 4, 5, 5]


def parsed(text: str) -> dict[str, dict[tuple[str, ...], float]]:
    return {
        sample.name: {own(s.labels): s.value for s in family.samples}
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_the_prometheus_text_has_vllms_names() -> None:
    text = filled(lost=lambda: 2).prometheus_text()
    want = {f"vllm:{name}_total": values for name, values in COUNTERS.items()}
    want |= {f"vllm:{name}": {(): pytest.approx(value)} for name, value in GAUGES.items()}
    want["specscope:lost_records_total"] = {(): 2}
    assert parsed(text) == want
    assert "# TYPE vllm:spec_decode_num_drafts_total counter\n" in text
    assert "# TYPE vllm:kv_cache_usage_perc gauge\n" in text


def test_before_the_first_record_everything_is_zero() -> None:
    found = parsed(Metrics('SmolLM2 "135M"').prometheus_text())
    assert found["vllm:spec_decode_num_drafts_total"] == {(): 0}
    assert found["vllm:kv_cache_usage_perc"] == {(): 0}


def test_prometheus_over_http() -> None:
    metrics = filled()
    port = metrics.serve_prometheus(0)
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=HANG_SECONDS) as answer:
        assert answer.headers["Content-Type"].startswith("text/plain")
        assert parsed(answer.read().decode()) == parsed(metrics.prometheus_text())
    with pytest.raises(UserError, match=f"127.0.0.1:{port}"):
        Metrics().serve_prometheus(port)
    metrics.close()
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=HANG_SECONDS)


@pytest.mark.parametrize(("protocol", "path"), [("grpc", ""), ("http/protobuf", ""), ("http/protobuf", "/v1/traces")])
@pytest.mark.usefixtures("patient")
def test_otlp_export(protocol: str, path: str) -> None:
    with MetricsBackend() as backend:
        metrics = filled(endpoint=backend.endpoint(protocol) + path, protocol=protocol)
        metrics.close()
    found = {metric.name: metric for group in backend.got for scope in group.scope_metrics for metric in scope.metrics}
    assert [point.as_int for point in found["spec_decode_num_accepted_tokens"].sum.data_points] == [7]
    assert set(found) == {*COUNTERS, *GAUGES, "specscope.lost_records"}


@pytest.mark.parametrize("protocol", ["grpc", "http/protobuf"])
def test_where_they_cannot_be_sent_it_is_known_why_and_nobody_waits(protocol: str, monkeypatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        monkeypatch.setattr(exported, "EXPORT_TIMEOUT", 4 * HANG_SECONDS)
        monkeypatch.setattr(exported, "UNKNOWN", 0.1)
        metrics = filled(endpoint=f"127.0.0.1:{port}", protocol=protocol)
        ends(metrics.close)
        assert metrics.unsent == f"127.0.0.1:{port} did not answer in 0 s"
    monkeypatch.setattr(exported, "UNKNOWN", 4 * HANG_SECONDS)
    metrics = filled(endpoint=f"127.0.0.1:{port}", protocol=protocol)
    ends(metrics.close)
    assert metrics.unsent == f"nobody listens at 127.0.0.1:{port} (connection refused)"


@pytest.mark.parametrize("protocol", ["grpc", "http/protobuf"])
@pytest.mark.usefixtures("patient")
def test_an_endpoint_that_takes_traces_alone_is_no_loss(protocol: str) -> None:
    """Jaeger's."""
    with Receiver(lambda spans: None) as one:
        port = one.grpc_port if protocol == "grpc" else one.http_port
        metrics = filled(endpoint=f"127.0.0.1:{port}", protocol=protocol)
        metrics.close()
    assert metrics.unsent == ""


class MetricsBackend:
    """A collector for metrics: gRPC and HTTP."""

    def __enter__(self) -> MetricsBackend:
        import threading
        from concurrent.futures import ThreadPoolExecutor
        from http.server import BaseHTTPRequestHandler, HTTPServer

        import grpc
        from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2 as pb

        self.got: list = []

        def take(body: bytes) -> bytes:
            self.got += pb.ExportMetricsServiceRequest.FromString(body).resource_metrics
            return pb.ExportMetricsServiceResponse().SerializeToString()

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                assert self.path == "/v1/metrics"
                take(body)
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        service = "opentelemetry.proto.collector.metrics.v1.MetricsService"
        export = grpc.unary_unary_rpc_method_handler(lambda body, _: take(body))
        self._grpc = grpc.server(
            ThreadPoolExecutor(1), [grpc.method_handlers_generic_handler(service, {"Export": export})]
        )
        self._port = self._grpc.add_insecure_port("127.0.0.1:0")
        self._grpc.start()
        self._http = HTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self._http.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def endpoint(self, protocol: str) -> str:
        return f"127.0.0.1:{self._port}" if protocol == "grpc" else f"http://127.0.0.1:{self._http.server_port}"

    def __exit__(self, *_: object) -> None:
        self._grpc.stop(0).wait()
        self._http.shutdown()
        self._http.server_close()


def test_an_unknown_protocol() -> None:
    with pytest.raises(UserError, match="'carrier-pigeon'; use grpc or http/protobuf"):
        Metrics(endpoint="localhost:4317", protocol="carrier-pigeon")


def test_the_log_line_is_vllms() -> None:
    counts = Acceptance(drafts=44, drafted=220, accepted=20, accepted_at=[16, 2, 2, 0, 0])
    assert log_line(counts, 220 / 18.70) == (
        "SpecDecoding metrics: Mean acceptance length: 1.45, Accepted throughput: 1.70 tokens/s, Drafted throughput: "
        "18.70 tokens/s, Accepted: 20 tokens, Drafted: 220 tokens, Per-position acceptance rate: 0.364, 0.045, 0.045, "
        "0.000, 0.000, Avg Draft acceptance rate: 9.1%"
    )


def test_no_line_where_nothing_was_drafted_and_no_division_by_zero() -> None:
    assert log_line(Acceptance(steps=5, emitted=5), 10) is None
    line = log_line(Acceptance(drafts=1, drafted=2, accepted=0, accepted_at=[0, 0]), 0)
    assert line is not None
    assert "Mean acceptance length: 1.00, Accepted throughput: 0.00" in line


def test_one_line_an_interval_in_the_records_time() -> None:
    lines: list[str] = []
    metrics = Metrics(log=lines.append, seconds=1.0)
    for step in range(25):  # a step every 100 ms, each 50 ms long: ten fit in a second
        metrics(record(step, [part(2, 1)]))
    assert len(lines) == 2
    assert "Accepted: 10 tokens, Drafted: 20 tokens" in lines[0]
    assert "Drafted throughput: 21.05 tokens/s" in lines[0]  # 20 in 950 ms
    metrics.close()
    assert len(lines) == 3
    assert "Accepted: 5 tokens, Drafted: 10 tokens" in lines[2]
    metrics.close()
    assert len(lines) == 3
    assert metrics.totals.acceptance.accepted == 25  # the totals go on over the intervals


def test_idle_time_between_two_requests_is_in_no_interval() -> None:
    lines: list[str] = []
    metrics = Metrics(log=lines.append, seconds=1.0)
    metrics(record(0, [part(2, 1)], start_ms=0))
    metrics(record(1, [part(2, 1)], start_ms=60_000))
    metrics.close()
    assert [line.count("Drafted throughput: 40.00 tokens/s") for line in lines] == [1, 1]


@given(st.lists(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), max_size=4), max_size=12))
def test_metrics_agree_with_the_one_definition(steps: list[list[tuple[int, int]]]) -> None:
    metrics, want = Metrics(log=lambda _: None, seconds=0.25), Acceptance()
    for number, shapes in enumerate(steps):
        parts = [part(drafted, min(drafted, accepted)) for drafted, accepted in shapes]
        metrics(record(number, parts))
        for one in parts:
            want.add(one)
    assert metrics.totals.acceptance == want


def test_a_step_of_eight_requests_is_cheap() -> None:
    """About 25 us where the trees' depths are known already, of the first record as of the last."""
    records = [record(n, [part(5, 2) for _ in range(8)]) for n in range(200)]
    metrics = Metrics(log=lambda _: None)
    work = [lines_run(metrics, one)[0] for one in records]
    assert max(work) < 2000  # 845 lines of Python each, at most 1,033
