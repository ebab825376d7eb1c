"""EngineThread: one thread steps the engine; others hand it work to do between steps."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, TypeVar

from specscope.errors import UserError
from specscope.trace.record.records import StepRecord

if TYPE_CHECKING:
    from specscope.engine.engine import Engine

T = TypeVar("T")
LOOK_SECONDS = 0.1  # between two checks by a debugger that waits for work


class EngineThread:
    """Runs the engine until `stop`. `on_step` is called with each step, `ended` at the end; both on this thread."""

    def __init__(
        self, engine: Engine, on_step: Callable[[StepRecord], None], ended: Callable[[Exception | None], None]
    ) -> None:
        self.engine = engine
        self.held = False  # whether a debugger drives the engine: it does not run by itself then
        self.stopping = False
        self.also = [on_step]  # what is called with each step
        self._ended = ended
        self._work: SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="specscope-engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def call(self, work: Callable[[], T]) -> Future[T]:
        """Run something on the engine's thread, between two steps."""
        future: Future[T] = Future()
        self._work.put((work, future))
        return future

    def stop(self, seconds: float) -> None:
        """Cancel what runs, report it, and end the thread; waits up to `seconds` for that."""
        self.stopping = True
        self._work.put(None)
        self._thread.join(seconds)

    def advance(self) -> StepRecord:
        """Run one step and report it. On the engine's thread."""
        record = self.engine.step()
        self.tell(record)
        return record

    def tell(self, record: StepRecord) -> None:
        """Report a complete step to all callbacks."""
        for hear in self.also:
            hear(record)

    def take(self, seconds: float | None) -> None:
        """Do the work that is queued; with none, wait up to `seconds` for some, or for ever where that is None."""
        for work, future in self._queued(seconds):
            try:
                future.set_result(work())
            except Exception as error:
                future.set_exception(error)

    def _queued(self, seconds: float | None) -> Iterator[tuple[Callable[[], Any], Future[Any]]]:
        try:
            job = self._work.get(timeout=seconds) if seconds is None or seconds > 0 else self._work.get_nowait()
            while True:
                if job is not None and job[1].set_running_or_notify_cancel():
                    yield job
                job = self._work.get_nowait()
        except Empty:
            return

    def wait_for_work(self, given_up: Callable[[], bool]) -> bool:
        """Whether the engine has something to run; waits for it until `given_up`. For a debugger, on this thread."""
        self.take(0)
        while not (self.engine.busy or self.stopping or given_up()):
            self.take(LOOK_SECONDS)
        return self.engine.busy and not self.stopping

    def _run(self) -> None:
        error: Exception | None = None
        try:
            while not self.stopping:
                self.take(0 if self.engine.busy and not self.held else None)
                if self.engine.busy and not self.held and not self.stopping:
                    self.advance()
            self.engine.cancel_all()
            while self.engine.busy:
                self.advance()
        except Exception as failed:
            error = failed
        self.stopping = True
        for _, future in self._queued(0):
            future.set_exception(UserError("the engine has stopped"))
        self._ended(error)
