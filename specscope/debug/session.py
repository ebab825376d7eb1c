"""Session: stops, steps, goes back and looks, over a live engine or a capture alike.

Over an engine it runs steps and rewinds; over a capture the same commands move a cursor. Everything it shows comes from
the records. It is synchronous: a command returns when the run has stopped.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import count as counting
from typing import Any, Protocol

from specscope.debug.answers import Stop, StopReason
from specscope.debug.breakpoints import Breakpoints, EventKind, types_of
from specscope.errors import UserError
from specscope.trace.history.conditions import Expression
from specscope.trace.history.history import KEPT, History, RequestHistory
from specscope.trace.record.records import RequestStep, StepRecord
from specscope.trace.words import StepFacts


class Steppable(Protocol):
    """What the debugger asks of an engine; specscope.Engine is one."""

    @property
    def steps(self) -> int: ...  # the next step's number
    @property
    def current(self) -> Any: ...  # noqa: ANN401 - the state of a step that was begun; None between steps
    @property
    def busy(self) -> bool: ...  # whether a step would do anything
    def step(self) -> StepRecord: ...  # run one, or what is left of one
    def phase(self) -> StepRecord | None: ...  # run the next phase; the record after the last
    def rewind(self, step: int) -> None: ...  # to the state before that step
    def keep_timeline(self) -> Any: ...  # noqa: ANN401 - the history that going back needs


class Session:
    """A run, the place in it, and what moves it. `engine`: None over a capture."""

    def __init__(self, history: History | None = None, engine: Steppable | None = None, *, position: int = -1) -> None:
        """`position` is where to begin in a capture."""
        self.history, self.engine = history or History(), engine
        self.breakpoints = Breakpoints()
        if engine is not None:
            engine.keep_timeline()
            self.history.limit = self.history.limit or KEPT
        self.request = ""  # the current one; "" for the first of the step
        # How usual a node is in the run so far, a sentence each: what looks at whole runs puts it here
        self.typical: Callable[[RequestStep, int], Sequence[str]] = lambda part, node: ()
        self.interrupted: Callable[[], bool] = lambda: False  # asked after each step: whether to stop running on
        self.runs_on = engine is not None  # whether steps may still come
        self._cursor = position  # over a capture
        self.viewed: int | None = None  # the place of the step that is looked at, where an engine stands at a later one
        self._node: tuple[StepRecord | None, RequestStep, int] | None = None  # in which step of what, and which
        self._undone: list[StepRecord] = []  # that an engine went back over
        self.parted = ""  # where a step came out otherwise than the one that was undone, in words

    # Where we are

    @property
    def position(self) -> int:
        """The place in `history.steps` of the step that ran last; -1 before the first."""
        return self._cursor if self.engine is None else len(self.history.steps) - 1

    @position.setter
    def position(self, position: int) -> None:
        self._cursor = position

    @property
    def phase(self) -> str:
        """The phase that ran last of a step that was begun, "" between steps."""
        begun = None if self.engine is None or self.viewed is not None else self.engine.current
        return begun.phases[-1].name if begun is not None and begun.phases else ""

    @property
    def _shown(self) -> int:
        return self.position if self.viewed is None else self.viewed

    @property
    def record(self) -> StepRecord | None:
        """The step that is looked at: the one that ran last, unless `viewed` names another."""
        return self.history.steps[self._shown] if 0 <= self._shown < len(self.history.steps) else None

    @property
    def current_request(self) -> RequestHistory | None:
        """The request that commands are about: the one set by `request`, else the first of the step."""
        if self.request in self.history.requests:
            return self.history.requests[self.request]
        record = self.record
        if record is not None and record.requests:
            return self.history.requests.get(record.requests[0].request)
        return next(iter(self.history.requests.values()), None)

    @property
    def part(self) -> RequestStep | None:
        """The current request's part in the step that is looked at, or its last before that."""
        request = self.current_request
        part = None if request is None else self.history.part(request.id, self._shown)
        return None if part is None else part[1]

    @property
    def part_record(self) -> StepRecord | None:
        """The engine's step that `part` is of: the one that is looked at, unless the request had no part in it."""
        request = self.current_request
        part = None if request is None else self.history.part(request.id, self._shown)
        return None if request is None or part is None else self.history.steps[request.engine_steps[part[0]]]

    @property
    def node(self) -> int | None:
        """The current node of `part`, as gdb has a frame; None at the root, and after every move without a hit."""
        if self._node is None or self._node[0] is not self.record or self._node[1] is not self.part:
            return None
        return self._node[2]

    @node.setter
    def node(self, number: int | None) -> None:
        part = self.part
        self._node = None if number is None or part is None else (self.record, part, number)

    def _stop(self, reason: StopReason, *, moved: bool = True) -> Stop:
        return Stop(reason, -1 if self.record is None else self.record.step, moved=moved)

    # Forward

    def advance(self) -> Stop | None:
        """Run one step of the engine: why the run stops after it, None if it goes on. A worker runs on this alone."""
        record = self._engine_step()
        if record is None:
            return self._stop(StopReason.END, moved=False)
        return self.breakpoints.check(record, self.history)

    def _engine_step(self) -> StepRecord | None:
        """Run one step, whatever the breakpoints are; None if nothing is left to run."""
        if self.engine is None or not self.engine.busy:
            return None
        record = self.engine.step()
        self.history.append(record)
        return record

    def _advance(self) -> StepRecord | None:
        """Advance by one step, of the engine or of the capture; None at the end."""
        if self.engine is not None:
            record = self._engine_step()
            self.parted = self._parted(record) or self.parted
            return record
        if self._cursor >= len(self.history.steps) - 1:
            return None
        self._cursor += 1
        return self.history.steps[self._cursor]

    def _parted(self, record: StepRecord | None) -> str:
        """Where this step begins a branch although it is the same work as the step that was undone, in words."""
        if record is None or record.after is None:
            return ""
        before, self._undone = next((each for each in self._undone if each.step > record.after), None), []
        if before is None or work_of(before) != work_of(record):
            return ""
        return f"step {before.step} was recomputed with other rounding: branch {record.branch} begins here"

    def cont(self, done: Callable[[StepRecord], Stop | None] = lambda _: None) -> Stop:
        """Go on until a breakpoint, the end, or a stop that `done` gives."""
        moved = False
        while (record := self._advance()) is not None:
            moved = True
            stop = self.breakpoints.check(record, self.history) or done(record)
            if stop is not None:
                return stop
            if self.interrupted():
                return self._stop(StopReason.INTERRUPTED)
        return self._stop(StopReason.END, moved=moved)

    def next(self, count: int = 1) -> Stop:
        taken = counting(1)
        return self.cont(lambda record: Stop(StopReason.STEP, record.step) if next(taken) == count else None)

    def step(self) -> Stop:
        """Run one phase: schedule, draft, forward, verify, commit. Over a capture: a step."""
        if self.engine is None:
            return self.next()
        if not self.engine.busy:
            return self._stop(StopReason.END, moved=False)
        record = self.engine.phase()
        if record is None:
            return Stop(StopReason.PHASE, self.engine.steps, phase=self.engine.current.phases[-1].name)
        self.history.append(record)  # the breakpoints are checked when the step is complete
        return self.breakpoints.check(record, self.history) or Stop(StopReason.STEP, record.step)

    def pause(self) -> Stop:
        """Stop a run that goes on by itself: only vLLM's does (remote/held.py)."""
        raise UserError("nothing runs until the next command, so there is nothing to pause")

    def finish(self, request: str = "") -> Stop:
        chosen = self.history.requests.get(request) if request else self.current_request
        if chosen is None:
            raise UserError(f"there is no request {request!r}" if request else "no request is running")

        def ended(record: StepRecord) -> Stop | None:
            ends = any(end.info.id == chosen.id for end in record.finished)
            return Stop(StopReason.FINISHED, record.step, request=chosen.id) if ends else None

        if any(map(ended, self.history.steps[: self.position + 1])):
            raise UserError(f"{chosen.id} has already ended")
        return self.cont(ended)

    def until(self, condition: str) -> Stop:
        wanted = Expression(condition, types_of(EventKind.STEP))

        def holds(record: StepRecord) -> Stop | None:
            facts = (StepFacts(record, part.request, part, self.history) for part in record.requests)
            name = next((each.name for each in facts if wanted(each)), None)
            return None if name is None else Stop(StopReason.UNTIL, record.step, request=name, condition=wanted.text)

        return self.cont(holds)

    # Back

    def goto(self, position: int) -> Stop:
        """Go to just after the step at `position`; -1 for before the first. The engine is rewound, or run on."""
        self._node = None
        if position > self.position:
            while self.position < position and self._advance() is not None:
                pass
            return self._stop(StopReason.STEP if self.position == position else StopReason.END)
        if self.engine is not None:
            steps = self.history.steps
            self._undone = [*steps[position + 1 :], *self._undone]
            self.engine.rewind(steps[position + 1].step if position + 1 < len(steps) else self.engine.steps)
            self.history.truncate(position + 1)
        self.position = position
        return self._stop(StopReason.STEP if position >= 0 else StopReason.START)

    def goto_step(self, number: int) -> Stop:
        """Go to just after the step of that number, on another branch of a recording if need be; or run on to it."""
        history = self.history
        if history.position_of(number) is None and self.engine is None and (other := history.knows(number)):
            history.show(other.branch)
        position = history.position_of(number)
        if position is not None:
            return self.goto(position)
        first, last = (history.steps[0].step, history.steps[-1].step) if history.steps else (0, -1)
        if self.engine is None or number < last:
            known = f"{first} to {last}" if history.steps else "none"
            raise UserError(f"there is no step {number} on this path; there are: {known}")
        while (record := self._advance()) is not None and record.step < number:
            pass
        return self._stop(StopReason.END if record is None else StopReason.STEP)

    def goto_end(self) -> Stop:
        """Go to the last step that was ever reached, or before the first where none was."""
        known = [*self.history.steps[-1:], *self._undone[-1:]]
        return self.goto_step(max(record.step for record in known)) if known else self.goto(-1)

    def goto_request(self, name: str, index: int | None) -> Stop:
        """Make a request the current one and go to just after its step of that number, or run on to it."""
        request = self.history.requests[name]

        def reached(record: StepRecord) -> Stop | None:
            there = any(part.request == name and part.index >= (index or 0) for part in record.requests)
            return Stop(StopReason.STEP, record.step) if there else None

        if index is None:
            stop = self._stop(StopReason.STEP)
        elif self.runs_on and request.end is None and not (request.steps and index <= request.steps[-1].index):
            stop = self.cont(reached)  # it may still come there
        else:
            stop = self.goto(request.at(index))
        self.request = name
        return stop if stop.hits else replace(stop, request=name)

    def show_branch(self, number: int) -> Stop:
        if number not in self.history.branches:
            known = ", ".join(map(str, self.history.branches))
            raise UserError(f"there is no branch {number}; there are: {known}")
        if self.engine is not None:
            raise UserError(f"the engine is on branch {self.history.branch}: open its capture to see others")
        self.history.show(number)
        self.position = len(self.history.steps) - 1
        return self._stop(StopReason.STEP)

    def reverse_next(self, count: int = 1) -> Stop:
        return self._stop(StopReason.START) if self.position < 0 else self.goto(max(self.position - count, -1))

    def reverse_continue(self) -> Stop:
        """Back to the last breakpoint that would have stopped before here, or to the start."""
        position = self.position
        while position > 0:
            position -= 1
            stop = self.breakpoints.check(self.history.steps[position], self.history, back=True)
            if stop is not None:
                self.goto(position)
                return stop
        self.goto(-1 if self.position <= 0 else 0)
        return self._stop(StopReason.START)


def work_of(record: StepRecord) -> list[tuple[str, int, int, int]]:
    """What each request fed in a step: the same work may come out otherwise by rounding alone."""
    return [(part.request, part.index, part.context_len, part.prefill_tokens) for part in record.requests]
