"""Histograms over requests, from records: vLLM's latencies and lengths, and acceptance length by request.

Names and buckets are vLLM's where it has the histogram, so that its dashboards fit. A bucket has the trace id of the
newest request in it as its exemplar, which is the way from a rate to a request; only OpenMetrics text can hold it.
"""

from __future__ import annotations

from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Histogram

from specscope.trace.history.stats import Acceptance
from specscope.trace.record.records import FinishReason, RequestEnd, RequestInfo, RunInfo, StepRecord
from specscope.trace.wire.sampling import ratio_keeps
from specscope.trace.wire.spans import own_trace

# vLLM's buckets (v1/metrics/buckets.py)
LONG = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
FIRST = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640),
    2560,
)
BETWEEN = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
TOKENS = tuple(2**n for n in (0, *range(3, 15)))

# Ours are the same for every engine, so that a fleet's can be added: 1 is a request of which nothing was accepted
LENGTHS = (1, 1.25, 1.5, 1.75, 2, 2.5, 3, 3.5, 4, 5, 6, 8, 10, 12, 16, 24, 32)

HISTOGRAMS = {
    "vllm:time_to_first_token_seconds": ("From arrival to the first output.", FIRST),
    "vllm:inter_token_latency_seconds": ("Between two steps that emitted.", BETWEEN),
    "vllm:request_time_per_output_token_seconds": ("Of a request: decode time by token after the first.", BETWEEN),
    "vllm:e2e_request_latency_seconds": ("From arrival to the end.", LONG),
    "vllm:request_queue_time_seconds": ("From arrival to admission.", LONG),
    "vllm:request_prefill_time_seconds": ("From admission to the first output.", LONG),
    "vllm:request_decode_time_seconds": ("From the first output to the end.", LONG),
    "vllm:request_inference_time_seconds": ("From admission to the end.", LONG),
    "vllm:iteration_tokens_total": ("Tokens fed in a step.", TOKENS),
    "specscope:request_acceptance_length": ("Of a request with drafts: 1 + accepted / drafts.", LENGTHS),
}
COUNTS = {  # their buckets go as far as a context
    "vllm:request_prompt_tokens": "Tokens of a request's prompt.",
    "vllm:request_generation_tokens": "Output tokens of a request.",
}
WHOLE = (FinishReason.EOS, FinishReason.STOP, FinishReason.LENGTH)  # of others, latencies and lengths say nothing


def buckets_to(most: int) -> tuple[int, ...]:
    """vLLM's `build_1_2_5_buckets`: 1, 2, 5, 10, 20, ... up to `most`."""
    series = (digit * 10**power for power in range(len(str(most))) for digit in (1, 2, 5))
    return tuple(value for value in series if value <= most)


@dataclass
class _Running:
    """A request that was admitted and has not ended."""

    exemplar: dict[str, str] | None  # None where it has no trace
    arrival_ns: int
    first_ns: int = 0  # when it first emitted; 0: not yet
    last_ns: int = 0  # when it last did
    drafts: int = 0
    accepted: int = 0


class Histograms:
    """A sink: call it with each StepRecord of the run. Its histograms are in `registry`, and can be read there.

    `labels`: those of every series. `ratio`: the share of requests whose spans are sent, None where all are; others
    are no exemplars.
    """

    def __init__(self, registry: CollectorRegistry, labels: dict[str, str], run: RunInfo, ratio: float | None) -> None:
        lengths = {name: (text, buckets_to(max(run.max_context, 1))) for name, text in COUNTS.items()}
        self._histograms = {
            name: Histogram(name, text, list(labels), buckets=buckets, registry=registry).labels(**labels)
            for name, (text, buckets) in {**HISTOGRAMS, **lengths}.items()
        }
        self._run_id = run.run_id
        self._ratio = ratio
        self._running: dict[str, _Running] = {}

    def __call__(self, record: StepRecord) -> None:
        """Count one engine step."""
        if record.requests:
            fed = sum(part.prefill_tokens + (part.verdict is not None) + len(part.tree) for part in record.requests)
            self._see("vllm:iteration_tokens_total", fed)
        for info in record.admitted:
            request = self._running[info.id] = _Running(self._exemplar(info), info.arrival_ns)
            self._see_ns("vllm:request_queue_time_seconds", info.admitted_ns - info.arrival_ns, request)
        for part in record.requests:
            if (known := self._running.get(part.request)) is not None:
                if part.verdict is not None and len(part.tree):  # also one that a debugger goes back over, later
                    known.drafts, known.accepted = known.drafts + 1, known.accepted + part.verdict.accepted
                if part.emitted:
                    self._emit(known, record.end_ns)
        for end in record.finished:
            if (known := self._running.pop(end.info.id, None)) is not None:
                self._end(end, known)

    def _exemplar(self, info: RequestInfo) -> dict[str, str] | None:
        """The trace that the request's spans are in: its caller's, or its own (spans.py)."""
        own = own_trace(self._run_id, info.id)
        if self._ratio is not None and ratio_keeps(own, info.traceparent, self._ratio) is None:
            return None
        return {"trace_id": info.traceparent.split("-")[1] if info.traceparent else f"{own:032x}"}

    def _emit(self, request: _Running, now: int) -> None:
        if request.first_ns:
            self._see_ns("vllm:inter_token_latency_seconds", now - request.last_ns, request)
        else:
            request.first_ns = now
            self._see_ns("vllm:time_to_first_token_seconds", now - request.arrival_ns, request)
        request.last_ns = now

    def _end(self, end: RequestEnd, request: _Running) -> None:
        tau = Acceptance(drafts=request.drafts, accepted=request.accepted).tau
        if tau is not None:
            self._see("specscope:request_acceptance_length", tau, request)
        if not request.first_ns or end.reason not in WHOLE:
            return
        info, first, last, output = end.info, request.first_ns, request.last_ns, len(end.output)
        self._see("vllm:request_prompt_tokens", len(info.prompt_tokens), request)
        self._see("vllm:request_generation_tokens", output, request)
        times: dict[str, float] = {
            "vllm:e2e_request_latency_seconds": last - info.arrival_ns,
            "vllm:request_prefill_time_seconds": first - info.admitted_ns,
            "vllm:request_decode_time_seconds": last - first,
            "vllm:request_inference_time_seconds": last - info.admitted_ns,
        }
        times |= {} if output < 2 else {"vllm:request_time_per_output_token_seconds": (last - first) / (output - 1)}
        for name, ns in times.items():
            self._see_ns(name, ns, request)

    def _see_ns(self, name: str, ns: float, request: _Running) -> None:
        self._see(name, max(ns, 0) / 1e9, request)

    def _see(self, name: str, value: float, request: _Running | None = None) -> None:
        self._histograms[name].observe(value, None if request is None else request.exemplar)
