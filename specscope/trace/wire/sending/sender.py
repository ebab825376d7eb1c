"""Spans on their way to an OTLP endpoint: sent on a thread of their own, tried again, at last given up and counted."""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence

from opentelemetry.sdk.trace import ReadableSpan

from specscope.trace.wire.sending.endpoint import TIMEOUT, NotSent, OtlpEndpoint

QUEUED = 2048  # spans that wait, as in the SDK's own processor
UNKNOWN = 2.0  # seconds after which nobody waits any more for an endpoint that has not answered the last try
PAUSE, LONGEST_PAUSE = 0.5, 5.0  # seconds after a failure, twice as many after the next


class Sender:
    """Sends batches in their order.

    While the endpoint answers, `put` waits where too much is queued. While it does not, the oldest spans give way, so
    that one that comes back gets what was queued. `close` waits for what is sent in time and gives up the rest.
    """

    def __init__(self, endpoint: str | None, protocol: str | None = None) -> None:
        """As OtlpEndpoint has it."""
        self.lost: Counter[str] = Counter()  # spans that were not sent, by why
        self._endpoint = OtlpEndpoint(endpoint, protocol)
        self._batches: deque[Sequence[ReadableSpan]] = deque()
        self._sending: Sequence[ReadableSpan] = ()
        self._began = 0.0  # the try that is under way
        self._failure: NotSent | None = None  # of the last try
        self._answers = False  # whether that succeeded
        self._pause = PAUSE
        self._closing = self._ended = False
        self._change = threading.Condition()
        threading.Thread(target=self._run, name="specscope-sender", daemon=True).start()

    @property
    def queued(self) -> int:
        """Spans that wait."""
        return sum(map(len, self._batches))

    def put(self, spans: Sequence[ReadableSpan]) -> None:
        """Take a batch. Waits no longer than an endpoint may take to answer."""
        with self._change:
            self._wait(lambda: self._failure is not None or self.queued + len(spans) <= QUEUED)
            while self._batches and self.queued + len(spans) > QUEUED:
                self._lose(self._batches.popleft())
            self._batches.append(spans)
            self._change.notify_all()

    def close(self) -> None:
        """Send what is queued while the endpoint takes it; what it does not take is counted."""
        with self._change:
            self._closing = True
            self._change.notify_all()
            self._wait(lambda: self._ended)
            if not self._ended:
                self._ended, self._failure = True, None
                self._lose(self._sending, *self._batches)
        self._endpoint.exporter.shutdown()

    def _wait(self, true: Callable[[], bool]) -> None:
        """Wait until it is true, or the try that is under way takes too long."""
        now = time.monotonic()
        while not true() and (left := (self._began if self._sending else now) + self._patience - time.monotonic()) > 0:
            self._change.wait(left)

    @property
    def _patience(self) -> float:
        return TIMEOUT if self._answers else UNKNOWN

    def _lose(self, *batches: Sequence[ReadableSpan]) -> None:
        why = self._failure or f"{self._endpoint.where} did not answer in {self._patience:.0f} s"
        self.lost[str(why)] += sum(map(len, batches))

    def _run(self) -> None:
        while self._next():
            failure = self._endpoint.send(self._sending)
            with self._change:
                self._learn(failure)

    def _next(self) -> bool:
        """Whether there is a batch to try: it waits for one, and for the end of a pause."""
        with self._change:
            self._change.wait_for(lambda: self._failure is None or self._closing, self._pause)
            self._change.wait_for(lambda: self._batches or self._closing)
            self._ended = self._ended or not self._batches
            if not self._ended:
                self._sending, self._began = self._batches.popleft(), time.monotonic()
            self._change.notify_all()
            return not self._ended

    def _learn(self, failure: NotSent | None) -> None:
        """Learn from a try. At the end it is tried again only where an endpoint that answers dropped a connection."""
        if self._ended:
            return
        batch, self._sending = self._sending, ()
        again = self._answers or not self._closing
        self._pause = min(2 * self._pause, LONGEST_PAUSE) if self._failure else PAUSE
        self._failure, self._answers = failure, failure is None
        has_room = self.queued + len(batch) <= QUEUED  # else later ones took its place: it is the oldest
        if failure is not None and failure.passes and again and has_room:
            self._batches.appendleft(batch)
        elif failure is not None:
            rest = tuple(self._batches) if self._closing and failure.passes and failure.status is None else ()
            self._lose(batch, *rest)
            self._batches = deque() if rest else self._batches
        self._change.notify_all()
