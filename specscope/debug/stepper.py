"""Stepper: runs an engine step by step, and stops it at breakpoints."""

from __future__ import annotations

from typing import Any, Protocol

from specscope.debug.answers import Stop, StopReason
from specscope.debug.breakpoints import Breakpoints
from specscope.trace.history.history import KEPT, History
from specscope.trace.record.records import StepRecord


class Steppable(Protocol):
    """What the debugger asks of an engine; specscope.Engine is one."""

    @property
    def steps(self) -> int:
        """The next step's number."""

    @property
    def current(self) -> Any:  # noqa: ANN401
        """The state of a step that was begun; None between steps."""

    @property
    def busy(self) -> bool:
        """Whether a step would do anything."""

    def step(self) -> StepRecord:
        """Run one step, or what is left of one."""

    def phase(self) -> StepRecord | None:
        """Run the next phase of a step; the record after the last."""

    def rewind(self, step: int) -> None:
        """Go back to the state before that step."""

    def keep_timeline(self) -> Any:  # noqa: ANN401
        """Keep the history that going back needs."""


class Stepper:
    """Appends each step's record to the history and checks the breakpoints against it.

    An engine in its own process runs on this alone. A Session is the debugger's user interface to it.
    """

    def __init__(self, engine: Steppable, history: History, breakpoints: Breakpoints) -> None:
        self.engine, self.history, self.breakpoints = engine, history, breakpoints
        engine.keep_timeline()
        history.limit = history.limit or KEPT

    def advance(self) -> StepRecord | None:
        """Run one step, whatever the breakpoints are; None if nothing is left to run."""
        if not self.engine.busy:
            return None
        record = self.engine.step()
        self.history.append(record)
        return record

    def step(self) -> Stop | None:
        """Run one step: why the run stops after it, None if it goes on."""
        record = self.advance()
        return self._end() if record is None else self.breakpoints.check(record, self.history)

    def phase(self) -> Stop:
        """Run one phase; the breakpoints are checked when the step is complete."""
        if not self.engine.busy:
            return self._end()
        record = self.engine.phase()
        if record is None:
            return Stop(StopReason.PHASE, self.engine.steps, phase=self.engine.current.phases[-1].name)
        self.history.append(record)
        return self.breakpoints.check(record, self.history) or Stop(StopReason.STEP, record.step)

    def _end(self) -> Stop:
        return Stop(StopReason.END, self.history.last_step, moved=False)
