"""Connects an engine's bus to its outputs: a capture file, an OTLP endpoint, metrics."""

from __future__ import annotations

import dataclasses
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from specscope.errors import UserError
from specscope.trace.files import Existing
from specscope.trace.history.wording import plural
from specscope.trace.record.params import SamplingParams
from specscope.trace.record.privacy import Privacy
from specscope.trace.record.records import FinishReason, RequestEnd, RequestInfo, RunInfo, StepRecord
from specscope.trace.record.vocabulary import Vocabulary
from specscope.trace.wire.bus import Bus, Subscription
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


def check_metrics_port(port: int) -> None:
    """Refuse a port that others have, before a model is loaded. Raises UserError."""
    try:
        socket.create_server(("127.0.0.1", port)).close()
    except OSError:
        from specscope.trace.metrics import port_taken

        raise port_taken("127.0.0.1", port) from None


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
        log: Callable[[str], None] | None = None,
        engine: str = "0",
        tell: Callable[[str], None] = lambda line: None,
    ) -> None:
        """`params`: the default ones, None where they are not known; `engine`: the metrics' label.

        `tell`: hears of steps that are dropped, when they are.
        """
        run = dataclasses.replace(run, privacy=options.privacy)
        if params is not None:
            run = dataclasses.replace(run, params=params.to_dict(), seed=params.seed)
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
            self._open_metrics(options, run, log, engine)
            if options.capture is not None:  # last: an older capture is replaced when nothing can fail any more
                self._open_capture(options.capture, options, run, vocabulary, tell)
        except BaseException:
            self.close()
            raise

    def _open_capture(
        self, path: str, options: OutputOptions, run: RunInfo, vocabulary: Vocabulary, tell: Callable[[str], None]
    ) -> None:
        on_full = tell if options.drops else None
        writer = self._writer = CaptureWriter(
            path, run, vocabulary, existing=options.existing, on_full=on_full, service=options.service
        )
        self._bus.subscribe(writer, lossless=True)
        self._closers.append(writer.close)

    def _open_network(self, options: OutputOptions, run: RunInfo, vocabulary: Vocabulary) -> None:
        from specscope.trace.wire.sending import Sender, SpanSink, endpoint_from_environment

        wanted = options.otlp_endpoint is not None or endpoint_from_environment()
        if not wanted or options.level is SpanLevel.OFF:
            return
        try:
            sender = Sender(options.otlp_endpoint, options.otlp_protocol)
        except ValueError as error:  # of the OTEL_* variables
            raise UserError(f"cannot make the OTLP exporter: {error}") from error
        spans = self._spans = SpanSink(sender, run, vocabulary, options.level, options.service, options.ratio)
        self._network = self._bus.subscribe(spans)
        self._closers.append(spans.close)

    def _open_metrics(
        self, options: OutputOptions, run: RunInfo, log: Callable[[str], None] | None, engine: str
    ) -> None:
        if options.metrics_port is None and log is None:
            return
        from specscope.trace.metrics import Metrics

        metrics = Metrics(
            run.target,
            engine=engine,
            log=log,
            lost=lambda: self._bus.lost,
            sampler=None if self._spans is None else self._spans.sampler,
            run=run if options.metrics_port is not None else None,
            ratio=options.ratio,
        )
        self._bus.subscribe(metrics)
        self._closers.append(metrics.close)
        if options.metrics_port is not None:
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
        lines = [] if self._writer is None else self._writer.losses()
        if self._network is not None and self._network.lost:
            lines.append(f"{plural(self._network.lost, 'step')} not sent: the OTLP endpoint was too slow")
        return lines if self._spans is None else [*lines, *self._spans.losses()]

    @property
    def sampled(self) -> str:
        """How many requests were kept, and why; "" where all are."""
        return "" if self._spans is None else self._spans.sampled

    @property
    def captured(self) -> str:
        """The capture's file, "" where there is none; after `close` also where it was deleted during the run."""
        return "" if self._writer is None or self._writer.is_gone else str(self._writer.path)

    @property
    def renamed(self) -> str:
        """A note that the capture has another name than requested; "" where it has not."""
        return "" if self._writer is None else self._writer.renamed

    @property
    def code(self) -> int:
        """After `close`: the exit code of a run, 1 where its capture lacks something."""
        return int(self._writer is not None and bool(self._writer.losses()))


@dataclass
class _Open:
    info: RequestInfo
    step: int  # in which it was admitted
    output: list[tuple[int, list[int]]] = field(default_factory=list)  # by step

    def end(self, now_ns: int) -> RequestEnd:
        """The request's end if it were cancelled now."""
        tokens = [token for _, emitted in self.output for token in emitted]
        return RequestEnd(self.info, now_ns, FinishReason.CANCELLED, "", np.array(tokens, np.int32))


class OpenRequests:
    """A sink that knows the requests that have not ended, so that their ends are written whatever ends the run.

    An engine that is told to end cancels its requests and says so in a last step. One that cannot (it failed, its
    process was killed, or a step takes longer than the process has left) says nothing: then `ends` does.
    """

    def __init__(self) -> None:
        self._open: dict[str, _Open] = {}
        self._last: StepRecord | None = None

    def __call__(self, record: StepRecord) -> None:
        """Take a step."""
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
        now_ns = max(time.time_ns(), self._last.end_ns)
        return replace(
            self._last,
            step=self._last.step + 1,
            phases=tuple(replace(phase, start_ns=now_ns, end_ns=now_ns) for phase in self._last.phases),
            running=0,
            waiting=0,
            admitted=(),
            requests=(),
            preempted=(),
            finished=tuple(known.end(now_ns) for known in self._open.values()),
            passes=(),
            device_ns=(),
            after=None,
            rewound=False,
            budget=None,
            flight=None,
            queried=0,
        )
