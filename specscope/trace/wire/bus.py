"""The bus: the engine appends a record and goes on; threads of their own hand records to the sinks."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from specscope.trace.record.records import Moved, StepRecord

Sink = Callable[[Any], None]  # of a StepRecord; or, where it follows moves, of that or a Moved

LIMIT = 1024  # records that may wait for a sink
LOSSLESS_LIMIT = 64  # for a lossless sink: what waits must still be written when the program is told to end
POLL_SECONDS = 0.1  # records wait this long at most; waking a thread on each would disturb the engine
QUIET_SECONDS = 0.3  # after so long without a record the engine rests: what sinks have gathered goes out
PROMPT_SECONDS = 0.05  # a prompt sink keeps nothing back for longer


class Subscription:
    """One sink's queue and thread.

    A lossless sink makes the publisher wait when `limit` records are queued, and the wait is counted; another
    drops the oldest record, and counts it. A sink that gathers what it is given has a method `flush`: it is called when
    no record has come for a while, so that nothing is kept back while the engine is paused, stands at a breakpoint or
    has nothing to do. A prompt sink keeps nothing back for longer than PROMPT_SECONDS, and the end of a request not at
    all: its process may be killed as soon as the answer is there. An exception in the sink ends the subscription and is
    kept in `error`.
    """

    def __init__(self, sink: Sink, lossless: bool, limit: int, moves: bool, prompt: bool) -> None:
        self.sink = sink
        self.moves = moves  # whether it is also told where the run goes back
        self.lossless = lossless
        self.prompt = prompt
        self.limit = limit
        self.lost = 0  # records thrown away because the sink was behind
        self.waited_ns = 0  # time the engine waited for the sink
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
        if self.error is not None:
            return
        if len(self._queue) >= self.limit:
            self._make_room()
        self._queue.append(record)
        if self.prompt and isinstance(record, StepRecord) and record.finished:
            self._wake.set()

    def _make_room(self) -> None:
        if not self.lossless:
            self._queue.popleft()
            self.lost += 1
            return
        began = time.perf_counter_ns()
        self._wake.set()
        with self._idle:
            self._idle.wait_for(lambda: len(self._queue) < self.limit or self.error is not None)
        self.waited_ns += time.perf_counter_ns() - began

    def _run(self) -> None:
        while not (self._closing and not self._queue):
            self._wake.wait(PROMPT_SECONDS if self.prompt else POLL_SECONDS)
            self._wake.clear()
            self._busy = True
            try:
                self._drain()
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

    def _drain(self) -> None:
        while self._queue:
            self.sink(self._queue.popleft())
            self._gathered_ns = time.monotonic_ns()
            if self.lossless and len(self._queue) == self.limit - 1:
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
        """Hand over what is queued and end the thread."""
        self._closing = True
        self._wake.set()
        self._thread.join()


class Bus:
    """Publishes records to any number of sinks."""

    def __init__(self) -> None:
        self.subscriptions: list[Subscription] = []
        self._lock = threading.Lock()  # held while a record is handed out, so that none follows the last

    def subscribe(
        self,
        sink: Sink,
        *,
        lossless: bool = False,
        limit: int | None = None,
        moves: bool = False,
        prompt: bool = False,
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
        """Records thrown away over all sinks."""
        return sum(subscription.lost for subscription in self.subscriptions)

    @property
    def waited_ns(self) -> int:
        """Time the engine waited for sinks."""
        return sum(subscription.waited_ns for subscription in self.subscriptions)

    def flush(self) -> None:
        """Wait until every sink has everything published so far."""
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
