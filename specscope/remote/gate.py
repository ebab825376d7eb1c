"""Gate: where another engine's worker waits for a debugger, and where the debugger waits for its next step.

One lock for both: whoever holds it may use the history. Waiting lets go of it, and of the interpreter's lock.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from specscope.errors import UserError
from specscope.trace.record.records import StepRecord


class Gate:
    """`stand` is the worker's side, `open` to `close` the debugger's. All but these two and `interrupt` need `lock`."""

    def __init__(self, engine: str) -> None:
        """`engine`: its name, for what is said of it."""
        self.engine = engine
        self.lock = threading.Condition()
        self.controlled = False  # whether it waits at each step for the debugger; else it runs by itself
        self.interrupted = False  # whether the debugger is asked to wait no longer
        self.expired: float | None = None  # after how many seconds the worker last went on by itself
        self._closed = True  # whether no debugger is there
        self._standing: StepRecord | None = None
        self._tasks: deque[tuple[Callable[[], Any], Future[Any]]] = deque()

    def stand(self, record: StepRecord, seconds: float | None) -> None:
        """Wait at a step until the debugger moves on or leaves, or the time limit ends. On the worker's thread."""
        until = None if seconds is None else time.monotonic() + seconds
        self._standing = record
        self.lock.notify_all()
        try:
            while self._standing is record and self.controlled:
                self._work()
                left = None if until is None else until - time.monotonic()
                if left is not None and left <= 0:
                    self.controlled, self.expired = False, seconds
                    return
                self.lock.wait(left)
        finally:
            if self._standing is record:
                self._standing = None
            self.lock.notify_all()

    def _work(self) -> None:
        """Do what the debugger has asked for."""
        while self._tasks:
            task, future = self._tasks.popleft()
            try:
                future.set_result(task())
            except Exception as error:
                future.set_exception(error)
            self.lock.notify_all()

    @property
    def is_open(self) -> bool:
        """Whether a debugger is there."""
        return not self._closed

    @property
    def stands(self) -> bool:
        """Whether the engine waits at a step."""
        return self._standing is not None

    def ask(self, task: Callable[[], Any]) -> Any:  # noqa: ANN401
        """Run something on the worker's thread while it stands: tensors are used on that thread only."""
        if not self.stands:
            raise UserError(f"{self.engine} is running: pause stops it at its next step")
        future: Future[Any] = Future()
        self._tasks.append((task, future))
        self.lock.notify_all()
        self.lock.wait_for(lambda: future.done() or not self.stands)
        if not future.done():
            self._tasks.clear()
            raise UserError(f"{self.engine} went on before it could answer")
        return future.result()

    def next(self) -> StepRecord | None:
        """Let the engine go on, and wait for the next step at which it stands; None where waiting was broken off."""
        if self._closed:
            return None
        self.controlled, self._standing, self.expired = True, None, None
        self.lock.notify_all()
        self.lock.wait_for(lambda: self.stands or self.interrupted or self._closed)
        return self._standing

    def interrupt(self) -> None:
        """Stop waiting for a step. The engine stands at the next one that it runs."""
        with self.lock:
            self.interrupted = True
            self.lock.notify_all()

    def open(self) -> None:
        """A debugger attaches. The engine runs on until the debugger moves it."""
        with self.lock:
            self._closed, self.interrupted, self.expired = False, False, None

    def close(self) -> None:
        """The debugger detaches, and the engine runs on."""
        with self.lock:
            self._closed, self.controlled = True, False
            self.lock.notify_all()
