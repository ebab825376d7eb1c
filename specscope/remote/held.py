"""The debugger over another engine that a gate holds: it goes forward, one engine step at a time, and never back.

Commands that the engine cannot obey say why, and every stop says how long it waits.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import count as counting
from typing import Any

from specscope.debug.answers import Answer, Stop, StopReason
from specscope.debug.commands import Commands, WhatIf
from specscope.debug.forked import Forked
from specscope.debug.kv_check import KVCheck
from specscope.debug.session import Session
from specscope.debug.views import NodeView
from specscope.errors import UserError
from specscope.trace.history.history import History
from specscope.trace.record.records import StepRecord


class _HeldSession(Session):
    """Moves the engine through the gate. The worker appends to the history, whose last step is the position."""

    def __init__(self, gate: Gate, history: History) -> None:
        super().__init__(history)
        self.gate = gate
        self.interrupted, self.runs_on = lambda: gate.interrupted, True

    @property
    def position(self) -> int:
        return len(self.history.steps) - 1

    @position.setter
    def position(self, position: int) -> None:
        """Ignored: it is the step at which the engine stands, or the last that it ran."""

    def _advance(self) -> StepRecord | None:
        return self.gate.next()

    def cont(self, done: Callable[[StepRecord], Stop | None] = lambda _: None) -> Stop:
        stop = super().cont(done)
        return replace(stop, reason=StopReason.INTERRUPTED) if stop.reason is StopReason.END else stop

    def next(self, count: int = 1) -> Stop:
        """Run engine steps. The engine also stands when it learns how a step ended: that does not count as a step."""
        taken = counting(1)

        def done(record: StepRecord) -> Stop | None:
            return Stop(StopReason.STEP, record.step) if record.requests and next(taken) == count else None

        return self.cont(done)

    def pause(self) -> Stop:
        return self._stop(StopReason.STEP) if self.gate.stands else self.next()

    def goto_step(self, number: int) -> Stop:
        if number <= self.history.last_step:
            self._refuse()
        return self.cont(lambda record: Stop(StopReason.STEP, record.step) if record.step >= number else None)

    def step(self) -> Stop:
        raise UserError(f"{self.gate.engine} stops only in its sampler, not between phases: next runs one engine step")

    def _refuse(self, *words: Any, **named: Any) -> Stop:  # noqa: ANN401
        raise UserError(
            f"{self.gate.engine} cannot go back: it keeps no KV cache and no random state of earlier steps. specscope "
            "debug CAPTURE goes back in a capture"
        )

    goto = reverse_next = reverse_continue = show_branch = _refuse


class _HeldWhatIf(WhatIf):
    def __init__(self, engine: str) -> None:
        self._name = engine

    def fork(self, session: Session, words: Sequence[str]) -> Forked:
        raise UserError(f"{self._name} cannot run a request twice: specscope debug PROMPT forks in our own engine")

    def check_kv(self, session: Session) -> KVCheck:
        what = "KV cache cannot be checked from here: specscope diagnose checks what was computed from it"
        raise UserError(f"{self._name}'s {what}")

    def view(self, session: Session, node: int | None) -> NodeView:
        raise UserError(f"{self._name} shows no whole distributions: specscope debug PROMPT does, in our own engine")


class HeldCommands(Commands):
    def __init__(self, debugger: Any, waits: Callable[[], str]) -> None:  # noqa: ANN401
        """`debugger`: of the engine at the gate. `waits`: how long it may stand, in a line."""
        debugger.catch_up()
        super().__init__(_HeldSession(debugger.gate, debugger.history), _HeldWhatIf(debugger.gate.engine))
        self._gate, self._waits = debugger.gate, waits

    def answer(self, line: str, viewed: int | None = None, request: str = "") -> Answer:
        """As `Commands.answer`, with what the engine did since the last line and how long it still waits."""
        gate = self._gate
        gate.interrupted, expired, gate.expired = False, gate.expired, None
        answer = super().answer(line, viewed, request)
        late = f"{gate.engine} continued by itself after {expired or 0:g} s: pause stops it again"
        text = [*([] if expired is None else [late]), *filter(None, [answer.text])]
        if answer.stop is not None:
            runs = f"{gate.engine} is running and stops at its next step"
            text.append(self._waits() if gate.stands else runs)
        return replace(answer, text="\n".join(text))

    def do_step(self, text: str) -> str:
        """Refused: the engine has no phases to stop between."""
        return self.stopped(self.session.step())


class Gate:
    """`stand` is the worker's side, `open` to `close` the debugger's. All but these two and `interrupt` need `lock`."""

    def __init__(self, engine: str) -> None:
        self.engine = engine
        self.lock = threading.Condition()
        self.controlled = False  # whether it waits at each step for the debugger; else it runs by itself
        self.interrupted = False  # whether the debugger is asked to wait no longer
        self.expired: float | None = None  # after how many seconds the worker last went on by itself
        self.is_open = False  # whether a debugger is there
        self._standing: StepRecord | None = None

    def stand(self, record: StepRecord, seconds: float | None) -> None:
        """Wait at a step until the debugger moves on or leaves, or the time limit ends. On the worker's thread."""
        until = None if seconds is None else time.monotonic() + seconds
        self._standing = record
        self.lock.notify_all()
        try:
            while self._standing is record and self.controlled:
                left = None if until is None else until - time.monotonic()
                if left is not None and left <= 0:
                    self.controlled, self.expired = False, seconds
                    return
                self.lock.wait(left)
        finally:
            if self._standing is record:
                self._standing = None
            self.lock.notify_all()

    @property
    def stands(self) -> bool:
        return self._standing is not None

    def next(self) -> StepRecord | None:
        """Let the engine go on, and wait for the next step at which it stands; None where waiting was broken off."""
        if not self.is_open:
            return None
        self.controlled, self._standing, self.expired = True, None, None
        self.lock.notify_all()
        self.lock.wait_for(lambda: self.stands or self.interrupted or not self.is_open)
        return self._standing

    def interrupt(self) -> None:
        """Stop waiting for a step. The engine stands at the next one that it runs."""
        with self.lock:
            self.interrupted = True
            self.lock.notify_all()

    def open(self) -> None:
        """A debugger attaches. The engine runs on until the debugger moves it."""
        with self.lock:
            self.is_open, self.interrupted, self.expired = True, False, None

    def close(self) -> None:
        with self.lock:
            self.is_open, self.controlled = False, False
            self.lock.notify_all()
