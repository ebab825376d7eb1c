"""Spans on their way to an OTLP endpoint: sent on a thread of their own, tried again, at last given up and counted."""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from opentelemetry.sdk.trace import ReadableSpan

from specscope.trace.wire.sending.endpoint import TIMEOUT, UNKNOWN, NotSent, OtlpEndpoint, silence

QUEUED = 2048  # spans that wait, as in the SDK's own processor
TRIES = 6  # of a batch
PAUSE, LONGEST_PAUSE = 0.5, 5.0  # seconds after a failure, twice as many after the next


@dataclass
class _Batch:
    spans: Sequence[ReadableSpan]
    tries: int = 0


class Sender:
    """Sends batches in their order.

    While the endpoint answers, `put` waits where too much is queued. While it does not, the oldest spans give way, so
    that one that comes back soon gets what was queued. `close` waits for what is sent in time and gives up the rest.
    """

    def __init__(self, endpoint: OtlpEndpoint) -> None:
        self.lost: Counter[str] = Counter()  # spans that were not sent, by why
        self._endpoint = endpoint
        self._batches: deque[_Batch] = deque()
        self._queued = 0  # spans in them
        self._sending: _Batch | None = None
        self._began = 0.0  # the try that is under way, or what made it possible
        self._failure: NotSent | None = None  # of the last try
        self._failures = 0  # since the last success
        self._answers = False  # whether any batch has arrived
        self._closing = self._ended = self._abandoned = False
        self._change = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="specscope-sender", daemon=True)
        self._thread.start()

    def put(self, spans: Sequence[ReadableSpan]) -> None:
        """Take a batch. Waits no longer than an endpoint may take to answer."""
        with self._change:
            self._wait(lambda: self._failure is not None or self._queued + len(spans) <= QUEUED)
            while self._batches and self._queued + len(spans) > QUEUED:
                self._lose(self._take())
            self._batches.append(_Batch(spans))
            self._queued += len(spans)
            if self._sending is None:
                self._began = time.monotonic()
            self._change.notify_all()

    def close(self) -> None:
        """Send what is queued while the endpoint takes it; what it does not take is counted."""
        with self._change:
            self._closing = True
            if self._sending is None:
                self._began = time.monotonic()
            self._change.notify_all()
            self._wait(lambda: self._ended)
            if not self._ended:
                self._abandoned = True
                self._failure = silence(self._endpoint.where, time.monotonic() - self._began)
                self._lose_all()
        self._endpoint.close()

    @property
    def _patience(self) -> float:
        """Seconds that a try may take before others stop waiting for it."""
        return TIMEOUT if self._answers and self._failure is None else UNKNOWN

    def _wait(self, true: Callable[[], bool]) -> None:
        """Wait until it is true, or the try that is under way takes too long."""
        while not true() and (left := self._began + self._patience - time.monotonic()) > 0:
            self._change.wait(left)

    def _run(self) -> None:
        while (batch := self._next()) is not None:
            self._end(batch, self._endpoint.send(batch.spans))

    def _next(self) -> _Batch | None:
        """The batch to try, once there is one and the pause is over; None where there will be none."""
        with self._change:
            if self._failure is not None:
                pause = min(PAUSE * 2 ** (self._failures - 1), LONGEST_PAUSE)
                self._change.wait_for(lambda: self._closing, pause)
            self._change.wait_for(lambda: bool(self._batches) or self._closing)
            if self._batches and not self._abandoned:
                self._sending, self._began = self._take(), time.monotonic()
            else:
                self._ended = True
            self._change.notify_all()
            return self._sending

    def _end(self, batch: _Batch, failure: NotSent | None) -> None:
        """Learn from a try."""
        with self._change:
            self._sending, self._began = None, time.monotonic()
            if self._abandoned:
                return
            batch.tries += 1
            again = failure is not None and failure.passes and self._goes_on(batch)
            self._failure = failure
            self._failures = 0 if failure is None else self._failures + 1
            self._answers = self._answers or failure is None
            if again:
                self._batches.appendleft(batch)
                self._queued += len(batch.spans)
            elif failure is not None:
                self._lose(batch)
                if self._closing and failure.passes and failure.status is None:
                    self._lose_all()
            self._change.notify_all()

    def _goes_on(self, batch: _Batch) -> bool:
        """Whether a batch is tried again: at the end only where an endpoint that answered has dropped a connection."""
        if self._closing:
            return self._answers and self._failure is None
        return batch.tries < TRIES and self._queued + len(batch.spans) <= QUEUED

    def _take(self) -> _Batch:
        batch = self._batches.popleft()
        self._queued -= len(batch.spans)
        return batch

    def _lose(self, batch: _Batch) -> None:
        failure = self._failure or silence(self._endpoint.where, self._patience)
        self.lost[failure.text] += len(batch.spans)

    def _lose_all(self) -> None:
        if self._sending is not None:
            self._lose(self._sending)
        while self._batches:
            self._lose(self._take())
