"""Metrics that follow from the records, under vLLM's names, so that dashboards made for vLLM work.

A name has the prefix `vllm:` and a counter ends in `_total`, as vLLM's /metrics has it:
`vllm:spec_decode_num_drafts_total`. What vLLM has no name for is `specscope:...`. Every series carries vLLM's labels
`model_name` and `engine`, and positions count from 0 (depth 1 is position 0).
"""

from __future__ import annotations

import re
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, make_wsgi_app, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from specscope.errors import UserError
from specscope.trace.history.stats import Acceptance
from specscope.trace.metrics.histograms import Histograms
from specscope.trace.record.aggregate import Aggregate, Reason
from specscope.trace.record.records import FinishReason, RunInfo, StepRecord

if TYPE_CHECKING:
    from specscope.trace.wire.sampling import Sampler

PLAIN, OPENMETRICS = "text/plain", "application/openmetrics-text"  # the forms of a page of metrics
NEVER = re.compile(r";\s*q\s*=\s*0(?:\.0*)?\s*(?:;|$)")  # of a form in an Accept header: one that is not taken

LOG_SECONDS = 10.0  # between two log lines; vLLM logs as often

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

    past: Acceptance = field(default_factory=Acceptance)  # up to the last `take`
    recent: Acceptance = field(default_factory=Acceptance)  # since then
    prompt_tokens: int = 0
    preemptions: int = 0
    finished: Counter[str] = field(default_factory=Counter)  # by VLLM_REASON
    running: int = 0
    waiting: int = 0
    kv_usage: float | None = 0.0  # share of the KV blocks in use, 0 to 1; None where the engine does not tell it
    told: Aggregate | None = None  # the newest record's, of an engine that tells counts only

    def add(self, record: StepRecord) -> None:
        """Count one engine step."""
        for part in record.counted:
            self.recent.add(part)
        self.prompt_tokens += sum(len(info.prompt_tokens) for info in record.admitted)
        self.finished.update(VLLM_REASON[end.reason] for end in record.finished)
        self.preemptions += len(record.preempted)
        self.running, self.waiting, self.told = record.running, record.waiting, record.aggregate
        blocks = record.blocks_used + record.blocks_free
        own = record.blocks_used / blocks if blocks else 0.0
        self.kv_usage = own if self.told is None else self.told.kv_usage

    def take(self) -> Acceptance:
        """What was accepted since the last call."""
        taken, self.recent = self.recent, Acceptance()
        self.past.merge(taken)
        return taken

    @property
    def acceptance(self) -> Acceptance:
        """All that was accepted so far."""
        total = Acceptance()
        total.merge(self.past)
        total.merge(self.recent)
        return total


Sample = tuple[float, Mapping[str, str]]  # a value and its own labels


class Series(NamedTuple):
    """One metric: its name, without a counter's `_total`, what it is, and how it is read from the totals."""

    name: str
    text: str
    read: Callable[[Totals], Iterable[Sample]]
    counter: bool = True


def _one(value: float | None) -> list[Sample]:
    return [] if value is None else [(value, {})]


def _load(totals: Totals, name: str) -> list[Sample]:
    return _one(getattr(totals if totals.told is None else totals.told, name))


def _of_engine(totals: Totals, value: float) -> list[Sample]:
    """A sample of an engine's own value; none where the engine reports only counts."""
    return _one(value if totals.told is None else None)


def _per_position(totals: Totals) -> list[Sample]:
    counts = totals.acceptance
    at_depth = counts.accepted_at if counts.knows("accepted_at") else ()
    return [(count, {"position": str(position)}) for position, count in enumerate(at_depth)]


def _finished(totals: Totals) -> list[Sample]:
    reasons = () if totals.told is not None else ("stop", "length", "abort", "error")
    return [(totals.finished[reason], {"finished_reason": reason}) for reason in reasons]


def _told(name: str) -> Callable[[Totals], list[Sample]]:
    return lambda totals: _one(totals.acceptance.told(name))


SERIES = (
    Series("vllm:spec_decode_num_drafts", "Steps with at least one drafted token.", _told("drafts")),
    Series("vllm:spec_decode_num_draft_tokens", "Drafted tokens.", _told("drafted")),
    Series("vllm:spec_decode_num_accepted_tokens", "Accepted tokens.", _told("accepted")),
    Series("vllm:spec_decode_num_accepted_tokens_per_pos", "Accepted tokens per draft position.", _per_position),
    Series("vllm:prompt_tokens", "Prompt tokens of admitted requests.", lambda t: _of_engine(t, t.prompt_tokens)),
    Series("vllm:generation_tokens", "Output tokens.", _told("emitted")),
    Series("vllm:num_preemptions", "Preemptions.", lambda t: _of_engine(t, t.preemptions)),
    Series("vllm:request_success", "Requests that ended, by the reason.", _finished),
    Series("vllm:num_requests_running", "Requests in the batch.", lambda t: _load(t, "running"), counter=False),
    Series("vllm:num_requests_waiting", "Requests waiting.", lambda t: _load(t, "waiting"), counter=False),
    Series("vllm:kv_cache_usage_perc", "KV-cache usage, 1 is full.", lambda t: _one(t.kv_usage), counter=False),
)


def _decided(sampler: Sampler) -> list[Sample]:
    """What trace sampling decided. Everything else here is counted before it."""
    kept = [(sampler.kept[reason], {"decision": reason.value}) for reason in (Reason.RATIO, Reason.PARENT)]
    return [*kept, (sampler.left_out, {"decision": "left_out"})]


def log_line(acceptance: Acceptance, seconds: float) -> str | None:
    """vLLM's log line for the counts of an interval of that length; None where nothing was drafted, as in vLLM."""
    if acceptance.tau is None or not acceptance.drafted or not acceptance.knows("drafted"):
        return None
    accepted, drafted = acceptance.accepted, acceptance.drafted
    per_second = 1 / seconds if seconds > 0 else 0.0
    at_depth = acceptance.accepted_at if acceptance.by_depth else ()  # vLLM has 0 at a depth that nothing proposed
    rates = ", ".join(f"{count / acceptance.drafts:.3f}" for count in at_depth)
    return (
        f"SpecDecoding metrics: Mean acceptance length: {acceptance.tau:.2f}, "
        f"Accepted throughput: {accepted * per_second:.2f} tokens/s, "
        f"Drafted throughput: {drafted * per_second:.2f} tokens/s, "
        f"Accepted: {accepted} tokens, Drafted: {drafted} tokens, "
        f"Per-position acceptance rate: {rates}, "
        f"Avg Draft acceptance rate: {accepted / drafted * 100:.1f}%"
    )


class _LogLines:
    """Writes vLLM's log line once an interval. Time is the records' own, so a replay logs what the run logged."""

    def __init__(self, log: Callable[[str], None], seconds: float) -> None:
        self._log, self._ns = log, int(seconds * 1e9)
        self._start_ns: int | None = None  # of the interval's first record
        self._end_ns = 0  # of its last

    def before(self, record: StepRecord, totals: Totals) -> None:
        """Write the line for the records before this one, where their interval is over."""
        if self._start_ns is not None and record.end_ns - self._start_ns > self._ns:
            self.flush(totals)
        self._start_ns = record.start_ns if self._start_ns is None else self._start_ns
        self._end_ns = record.end_ns

    def flush(self, totals: Totals) -> None:
        """Write the line for what was counted since the last one, and start again."""
        if self._start_ns is not None:
            line = log_line(totals.take(), (self._end_ns - self._start_ns) / 1e9)
            self._start_ns = None
            if line is not None:
                self._log(line)


def answered(accept: str) -> str:
    """What a request with this Accept header is answered with, as such a header.

    OpenMetrics where that is taken: only there are exemplars. With any other escaping than this prometheus_client
    writes `vllm_` for `vllm:` in it.
    """
    taken = (part for part in accept.lower().split(",") if not NEVER.search(part))
    kinds = [part.partition(";")[0].strip() for part in taken]
    return f"{OPENMETRICS}; version=1.0.0; escaping=allow-utf-8" if OPENMETRICS in kinds else PLAIN


def port_taken(host: str, port: int) -> UserError:
    """The error for a port that is taken."""
    return UserError(f"cannot serve metrics on {host}:{port}: choose another port if this one is in use")


class Metrics(Collector):
    """A sink: call it with each StepRecord. Everything is counted here and read from here only when asked for.

    With `log`, vLLM's log line is handed to it for every `seconds` in which something was drafted. `lost` says how many
    records are known to be missing; `sampler` decides whose spans are sent, where not all are.

    With `run`, the Prometheus text has the histograms of its requests too (histograms.py). Their exemplars are
    requests whose spans are sent: `ratio` is their share, None for all.
    """

    def __init__(
        self,
        model: str = "",
        *,
        engine: str = "0",
        log: Callable[[str], None] | None = None,
        seconds: float = LOG_SECONDS,
        lost: Callable[[], int] = lambda: 0,
        sampler: Sampler | None = None,
        run: RunInfo | None = None,
        ratio: float | None = None,
    ) -> None:
        self.totals = Totals()
        self.registry = CollectorRegistry()  # all that the Prometheus text has
        self._labels = {"model_name": model, "engine": engine}
        self._lock = threading.Lock()
        self._lines = _LogLines(log, seconds) if log is not None else None
        self._series: tuple[Series, ...] = (
            *SERIES,
            Series("specscope:lost_records", "Records lost on the way.", lambda _: _one(lost())),
        )
        if sampler is not None:
            text = "Requests decided by trace sampling."
            self._series += (Series("specscope:trace_requests", text, lambda _: _decided(sampler)),)
        self._servers: list[WSGIServer] = []
        self.registry.register(self)
        self._histograms: Callable[[StepRecord], None] = lambda _: None
        if run is not None:
            self._histograms = Histograms(self.registry, self._labels, run, ratio)

    def __call__(self, record: StepRecord) -> None:
        """Count one engine step."""
        with self._lock:
            if self._lines is not None:
                self._lines.before(record, self.totals)
            self.totals.add(record)
        self._histograms(record)

    def collect(self) -> Iterator[Metric]:
        """The series as prometheus_client's families."""
        for series in self._series:
            family = CounterMetricFamily if series.counter else GaugeMetricFamily
            with self._lock:
                samples = [(value, {**self._labels, **labels}) for value, labels in series.read(self.totals)]
            names = list(samples[0][1]) if samples else [*self._labels, "position"]
            metric = family(series.name, series.text, labels=names)
            for value, labels in samples:
                metric.add_metric([labels[name] for name in names], value)
            yield metric

    def page(self, accept: str = "") -> tuple[bytes, str]:
        """All that is in the registry as text, and its content type, for a request with this Accept header."""
        encode, kind = choose_encoder(answered(accept))
        return encode(self.registry), kind

    def serve_prometheus(self, port: int, host: str = "127.0.0.1") -> int:
        """Serve the page over HTTP until `close`; port 0 takes any free one. Returns the port.

        Raises UserError where the port cannot be used.
        """
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
        """Log what is left, and end what this object started."""
        with self._lock:
            if self._lines is not None:
                self._lines.flush(self.totals)
        for server in self._servers:
            server.shutdown()
            server.server_close()
        self._servers = []
