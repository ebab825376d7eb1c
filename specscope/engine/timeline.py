"""Going back: what an engine was before each of its steps, and how to make it so again.

A mark is a few numbers a request, for the rest follows: committed tokens and their KV never change, so that going back
is to shorten lengths and free blocks. A request that gave its blocks up since (it ended, or was preempted) has its KV
computed again from its tokens, and so has every request whose drafter lives on the target's features. Coins are
counter-based: run forward again, the same tokens and verdicts come.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from specscope.engine.request import Request
from specscope.errors import UserError
from specscope.model.batch import Segment
from specscope.trace.tree import DraftTree

if TYPE_CHECKING:
    from specscope.engine.engine import Engine

CHUNK = 512  # tokens computed again in one pass


@dataclass(frozen=True)
class Mark:
    """A request before a step."""

    request: Request
    tokens: int
    computed: int
    steps: int
    admitted_ns: int
    kv_life: int

    @staticmethod
    def of(request: Request) -> Mark:
        """As it is now."""
        r = request
        return Mark(r, len(r.tokens), r.computed, r.steps, r.admitted_ns, r.kv_life)


@dataclass(frozen=True)
class Moment:
    """An engine before a step."""

    step: int
    waiting: tuple[Mark, ...]
    running: tuple[Mark, ...]
    ended: tuple[Request, ...]  # cancelled between steps; to be reported by this one


@dataclass
class Timeline:
    """The moments of one engine. Made by Engine.keep_timeline."""

    moments: list[Moment] = field(default_factory=list)
    arrivals: list[tuple[int, Request]] = field(default_factory=list)  # the step before which each came
    cancels: list[tuple[int, str]] = field(default_factory=list)
    again_until: int = -1  # the last step before which something may come again
    returning: bool = False  # while it does

    def note(self, engine: Engine) -> None:
        """Keep the moment before the next step; what came here the first time comes again."""
        self._repeat(engine)
        scheduler = engine.scheduler
        waiting, running = (tuple(map(Mark.of, group)) for group in (scheduler.waiting, scheduler.running))
        self.moments.append(Moment(engine.steps, waiting, running, tuple(engine.ended)))

    def arrived(self, engine: Engine, request: Request) -> None:
        """A request was added."""
        if not self.returning:
            self.arrivals.append((engine.steps, request))

    def cancelled(self, engine: Engine, name: str) -> None:
        """A request was cancelled."""
        if not self.returning:
            self.cancels.append((engine.steps, name))

    @property
    def first(self) -> int:
        """The earliest step that can be gone back to."""
        return self.moments[0].step if self.moments else 0

    def rewind(self, engine: Engine, step: int) -> None:
        """Make the engine what it was before `step`. Raises UserError and changes nothing where that is not known.

        A step that was begun is given up.
        """
        at = step - self.first
        if step == engine.steps and engine.current is None:
            return
        if not 0 <= at < len(self.moments):
            raise UserError(f"cannot go back to step {step}: only steps {self.first} to {engine.steps} are kept")
        moment = self.moments[at]
        self.again_until = max(self.again_until, engine.steps)
        marks = (*moment.running, *moment.waiting)
        keep = {mark.request.id for mark in marks}
        for request in list(engine.requests.values()):
            if request.id not in keep:
                engine.scheduler.retire(request)
                engine.drafter.release(request.id)
        lost = [mark for mark in marks if not self._shorten(engine, mark)]
        for mark in lost:
            _compute_again(engine, mark)
        engine.requests = {mark.request.id: mark.request for mark in marks}
        engine.scheduler.running = [mark.request for mark in moment.running]
        engine.scheduler.waiting = deque(mark.request for mark in moment.waiting)
        engine.ended = list(moment.ended)
        engine.current, engine.steps = None, step
        if engine.clock is not None:
            engine.clock.give_up()
        del self.moments[at:]

    def _shorten(self, engine: Engine, mark: Mark) -> bool:
        """Back to the mark's lengths; False where the KV must be computed again."""
        request = mark.request
        del request.tokens[mark.tokens :]
        request.finish, request.stop, request.error = None, "", ""
        request.steps, request.admitted_ns, request.computed = mark.steps, mark.admitted_ns, mark.computed
        if request.kv_life == mark.kv_life and not engine.drafter.aux_layers:
            engine.runner.cache.truncate(request.table, mark.computed)
            engine.drafter.rewind(request.id, mark.tokens)
            return True
        engine.runner.cache.truncate(request.table, 0)
        engine.drafter.release(request.id)
        return mark.computed == 0

    def _repeat(self, engine: Engine) -> None:
        """After going back: add and cancel again what was added and cancelled before this step."""
        if engine.steps > self.again_until:
            return
        self.returning = True
        for step, request in self.arrivals:
            if step == engine.steps and request.id not in engine.requests and request not in engine.ended:
                request.restart()
                engine.requests[request.id] = request
                engine.scheduler.waiting.append(request)
        for step, name in self.cancels:
            if step == engine.steps and name in engine.requests:
                engine.cancel(name)
        self.returning = False


def _compute_again(engine: Engine, mark: Mark) -> None:
    """The KV of a request's first `computed` tokens, and their features where the drafter wants them."""
    request, cache = mark.request, engine.runner.cache
    request.kv_life += 1
    cache.reserve(request.table, mark.computed, 0)
    for start in range(0, mark.computed, CHUNK):
        tokens = request.tokens[start : min(start + CHUNK, mark.computed)]
        segment = Segment.of_tree(request.table, start, tokens, DraftTree.empty(), logits=False)
        _, features = engine.runner.forward_with_features([segment])
        if engine.drafter.aux_layers:
            engine.drafter.observe(request.id, start, features[0])
