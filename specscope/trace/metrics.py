"""Metrics that follow from the records, under vLLM's names, so that dashboards made for vLLM work.

A name has the prefix `vllm:` and a counter ends in `_total`, as vLLM's /metrics has it:
`vllm:spec_decode_num_drafts_total`. What vLLM has no name for is `specscope:...`. Every series carries vLLM's labels
`model_name` and `engine`, and positions count from 0 (depth 1 is position 0).
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import count
from typing import Any
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, Histogram, make_wsgi_app, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from specscope.errors import UserError
from specscope.trace.history.stats import Acceptance
from specscope.trace.history.totals import Undrafted, count_undrafted
from specscope.trace.record.aggregate import Aggregate
from specscope.trace.record.records import FinishReason, RequestInfo, RunInfo, StepRecord
from specscope.trace.wire.sampling import ratio_keeps
from specscope.trace.wire.spans import own_trace

PLAIN, OPENMETRICS = "text/plain", "application/openmetrics-text"  # the forms of a metrics page

# FinishReason as vLLM's finished_reason label has it.
VLLM_REASON = {
    FinishReason.EOS: "stop",
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.CANCELLED: "abort",
    FinishReason.ERROR: "error",
}


@dataclass
class Totals:
    """What is counted. Counters only grow; the batch and the KV cache are as the newest record has them."""

    acceptance: Acceptance = field(default_factory=Acceptance)
    prompt_tokens: int = 0
    preemptions: int = 0
    finished: Counter[str] = field(default_factory=Counter)  # by VLLM_REASON
    undrafted: Counter[Undrafted] = field(default_factory=Counter)  # request steps without drafts, of a run
    running: int = 0
    waiting: int = 0
    kv_usage: float | None = 0.0  # share of the KV blocks in use, 0 to 1; None where the engine does not tell it
    told: Aggregate | None = None  # the newest record's, of an engine that tells counts only

    def add(self, record: StepRecord) -> None:
        for part in record.counted:
            self.acceptance.add(part)
        self.prompt_tokens += sum(len(info.prompt_tokens) for info in record.admitted)
        self.finished.update(VLLM_REASON[end.reason] for end in record.finished)
        self.preemptions += len(record.preempted)
        self.running, self.waiting, self.told = record.running, record.waiting, record.aggregate
        blocks = record.blocks_used + record.blocks_free
        own = record.blocks_used / blocks if blocks else 0.0
        self.kv_usage = own if self.told is None else self.told.kv_usage


Value = float | Mapping[str, float] | None  # of a series; by the values of its label; None: not told
GAUGES = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")


def series_of(totals: Totals) -> Iterator[tuple[str, str, str, Value]]:
    """Each series: its name, without a counter's `_total`, what it is, its label besides vLLM's, and its value."""
    counts = totals.acceptance
    load: Any = totals if totals.told is None else totals.told
    steps = totals.told is None  # else the engine reports counts alone
    by_position = dict(zip(map(str, count()), counts.accepted_at if counts.knows("accepted_at") else (), strict=False))
    undrafted = {reason.value: number for reason, number in totals.undrafted.items()}
    ended = {reason: totals.finished[reason] for reason in VLLM_REASON.values()}
    drafting, running = "vllm:spec_decode_num", "vllm:num_requests"
    yield f"{drafting}_drafts", "Steps with at least one drafted token.", "", counts.told("drafts")
    yield f"{drafting}_draft_tokens", "Drafted tokens.", "", counts.told("drafted")
    yield f"{drafting}_accepted_tokens", "Accepted tokens.", "", counts.told("accepted")
    yield f"{drafting}_accepted_tokens_per_pos", "Accepted tokens per draft position.", "position", by_position
    yield "specscope:undrafted_steps", "Request steps without drafts, by the reason.", "reason", undrafted
    yield "vllm:prompt_tokens", "Prompt tokens of admitted requests.", "", totals.prompt_tokens if steps else None
    yield "vllm:generation_tokens", "Output tokens.", "", counts.told("emitted")
    yield "vllm:num_preemptions", "Preemptions.", "", totals.preemptions if steps else None
    yield "vllm:request_success", "Requests that ended, by the reason.", "finished_reason", ended if steps else {}
    yield f"{running}_running", "Requests in the batch.", "", load.running
    yield f"{running}_waiting", "Requests waiting.", "", load.waiting
    yield "vllm:kv_cache_usage_perc", "KV-cache usage, 1 is full.", "", totals.kv_usage


def answered(accept: str) -> str:
    """What a request with this Accept header is answered with, as such a header.

    OpenMetrics where that is taken: only there are exemplars. With any other escaping than this prometheus_client
    writes `vllm_` for `vllm:` in it.
    """
    return f"{OPENMETRICS}; version=1.0.0; escaping=allow-utf-8" if OPENMETRICS in accept.lower() else PLAIN


def port_taken(host: str, port: int) -> UserError:
    return UserError(f"cannot serve metrics on {host}:{port}: choose another port if this one is in use")


class Metrics(Collector):
    """A sink: call it with each StepRecord. Everything is counted here and read from here only when asked for.

    `lost` says how many records are known to be missing. With `run`, the Prometheus text has the histograms of its
    requests too (Histograms). Their exemplars are requests whose spans are sent: `ratio` is their share, None for all.
    """

    def __init__(
        self,
        model: str = "",
        *,
        engine: str = "0",
        lost: Callable[[], int] = lambda: 0,
        run: RunInfo | None = None,
        ratio: float | None = None,
    ) -> None:
        self.totals = Totals()
        self.registry = CollectorRegistry()  # all that the Prometheus text has
        self._labels = {"model_name": model, "engine": engine}
        self._lock = threading.Lock()
        self._lost = lost
        self._servers: list[WSGIServer] = []
        self.registry.register(self)
        self._run = run
        self._histograms: Callable[[StepRecord], None] = lambda _: None
        if run is not None:
            self._histograms = Histograms(self.registry, self._labels, run, ratio)

    def __call__(self, record: StepRecord) -> None:
        with self._lock:
            self.totals.add(record)
            if self._run is not None:
                self.totals.undrafted += count_undrafted(self._run, [record])
        self._histograms(record)

    def collect(self) -> Iterator[Metric]:
        lost = "specscope:lost_records", "Records lost before they were written or sent.", "", self._lost()
        with self._lock:
            every = [*series_of(self.totals), lost]
        for name, text, label, told in every:
            values = told if isinstance(told, Mapping) else {} if told is None else {"": told}
            family = GaugeMetricFamily if name in GAUGES else CounterMetricFamily
            metric = family(name, text, labels=[*self._labels, *filter(None, [label])])
            for own, value in values.items():
                metric.add_metric([*self._labels.values(), *([own] if label else [])], value)
            yield metric

    def page(self, accept: str = "") -> tuple[bytes, str]:
        """All that is in the registry as text, and its content type, for a request with this Accept header."""
        encode, kind = choose_encoder(answered(accept))
        return encode(self.registry), kind

    def serve_prometheus(self, port: int, host: str = "127.0.0.1") -> int:
        """Serve the page over HTTP until `close`; port 0 takes any free one. Returns the port. Raises UserError."""
        try:
            server, _ = start_http_server(port, host, self.registry)
        except (OSError, OverflowError):
            raise port_taken(host, port) from None
        app = make_wsgi_app(self.registry)
        server.set_app(
            lambda environ, start: app(environ | {"HTTP_ACCEPT": answered(environ.get("HTTP_ACCEPT", ""))}, start)
        )
        self._servers.append(server)
        return int(server.server_port)

    def close(self) -> None:
        for server in self._servers:
            server.shutdown()
            server.server_close()
        self._servers = []


# vLLM's buckets (v1/metrics/buckets.py)
LONG = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
FIRST = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640),
    2560,
)
BETWEEN = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)

# Ours are the same for every engine, so that a fleet's can be added: 1 is a request of which nothing was accepted
LENGTHS = (1, 1.25, 1.5, 1.75, 2, 2.5, 3, 3.5, 4, 5, 6, 8, 10, 12, 16, 24, 32)

HISTOGRAMS = {
    "vllm:time_to_first_token_seconds": ("From arrival to the first output.", FIRST),
    "vllm:inter_token_latency_seconds": ("Between two steps that emitted.", BETWEEN),
    "vllm:e2e_request_latency_seconds": ("From arrival to the end.", LONG),
    "vllm:request_queue_time_seconds": ("From arrival to admission.", LONG),
    "specscope:request_acceptance_length": ("Of a request with drafts: 1 + accepted / drafts.", LENGTHS),
}
WHOLE = (FinishReason.EOS, FinishReason.STOP, FinishReason.LENGTH)  # of others, latencies say nothing


@dataclass
class _Running:
    exemplar: dict[str, str] | None  # None where it has no trace
    arrival_ns: int
    last_ns: int = 0  # when it last emitted; 0: not yet
    drafts: int = 0
    accepted: int = 0


class Histograms:
    """A sink whose histograms are in `registry`, with these `labels`. `ratio`: as of Metrics."""

    def __init__(self, registry: CollectorRegistry, labels: dict[str, str], run: RunInfo, ratio: float | None) -> None:
        self._histograms = {
            name: Histogram(name, text, list(labels), buckets=buckets, registry=registry).labels(**labels)
            for name, (text, buckets) in HISTOGRAMS.items()
        }
        self._run_id = run.run_id
        self._ratio = ratio
        self._running: dict[str, _Running] = {}

    def __call__(self, record: StepRecord) -> None:
        for info in record.admitted:
            request = self._running[info.id] = _Running(self._exemplar(info), info.arrival_ns)
            self._see("vllm:request_queue_time_seconds", info.admitted_ns - info.arrival_ns, request)
        for part in record.requests:
            if (known := self._running.get(part.request)) is not None:
                if part.verdict is not None and len(part.tree):  # also one that a debugger goes back over, later
                    known.drafts, known.accepted = known.drafts + 1, known.accepted + part.verdict.accepted
                if part.emitted:
                    before, known.last_ns = known.last_ns, record.end_ns
                    name = "inter_token_latency" if before else "time_to_first_token"
                    self._see(f"vllm:{name}_seconds", record.end_ns - (before or known.arrival_ns), known)
        for end in record.finished:
            if (known := self._running.pop(end.info.id, None)) is not None:
                if (tau := Acceptance(drafts=known.drafts, accepted=known.accepted).tau) is not None:
                    self._histograms["specscope:request_acceptance_length"].observe(tau, known.exemplar)
                if known.last_ns and end.reason in WHOLE:
                    self._see("vllm:e2e_request_latency_seconds", known.last_ns - end.info.arrival_ns, known)

    def _exemplar(self, info: RequestInfo) -> dict[str, str] | None:
        """The trace that the request's spans are in: its caller's, or its own (spans.py)."""
        own = own_trace(self._run_id, info.id)
        if self._ratio is not None and ratio_keeps(own, info.traceparent, self._ratio) is None:
            return None
        return {"trace_id": info.traceparent.split("-")[1] if info.traceparent else f"{own:032x}"}

    def _see(self, name: str, ns: float, request: _Running) -> None:
        self._histograms[name].observe(max(ns, 0) / 1e9, request.exemplar)
