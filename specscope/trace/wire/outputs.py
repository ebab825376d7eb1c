"""An engine's bus, and its outputs: a capture file, an OTLP endpoint, metrics.

The engine appends a record and goes on; threads of their own hand records to the sinks.
"""

from __future__ import annotations

import dataclasses
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from specscope.errors import UserError
from specscope.trace.files import Existing
from specscope.trace.history.interval import NOTHING
from specscope.trace.history.wording import plural
from specscope.trace.record.params import SamplingParams
from specscope.trace.record.privacy import Privacy
from specscope.trace.record.records import FinishReason, Moved, RequestEnd, RequestInfo, RunInfo, StepRecord
from specscope.trace.record.vocabulary import Vocabulary
from specscope.trace.wire.capture import CaptureWriter
from specscope.trace.wire.spans import SpanLevel

if TYPE_CHECKING:
    from specscope.trace.wire.sending import SpanSink


@dataclass(frozen=True)
class OutputOptions:
    """Where records go besides the screen. Filled from flags."""

    capture: str | None
    otlp_endpoint: str | None
    otlp_protocol: str | None
    level: SpanLevel
    metrics_port: int | None
    privacy: Privacy = Privacy.EVERYTHING
    ratio: float | None = None  # of requests whose spans are sent; None: of all
    existing: Existing = Existing.REPLACE  # what becomes of an older capture
    drops: bool = False  # whether steps are dropped where the capture's disk is full: else the run ends
    service: str = ""  # the service's name in spans; "" leaves it to the OTEL_* variables
    model: str | None = None  # the model's name in metrics; None: the target's


def check_metrics_port(port: int) -> None:
    """Refuse a port that others have, before a model is loaded. Raises UserError."""
    try:
        socket.create_server(("127.0.0.1", port)).close()
    except OSError:
        from specscope.trace.metrics import port_taken

        raise port_taken("127.0.0.1", port) from None


ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")


def named_endpoint() -> str | None:
    """The endpoint that variables name; None also where OpenTelemetry's own variables switch sending off."""
    off = {"OTEL_SDK_DISABLED": "true", "OTEL_TRACES_EXPORTER": "none"}
    if any(os.environ.get(name, "").strip().lower() == value for name, value in off.items()):
        return None
    return next(filter(None, map(os.environ.get, ENDPOINTS)), None)


class Outputs:
    """The sinks that the flags asked for. Opened before the run begins, so that a bad path or port fails first.

    The capture is lossless: the engine waits when it is behind. The network may drop, and the drops are counted.
    Metrics and the capture have everything: trace sampling is of spans that are sent.
    """

    def __init__(
        self,
        options: OutputOptions,
        bus: Bus,
        run: RunInfo,
        vocabulary: Vocabulary,
        params: SamplingParams | None,
        engine: str = "0",
        tell: Callable[[str], None] = lambda line: None,
    ) -> None:
        """`params`: the default ones, where known; `engine`: the metrics' label. `tell` hears of dropped steps."""
        run = dataclasses.replace(run, privacy=options.privacy)
        if params is not None:
            run = dataclasses.replace(run, params=params.to_dict(), seed=params.seed)
        self.captured = ""  # the capture's file; after `close` not where that was deleted during the run
        self.renamed = ""  # a note that it has another name than requested
        self.sampled = ""  # after `close`: how many requests' spans were kept, and why, where not all were
        self.code = 0  # likewise: the exit code of a run, 1 where its capture lacks something
        self._bus = bus
        self._closers: list[Callable[[], None]] = []
        self._network: Subscription | None = None
        self._spans: SpanSink | None = None
        self._writer: CaptureWriter | None = None
        self._running = OpenRequests()
        self._closing = threading.Lock()
        bus.subscribe(self._running, lossless=True)
        try:
            self._open_network(options, run, vocabulary)
            self._open_metrics(options, run, engine)
            if options.capture is not None:  # last: an older capture is replaced when nothing can fail any more
                existing, on_full = options.existing, tell if options.drops else None
                self._writer = CaptureWriter(
                    options.capture, run, vocabulary, existing=existing, on_full=on_full, service=options.service
                )
                self.captured, self.renamed = str(self._writer.path), self._writer.renamed
                bus.subscribe(self._writer, lossless=True)
                self._closers.append(self._writer.close)
        except BaseException:
            self.close()
            raise

    def _open_network(self, options: OutputOptions, run: RunInfo, vocabulary: Vocabulary) -> None:
        from specscope.trace.wire.sending import Sender, SpanSink

        if options.level is SpanLevel.OFF or (options.otlp_endpoint is None and named_endpoint() is None):
            return
        try:
            sender = Sender(options.otlp_endpoint, options.otlp_protocol)
        except ValueError as error:  # of the OTEL_* variables
            raise UserError(f"cannot make the OTLP exporter: {error}") from error
        spans = self._spans = SpanSink(sender, run, vocabulary, options.level, options.service, options.ratio)
        self._network = self._bus.subscribe(spans)
        self._closers.append(spans.close)

    def _open_metrics(self, options: OutputOptions, run: RunInfo, engine: str) -> None:
        if options.metrics_port is None:
            return
        from specscope.trace.metrics import Metrics

        model, lost = options.model or run.target, lambda: self._bus.lost
        metrics = Metrics(model, engine=engine, lost=lost, run=run, ratio=options.ratio)
        self._bus.subscribe(metrics)
        self._closers.append(metrics.close)
        metrics.serve_prometheus(options.metrics_port)

    def close(self) -> list[str]:
        """Flush the bus, close every sink; what was lost, a line each. Raises the first error of the capture.

        Requests that the engine has not ended are cancelled. May be called again, and from any thread.
        """
        with self._closing:
            failed: Exception | None = None
            for close in (lambda: self._bus.close(self._running.ends), *self._closers):
                try:
                    close()
                except Exception as error:
                    failed = failed or error
            self._closers = []
        if failed is not None:
            raise failed
        lines = []
        if self._writer is not None:
            lines = self._writer.losses()
            self.captured, self.code = "" if self._writer.is_gone else self.captured, int(bool(lines))
        if self._network is not None and self._network.lost:
            lines.append(f"{plural(self._network.lost, 'step')} not sent: the OTLP endpoint was too slow")
        if self._spans is not None:
            self.sampled = self._spans.sampled
            lines += self._spans.losses()
        return lines


@dataclass
class _Open:
    info: RequestInfo
    step: int  # in which it was admitted
    output: list[tuple[int, list[int]]] = field(default_factory=list)  # by step


class OpenRequests:
    """A sink that knows the requests that have not ended, so that their ends are written whatever ends the run.

    An engine that is told to end cancels its requests and says so in a last step. One that cannot (it failed, its
    process was killed, or a step takes longer than the process has left) says nothing: then `ends` does.
    """

    def __init__(self) -> None:
        self._open: dict[str, _Open] = {}
        self._last: StepRecord | None = None

    def __call__(self, record: StepRecord) -> None:
        if record.after is not None:  # a branch begins, and what came later belongs to another one
            self._open = {name: known for name, known in self._open.items() if known.step <= record.after}
            for each in self._open.values():
                each.output = [(step, emitted) for step, emitted in each.output if step <= record.after]
        for info in record.admitted:
            self._open[info.id] = _Open(info, record.step)
        for part in record.requests:
            if (known := self._open.get(part.request)) is not None:
                known.output.append((record.step, part.output()))
        for end in record.finished:
            self._open.pop(end.info.id, None)
        self._last = record

    def ends(self) -> StepRecord | None:
        """The step that the engine still owes: nothing runs, every open request is cancelled. None for no request."""
        if self._last is None or not self._open:
            return None
        last, now_ns, ends = self._last, max(time.time_ns(), self._last.end_ns), []
        for known in self._open.values():
            output = np.array([token for _, emitted in known.output for token in emitted], np.int32)
            ends.append(RequestEnd(known.info, now_ns, FinishReason.CANCELLED, "", output))
        stay = ("blocks_used", "blocks_free", "blocks_cached", "speculation", "speculation_off", "branch")
        phases = tuple(replace(phase, start_ns=now_ns, end_ns=now_ns) for phase in last.phases)
        told = {**NOTHING, **{name: getattr(last, name) for name in stay}, "finished": tuple(ends)}
        return StepRecord(last.step + 1, phases, **told)


Sink = Callable[[Any], None]  # of a StepRecord; or, where it follows moves, of that or a Moved

LIMIT = 1024  # records that may wait for a sink
LOSSLESS_LIMIT = 64  # for a lossless sink: what waits must still be written when the program is told to end
POLL_SECONDS = 0.1  # records wait this long at most; waking a thread on each would disturb the engine
QUIET_SECONDS = 0.3  # after so long without a record the engine rests: what sinks have gathered goes out
PROMPT_SECONDS = 0.05  # a prompt sink keeps nothing back for longer


class Subscription:
    """One sink's queue and thread.

    A lossless sink makes the publisher wait when `limit` records are queued; another drops the oldest, and counts it.
    A sink that gathers what it is given has a method `flush`: it is called when no record has come for a while, so that
    nothing is kept back while the engine is paused or has nothing to do. A prompt sink keeps nothing back for longer
    than PROMPT_SECONDS, and the end of a request not at all: its process may be killed as soon as the answer is there.
    An exception in the sink ends the subscription and is kept in `error`.
    """

    def __init__(self, sink: Sink, lossless: bool, limit: int, moves: bool, prompt: bool) -> None:
        self.sink = sink
        self.moves = moves  # whether it is also told where the run goes back
        self.lossless = lossless
        self.prompt = prompt
        self.limit = limit
        self.lost = 0  # records thrown away because the sink was behind
        self.error: Exception | None = None
        self._queue: deque[StepRecord | Moved] = deque()
        self._wake = threading.Event()  # set to end the wait early: on flush, on close, when the queue is full
        self._idle = threading.Condition()
        self._closing = False
        self._busy = False
        self._gathered_ns = 0  # when the sink last took a record, 0 where nothing is to be flushed
        self._thread = threading.Thread(target=self._run, name="specscope-sink", daemon=True)
        self._thread.start()

    def put(self, record: StepRecord | Moved) -> None:
        """Queue a record; called on the engine's thread."""
        if self.error is not None or self._closing:
            return
        if len(self._queue) >= self.limit and not self.lossless:
            self._queue.popleft()
            self.lost += 1
        elif len(self._queue) >= self.limit:
            self._wake.set()
            with self._idle:
                self._idle.wait_for(lambda: len(self._queue) < self.limit or self.error is not None)
        self._queue.append(record)
        if self.prompt and isinstance(record, StepRecord) and record.finished:
            self._wake.set()

    def _run(self) -> None:
        while not (self._closing and not self._queue):
            self._wake.wait(PROMPT_SECONDS if self.prompt else POLL_SECONDS)
            self._wake.clear()
            self._busy = True
            try:
                while self._queue:
                    self.sink(self._queue.popleft())
                    self._gathered_ns = time.monotonic_ns()
                    if self.lossless and len(self._queue) == self.limit - 1:
                        with self._idle:
                            self._idle.notify_all()
                quiet = 0.0 if self.prompt else QUIET_SECONDS
                if self._gathered_ns and time.monotonic_ns() - self._gathered_ns >= quiet * 1e9:
                    self._gathered_ns = 0
                    getattr(self.sink, "flush", lambda: None)()
            except Exception as error:
                self.error = error
                self._queue.clear()
                self._gathered_ns = 0
            self._busy = False
            with self._idle:
                self._idle.notify_all()

    def flush(self) -> None:
        """Wait until everything queued so far was handed over."""
        self._wake.set()
        with self._idle:
            while (self._queue or self._busy) and self._thread.is_alive():
                self._wake.set()
                self._idle.wait(POLL_SECONDS)

    def close(self) -> None:
        self._closing = True
        self._wake.set()
        self._thread.join()


class Bus:
    def __init__(self) -> None:
        self.subscriptions: list[Subscription] = []
        self._lock = threading.Lock()  # held while a record is handed out, so that none follows the last

    def subscribe(
        self, sink: Sink, *, lossless: bool = False, limit: int | None = None, moves: bool = False, prompt: bool = False
    ) -> Subscription:
        """Add a sink, which is called on a thread of its own. `moves`: it follows the run's position."""
        subscription = Subscription(sink, lossless, limit or (LOSSLESS_LIMIT if lossless else LIMIT), moves, prompt)
        self.subscriptions.append(subscription)
        return subscription

    def publish(self, record: StepRecord | Moved) -> None:
        """Queue a record for every sink. Raises what a lossless sink failed with: its evidence would be lost."""
        with self._lock:
            for subscription in self.subscriptions:
                if subscription.moves or isinstance(record, StepRecord):
                    subscription.put(record)
                if subscription.lossless and subscription.error is not None:
                    raise subscription.error

    @property
    def lost(self) -> int:
        return sum(subscription.lost for subscription in self.subscriptions)

    def flush(self) -> None:
        for subscription in self.subscriptions:
            subscription.flush()

    def close(self, last: Callable[[], StepRecord | None] = lambda: None) -> None:
        """Flush and end all subscriptions; raises the first error of a lossless sink.

        `last`: called when everything has been handed over; may give one more record. What comes meanwhile is dropped.
        """
        with self._lock:
            ending, self.subscriptions = self.subscriptions, []
        for subscription in ending:
            subscription.flush()
        if (record := last()) is not None:
            for subscription in ending:
                subscription.put(record)
        for subscription in ending:
            subscription.close()
        failed = [s.error for s in ending if s.lossless and s.error is not None]
        if failed:
            raise failed[0]
