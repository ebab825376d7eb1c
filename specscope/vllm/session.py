"""The debugger's session over vLLM: it goes forward, one engine step at a time, and never back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import count as counting

from specscope.debug.answers import Stop, StopReason
from specscope.debug.session import Session
from specscope.errors import UserError
from specscope.trace.history.history import History, RequestHistory
from specscope.trace.record.records import StepRecord
from specscope.vllm.gate import Gate

NO_WAY_BACK = (
    "vLLM cannot go back: it keeps no KV cache and no random state of earlier steps. "
    "specscope debug --over CAPTURE goes back over what was recorded"
)


class VllmSession(Session):
    """Moves vLLM through the gate. The worker appends to the history; what stands there last is where it is."""

    def __init__(self, gate: Gate, history: History) -> None:
        super().__init__(history)
        self.gate = gate
        self.interrupted = lambda: gate.interrupted

    @property
    def position(self) -> int:
        """The step at which vLLM stands, or the last that it ran."""
        return len(self.history.steps) - 1

    @position.setter
    def position(self, position: int) -> None:
        """It follows from the history."""

    def _advance(self) -> StepRecord | None:
        return self.gate.next()

    def _run(self, done: Callable[[StepRecord], Stop | None] = lambda _: None) -> Stop:
        stop = super()._run(done)
        return replace(stop, reason=StopReason.INTERRUPTED) if stop.reason is StopReason.END else stop

    def next(self, count: int = 1) -> Stop:
        """Run engine steps. vLLM also stands where it is told how a step ended: that is no step more."""
        taken = counting(1)

        def done(record: StepRecord) -> Stop | None:
            return Stop(StopReason.STEP, record.step) if record.requests and next(taken) == count else None

        return self._run(done)

    def pause(self) -> Stop:
        """Stop at the next step, where it does not stand already."""
        return self._stop(StopReason.STEP) if self.gate.stands else self.next()

    # What vLLM cannot do

    def step(self) -> Stop:
        """It stands in its sampler alone."""
        raise UserError("vLLM stops in its sampler only, not between phases: next runs one engine step")

    def goto(self, position: int) -> Stop:
        """Not back."""
        raise UserError(NO_WAY_BACK)

    def goto_step(self, number: int) -> Stop:
        """On to a later step."""
        if number <= self.history.last_step:
            raise UserError(NO_WAY_BACK)
        return self._run(lambda record: Stop(StopReason.STEP, record.step) if record.step >= number else None)

    def _runs(self, request: RequestHistory) -> bool:
        return request.end is None

    def reverse_next(self, count: int = 1) -> Stop:
        """Not back."""
        raise UserError(NO_WAY_BACK)

    def reverse_step(self) -> Stop:
        """Not back."""
        raise UserError(NO_WAY_BACK)

    def reverse_continue(self) -> Stop:
        """Not back."""
        raise UserError(NO_WAY_BACK)

    def show_branch(self, number: int) -> Stop:
        """It has one."""
        raise UserError("vLLM's run has one branch: it cannot go back")
