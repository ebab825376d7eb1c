"""/metrics: the counters of trace/wire/metrics.py, and latencies under vLLM's names, all from records."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest

from specscope.trace.record.records import RequestEnd, RequestStep, StepRecord
from specscope.trace.wire.metrics import VLLM_REASON, Metrics

# vLLM's buckets (v1/metrics/buckets.py), so that its dashboards fit
LONG = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
FIRST = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1,
    2.5,
    5,
    7.5,
    10,
    20,
    40,
    80,
    160,
    640,
    2560,
)
BETWEEN = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
TOKENS = tuple(2**n for n in (0, *range(3, 15)))

QUEUE_FULL = "queue_full"
HISTOGRAMS = {
    "time_to_first_token_seconds": ("From arrival to the first output.", FIRST),
    "inter_token_latency_seconds": ("Between two steps that emitted.", BETWEEN),
    "request_time_per_output_token_seconds": ("Of a request: decode time by token after the first.", BETWEEN),
    "e2e_request_latency_seconds": ("From arrival to the end.", LONG),
    "request_queue_time_seconds": ("From arrival to admission.", LONG),
    "request_prefill_time_seconds": ("From admission to the first output.", LONG),
    "request_decode_time_seconds": ("From the first output to the end.", LONG),
    "request_inference_time_seconds": ("From admission to the end.", LONG),
    "iteration_tokens_total": ("Tokens fed in a step.", TOKENS),
}


class Observed:
    """A sink of records. `text` may be called on any thread."""

    def __init__(self, model: str) -> None:
        labels = {"model_name": model, "engine": "0"}
        self._metrics = Metrics(model)
        self._registry = CollectorRegistry()
        self._histograms = {
            name: Histogram(f"vllm:{name}", text, list(labels), buckets=buckets, registry=self._registry).labels(
                **labels
            )
            for name, (text, buckets) in HISTOGRAMS.items()
        }
        self._labels = labels
        self._refusals = Counter(
            "vllm:admission_rejections",
            "Requests that were refused before the engine was asked.",
            [*labels, "reason"],
            registry=self._registry,
        )
        self._refusals.labels(**labels, reason=QUEUE_FULL)  # so that it is reported from the start
        self._arrivals: dict[str, int] = {}  # of requests that run, ns
        self._emitted: dict[str, tuple[int, int]] = {}  # when a request first and last emitted, ns

    def refused(self, reason: str = QUEUE_FULL) -> None:
        """Count a request that was refused."""
        self._refusals.labels(**self._labels, reason=reason).inc()

    def __call__(self, record: StepRecord) -> None:
        """Count one step."""
        self._metrics(record)
        ended = {end.info.id for end in record.finished}
        self._metrics.totals.running -= sum(part.request in ended for part in record.requests)  # after the step
        if record.requests:
            fed = sum(part.prefill_tokens + (part.verdict is not None) + len(part.tree) for part in record.requests)
            self._histograms["iteration_tokens_total"].observe(fed)
        for info in record.admitted:
            self._see("request_queue_time_seconds", info.admitted_ns - info.arrival_ns)
            self._arrivals[info.id] = info.arrival_ns
        for part in record.requests:
            if part.emitted:
                self._emit(part, record.end_ns)
        for end in record.finished:
            self._end(end)

    def _emit(self, part: RequestStep, now: int) -> None:
        if part.request in self._emitted:
            first, last = self._emitted[part.request]
            self._see("inter_token_latency_seconds", now - last)
        else:
            first = now
            self._see("time_to_first_token_seconds", now - self._arrivals.get(part.request, now))
        self._emitted[part.request] = (first, now)

    def _end(self, end: RequestEnd) -> None:
        info = end.info
        self._arrivals.pop(info.id, None)
        first, last = self._emitted.pop(info.id, (0, 0))
        if not first or VLLM_REASON[end.reason] not in ("stop", "length"):
            return
        self._see("e2e_request_latency_seconds", last - info.arrival_ns)
        self._see("request_prefill_time_seconds", first - info.admitted_ns)
        self._see("request_decode_time_seconds", last - first)
        self._see("request_inference_time_seconds", last - info.admitted_ns)
        if len(end.output) > 1:
            self._see("request_time_per_output_token_seconds", (last - first) / (len(end.output) - 1))

    def _see(self, name: str, ns: float) -> None:
        self._histograms[name].observe(max(ns, 0) / 1e9)

    def text(self) -> str:
        """All metrics in Prometheus' text format."""
        return self._metrics.prometheus_text() + generate_latest(self._registry).decode()

    def close(self) -> None:
        """End what was started."""
        self._metrics.close()
