"""Going back: what an engine was before each of its steps, and how to make it so again.

A mark is a few numbers a request, for the rest follows: committed tokens and their KV never change, so that going back
is to shorten lengths and free blocks. A request that gave its blocks up since (it ended, or was preempted) has its KV
computed again from its tokens; so has one that was still being prefilled, where the drafter lives on the target's
features. Coins are counter-based: run forward again, the same tokens and verdicts come, and the known records stand.
Where something is different, a branch begins.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Any

from specscope.engine.phases import Phases
from specscope.engine.request import Request
from specscope.errors import UserError
from specscope.trace.history.history import KEPT
from specscope.trace.history.same import same_step
from specscope.trace.record.records import StepRecord

STATE = ("computed", "steps", "admitted_ns", "preceded")  # of a request, what a step changes of it


@dataclass(frozen=True)
class Mark:
    """A request before a step."""

    request: Request
    tokens: int
    kv_life: int
    state: tuple[Any, ...]  # by STATE

    @staticmethod
    def of(request: Request) -> Mark:
        """A request's mark now."""
        return Mark(request, len(request.tokens), request.kv_life, attrgetter(*STATE)(request))

    def restore(self) -> Request:
        """Make the request what it was, but for its KV."""
        del self.request.tokens[self.tokens :]
        self.request.finish, self.request.stop, self.request.error = None, "", ""
        for name, value in zip(STATE, self.state, strict=True):
            setattr(self.request, name, value)
        return self.request


@dataclass
class Moment:
    """An engine before a step."""

    waiting: tuple[Mark, ...]
    running: tuple[Mark, ...]
    ended: tuple[Request, ...]  # cancelled between steps; to be reported by this one
    crowded: bool  # whether drafting was off because of the load
    record: StepRecord | None = None  # of the step, when it has run


@dataclass(frozen=True)
class Input:
    """A request that came, or was cancelled. On the way forward again it does so at the same place."""

    place: int  # on the path: how many steps had begun
    mark: Mark
    cancels: bool = False


@dataclass
class Timeline:
    """The path of one engine from its first step to where it stands. Made by Engine.keep_timeline."""

    dtype: str  # of the target: by how much rounding may move a probability
    next: int  # the number of the next step that is new
    floor: int  # the step before the first moment
    place: int = 0  # how many steps have begun
    moments: list[Moment] = field(default_factory=list)
    undone: deque[StepRecord] = field(default_factory=deque)  # gone back over: they stand again if they come out so
    branch: int = 0
    branches: int = 1
    inputs: list[Input] = field(default_factory=list)
    happened: int = 0  # how many of the inputs lie behind; the others were gone back over
    repeating: bool = False  # while one of these happens again
    rewound: bool = False  # whether the engine went back since the last step that was new

    @property
    def step(self) -> int:
        """The number of the next step, if it comes out as before."""
        return self.undone[0].step if self.undone else self.next

    def note(self, phases: Phases) -> None:
        """Keep the moment before the next step; what came here the first time comes again."""
        self._repeat(phases)
        if len(self.moments) >= KEPT and (first := self.moments.pop(0).record) is not None:
            self.floor = first.step
        groups = phases.scheduler.waiting, phases.scheduler.running
        waiting, running = (tuple(map(Mark.of, group)) for group in groups)
        self.moments.append(Moment(waiting, running, tuple(phases.intake.ended), phases.gate.crowded))
        self.place += 1

    def arrived(self, request: Request, *, cancels: bool = False) -> None:
        """Note that a request was added or cancelled. Between the phases of a step, this counts as after the step."""
        if not self.repeating:
            self.inputs.insert(self.happened, Input(self.place, Mark.of(request), cancels))
            self.happened += 1

    def settle(self, record: StepRecord) -> tuple[StepRecord, bool]:
        """The step that has just run, as it stands in the history, and whether it is new to it.

        Where it came out as before, it is the known one. Else it gets a number that none had; and where steps were
        gone back over, it begins a branch.
        """
        moment = self.moments[-1]
        if self.undone and same_step(self.undone[0], record, self.dtype):
            moment.record = known = self.undone.popleft()
            self.branch, admitted = known.branch, {info.id: info.admitted_ns for info in known.admitted}
            for mark in moment.waiting:  # a request that was admitted again was so when it was the first time
                mark.request.admitted_ns = admitted.get(mark.request.id, mark.request.admitted_ns)
            return known, False
        after = None
        if self.undone:
            after = self.last
            self.undone.clear()
            self.branch, self.branches = self.branches, self.branches + 1
        moment.record = replace(record, step=self.next, branch=self.branch, after=after, rewound=self.rewound)
        self.next, self.rewound = self.next + 1, False
        return moment.record, True

    @property
    def last(self) -> int:
        """The number of the step that ran last; -1 for none."""
        return next((m.record.step for m in reversed(self.moments[-2:]) if m.record is not None), self.floor)

    def rewind(self, phases: Phases, step: int) -> None:
        """Make the engine what it was before `step`. Raises UserError and changes nothing where that is not known."""
        steps = [self.step if moment.record is None else moment.record.step for moment in self.moments]
        if step not in steps:
            known = (*steps, self.step)[0]
            raise UserError(f"cannot go back to before step {step}: only steps {known} to {self.step} are kept")
        index = steps.index(step)
        self.rewound, moment = True, self.moments[index]
        marks = (*moment.running, *moment.waiting)
        intake, scheduler, keep = phases.intake, phases.scheduler, {mark.request.id for mark in marks}
        for request in [request for request in intake.requests.values() if request.id not in keep]:
            intake.retire(request)
        lost = [mark.request for mark in marks if not _shorten(phases, mark)]
        scheduler.room.restore([(request, request.computed) for request in lost])
        intake.requests.clear()
        intake.requests.update((mark.request.id, mark.request) for mark in marks)
        scheduler.running = [mark.request for mark in moment.running]
        scheduler.waiting = deque(mark.request for mark in moment.waiting)
        intake.ended[:] = moment.ended
        phases.gate.crowded = moment.crowded
        self.undone.extendleft(m.record for m in reversed(self.moments[index:]) if m.record is not None)
        self.place -= len(self.moments) - index
        del self.moments[index:]
        self.happened = sum(event.place <= self.place for event in self.inputs[: self.happened])
        before = self.moments[-1].record if self.moments else next(iter(self.undone), None)
        self.branch = self.branch if before is None else before.branch

    @property
    def ahead(self) -> list[Input]:
        """What came after the place where the engine stands."""
        return self.inputs[self.happened :]

    def _repeat(self, phases: Phases) -> None:
        """Add and cancel again what was added and cancelled before this step."""
        self.repeating = True
        while self.ahead and (event := self.ahead[0]).place <= self.place:
            self.happened += 1
            with phases.intake.lock:
                if event.cancels:
                    phases.intake.cancel(event.mark.request.id)
                elif event.mark.request.id not in phases.intake.requests:
                    phases.intake.arrive(event.mark.restore())
        self.repeating = False

    def arrivals(self) -> Iterable[Request]:
        """Every request that came, the newest first."""
        return (event.mark.request for event in reversed(self.inputs[: self.happened]) if not event.cancels)


def _shorten(phases: Phases, mark: Mark) -> bool:
    """Back to the mark's lengths; False where the KV must be computed again."""
    request = mark.restore()
    decodes = request.computed == mark.tokens - 1
    cache, drafter = phases.parts.runner.cache, phases.parts.drafter
    if request.kv_life == mark.kv_life and (decodes or not drafter.aux_layers):
        cache.truncate(request.table, request.computed)
        if drafter.rewind(request.id, mark.tokens):
            return True
    cache.truncate(request.table, 0)
    drafter.release(request.id)
    return request.computed == 0
