"""EngineThread: one thread steps the engine; others hand it work to do between steps."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, TypeVar

from specscope.errors import UserError
from specscope.trace.record.records import StepRecord

if TYPE_CHECKING:
    from specscope.engine.engine import Engine

T = TypeVar("T")
LOOK_SECONDS = 0.1  # between two looks of a debugger that waits for work


class EngineThread:
    """Runs the engine until `stop`. `told` hears of each step, and `ended` of the end; both on this thread."""

    def __init__(
        self, engine: Engine, told: Callable[[StepRecord], None], ended: Callable[[Exception | None], None]
    ) -> None:
        self.engine = engine
        self.held = False  # whether a debugger moves the engine: it does not run by itself then
        self.stopping = False
        self.also: list[Callable[[StepRecord], None]] = []  # who else hears of each step
        self._told, self._ended = told, ended
        self._work: SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="specscope-engine", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def call(self, work: Callable[[], T]) -> Future[T]:
        """Have something done on the engine's thread, between two steps."""
        future: Future[T] = Future()
        self._work.put((work, future))
        return future

    def stop(self, seconds: float) -> bool:
        """End what runs as cancelled, tell of it, and end the thread; False where that takes longer."""
        self.stopping = True
        self._work.put(None)
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def advance(self) -> StepRecord:
        """One step, told. On the engine's thread."""
        record = self.engine.step()
        self.tell(record)
        return record

    def tell(self, record: StepRecord) -> None:
        """A step is whole: whoever waits for it hears of it."""
        self._told(record)
        for hear in self.also:
            hear(record)

    def take(self, seconds: float | None) -> None:
        """Do the work that is there; with none, wait so long for some, and for ever with None."""
        try:
            one = self._work.get(timeout=seconds) if seconds is None or seconds > 0 else self._work.get_nowait()
            while True:
                if one is not None:
                    _do(*one)
                one = self._work.get_nowait()
        except Empty:
            return

    def wait_for_work(self, given_up: Callable[[], bool]) -> bool:
        """Whether the engine has something to run: waits for it until asked not to. For a debugger, on this thread."""
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
        self._refuse()
        self._ended(error)

    def _refuse(self) -> None:
        """Nothing waits for an engine that has ended."""
        while True:
            try:
                one = self._work.get_nowait()
            except Empty:
                return
            if one is not None:
                one[1].set_exception(UserError("the engine has stopped"))


def _do(work: Callable[[], Any], future: Future[Any]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(work())
    except Exception as error:
        future.set_exception(error)
