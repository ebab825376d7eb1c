"""Session: stops, steps, goes back and looks, over a live engine or a capture alike.

Over an engine it runs steps and rewinds; over a capture the same commands move a cursor. Everything it shows comes from
the records. It is synchronous: a command returns when the run has stopped.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from specscope.debug.breakpoints import Breakpoints, Hit, step_condition, step_evidence
from specscope.debug.expressions import Expression
from specscope.errors import UserError
from specscope.trace.history import KEPT, History, RequestHistory
from specscope.trace.records import RequestStep, StepRecord


class Steppable(Protocol):
    """What the debugger asks of an engine; specscope.Engine is one."""

    steps: int
    current: Any  # what there is of a step that was begun, None between steps

    @property
    def busy(self) -> bool:
        """Whether a step would do anything."""

    def step(self) -> StepRecord:
        """Run one step, or what is left of one."""

    def phase(self) -> StepRecord | None:
        """Run the next phase of a step; the record after the last."""

    def rewind(self, step: int) -> None:
        """Be as before that step."""

    def keep_timeline(self) -> Any:  # noqa: ANN401
        """Keep what going back takes."""


@dataclass(frozen=True)
class Stop:
    """Why a command returned."""

    reason: str  # step, phase, breakpoint, until, finished, end, start
    hits: tuple[Hit, ...] = ()
    text: str = ""  # for people

    def describe(self) -> str:
        """What happened, a line each."""
        return "\n".join([*(hit.describe() for hit in self.hits), *([self.text] if self.text else [])])


@dataclass
class Session:
    """`position` is the place in `history.steps` of the step that ran last; -1 before the first."""

    history: History = field(default_factory=History)
    engine: Steppable | None = None  # None over a capture
    breakpoints: Breakpoints = field(default_factory=Breakpoints)
    position: int = -1
    phase: str = ""  # the phase that ran last of a step that was begun, "" between steps
    request: str = ""  # the current one; "" for the first of the step
    interrupted: Callable[[], bool] = lambda: False  # asked after each step: whether to stop running on
    _node: tuple[RequestStep, int] | None = field(default=None, init=False, repr=False)  # of which step, and which

    def __post_init__(self) -> None:
        if self.engine is not None:
            self.engine.keep_timeline()
            self.history.limit = self.history.limit or KEPT

    # Where we are

    @property
    def record(self) -> StepRecord | None:
        """The step that ran last."""
        return self.history.steps[self.position] if 0 <= self.position < len(self.history.steps) else None

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
        """The current request's part in the step that ran last, or its last before that."""
        request = self.current_request
        found = None if request is None else self.history.part(request.id, self.position)
        return None if found is None else found[1]

    @property
    def node(self) -> int | None:
        """The current node of `part`, as gdb has a frame; None at the root, and after every move without a hit."""
        return self._node[1] if self._node is not None and self._node[0] is self.part else None

    @node.setter
    def node(self, number: int | None) -> None:
        part = self.part
        self._node = None if number is None or part is None else (part, number)

    @property
    def at_end(self) -> bool:
        """Whether the last step has run, and there is nothing to run on to."""
        more = self.position < len(self.history.steps) - 1 if self.engine is None else self.engine.busy
        return bool(self.history.steps) and not more

    # Forward

    def _advance(self) -> StepRecord | None:
        """One step: of the engine, or of the capture; None at the end."""
        self._node = None
        if self.engine is None:
            if self.position >= len(self.history.steps) - 1:
                return None
            self.position += 1
            return self.history.steps[self.position]
        if not self.engine.busy:
            return None
        return self._take(self.engine.step())

    def _take(self, record: StepRecord) -> StepRecord:
        self.phase = ""
        self.history.append(record)
        self.position = len(self.history.steps) - 1
        return record

    def _run(self, done: Callable[[StepRecord], str]) -> Stop:
        """Go on until a breakpoint, the end, or `done` gives a reason."""
        while True:
            record = self._advance()
            if record is None:
                return Stop("end", text="nothing is left to run")
            hits = self.breakpoints.check(record, self.history)
            reason = done(record)
            if hits:
                return Stop("breakpoint", tuple(hits))
            if reason:
                return Stop(reason)
            if self.interrupted():
                return Stop("interrupted", text="interrupted")

    def cont(self) -> Stop:
        """Go on to the next breakpoint, or the end."""
        return self._run(lambda _: "")

    def next(self, count: int = 1) -> Stop:
        """Run engine steps; breakpoints stop them too."""
        left = iter(range(count - 1, -1, -1))
        return self._run(lambda _: "step" if next(left) == 0 else "")

    def step(self) -> Stop:
        """Run one phase: schedule, draft, forward, verify, commit. Over a capture: a step."""
        if self.engine is None:
            return self.next()
        if not self.engine.busy and not self.phase:
            return Stop("end", text="nothing is left to run")
        record = self.engine.phase()
        if record is None:
            self.phase = self.engine.current.phases[-1].name
            return Stop("phase", text=f"{self.phase} done, of step {self.engine.steps}")
        self._take(record)
        return Stop("step", tuple(self.breakpoints.check(record, self.history)))

    def finish(self, request: str = "") -> Stop:
        """Go on to the end of a request."""
        found = self.history.requests.get(request) if request else self.current_request
        if found is None:
            raise UserError(f"there is no request {request!r}" if request else "no request is running")
        if self._ended(found):
            raise UserError(f"{found.id} has already ended")
        return self._run(lambda record: "finished" if any(e.info.id == found.id for e in record.finished) else "")

    def _ended(self, request: RequestHistory) -> bool:
        known = self.history.steps[: self.position + 1]
        return request.end is not None and any(e.info.id == request.id for r in known for e in r.finished)

    def until(self, condition: str | Expression) -> Stop:
        """Go on until a condition on a request's step holds."""
        expression = step_condition(condition) if isinstance(condition, str) else condition
        return self._run(
            lambda record: "until" if any(expression(e) for e in step_evidence(record, self.history)) else ""
        )

    # Back

    def goto(self, position: int) -> Stop:
        """Be where the step at `position` had just run; -1 for before the first. The engine is rewound, or run on."""
        self._node = None
        if not position >= -1:
            raise UserError("there is nothing before the first step")
        if position > self.position:
            while self.position < position and self._advance() is not None:
                pass
            return Stop("step" if self.position == position else "end")
        if self.engine is not None:
            steps = self.history.steps
            self.engine.rewind(steps[position + 1].step if position + 1 < len(steps) else self.engine.steps)
            self.history.truncate(position + 1)
        self.position, self.phase = position, ""
        return Stop("step" if position >= 0 else "start")

    def goto_step(self, number: int) -> Stop:
        """Be where the step of that number had just run: on another branch of a recording, or run on to it."""
        history = self.history
        if history.position_of(number) is None and self.engine is None and (other := history.knows(number)):
            history.show(other.branch)
        at = history.position_of(number)
        if at is not None:
            return self.goto(at)
        first, last = (history.steps[0].step, history.steps[-1].step) if history.steps else (0, -1)
        if self.engine is None or number < last:
            known = f"{first} to {last}" if history.steps else "none"
            raise UserError(f"there is no step {number} on this path; there are: {known}")
        while (record := self._advance()) is not None and record.step < number:
            pass
        return Stop("end" if record is None else "step")

    def show_branch(self, number: int) -> Stop:
        """Be at the end of a branch of a recording."""
        if number not in self.history.branches:
            known = ", ".join(map(str, self.history.branches))
            raise UserError(f"there is no branch {number}; there are: {known}")
        if self.engine is not None:
            raise UserError(f"the engine is on branch {self.history.branch}: its recording can show the others")
        self.history.show(number)
        self.position = len(self.history.steps) - 1
        return Stop("step")

    def reverse_next(self, count: int = 1) -> Stop:
        """Undo engine steps."""
        if self.position < 0:
            return Stop("start", text="this is before the first step")
        return self.goto(max(self.position - count, -1))

    def reverse_step(self) -> Stop:
        """Undo a phase: what was begun of a step is given up and run again up to the phase before."""
        if self.engine is None or not self.phase:
            if self.engine is None:
                return self.reverse_next()
            return self._reenter(4) if self.position >= 0 else Stop("start", text="this is before the first step")
        done = len(self.engine.current.phases)
        self.engine.rewind(self.engine.steps)
        self.phase = ""
        for _ in range(done - 1):
            self.step()
        return Stop("phase", text=f"{self.phase or 'nothing'} done, of step {self.engine.steps}")

    def _reenter(self, phases: int) -> Stop:
        """Back into the step that ran last, with so many of its phases done."""
        self.goto(self.position - 1)
        stop = Stop("start")
        for _ in range(phases):
            stop = self.step()
        return stop

    def reverse_continue(self) -> Stop:
        """Back to the last breakpoint that would have stopped before here, or to the start."""
        at = self.position
        while at > 0:
            at -= 1
            hits = self.breakpoints.check(self.history.steps[at], self.history, back=True)
            if hits:
                self.goto(at)
                return Stop("breakpoint", tuple(hits))
        self.goto(-1 if self.position <= 0 else 0)
        return Stop("start", text="the first step: no breakpoint before")
