"""The scheduler: which requests run in the next step, how many tokens each feeds, and which must make room."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from specscope.engine.request import Request
from specscope.engine.room import Room
from specscope.trace.record.records import FinishReason, Preceded

SHARE = 4  # one in so many tokens of a step: kept for who waits while the batch has a place; a prefill's turn, at least
QUIETER = 4  # drafting is on again when a quarter fewer requests decode than where it goes off

TOO_SMALL = "the KV cache is too small for this request alone: raise --kv-memory"

Nodes = Callable[[Request], int]


@dataclass
class Scheduled:
    """One request's share of a step."""

    request: Request
    feed: int  # pending tokens to feed
    nodes: int  # of its draft, at most; 0 where it only prefills
    decodes: bool  # whether the feed reaches the root, so that a token is drawn

    @property
    def cost(self) -> int:
        """Rows of the step that it may take."""
        return self.feed + self.nodes


@dataclass
class Schedule:
    """What one step will do. Filled by Scheduler.schedule."""

    budget: int = 0  # tokens that are left
    parts: list[Scheduled] = field(default_factory=list)
    admitted: list[Request] = field(default_factory=list)  # joined the batch for the first time
    preempted: list[Request] = field(default_factory=list)
    held_back: list[Request] = field(default_factory=list)  # keep their KV, and wait for the next step
    failed: list[Request] = field(default_factory=list)  # cannot run at all: their KV does not fit

    def add(self, part: Scheduled) -> None:
        """Give a request its share."""
        self.parts.append(part)
        self.budget -= part.cost

    def drop(self, request: Request) -> None:
        """Take a request's share back, where it has one."""
        self.budget += sum(part.cost for part in self.parts if part.request is request)
        self.parts = [part for part in self.parts if part.request is not request]

    def has(self, request: Request) -> bool:
        """Whether a request has a share."""
        return any(part.request is request for part in self.parts)


class Scheduler:
    """Continuous batching: running requests in turn, and new ones with the rest of the token budget.

    Where the budget does not reach every running request, those that were left out come first in the next step, so
    that none holds KV without being fed. Whose turn it is lies in the order of `running` alone.

    Where KV blocks run out the last arrival makes room: first its slots of this step, so that it keeps its KV and
    waits; then, where that is not enough, its KV, which is computed again later. Trees stay as they are: which token a
    sampled request draws depends on its tree, and how many of a greedy one's drafts are accepted too. The first arrival
    never makes room, so every request ends after so many steps; new ones come in the order in which they arrived.
    """

    def __init__(self, room: Room, max_batch: int, max_step_tokens: int, *, root_alone: bool = False) -> None:
        self.root_alone = root_alone  # the drafter needs the features of all before the root
        self.room = room
        self.max_batch = max_batch
        self.max_step_tokens = max_step_tokens
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []  # in the order in which they are served

    @property
    def decoding(self) -> int:
        """Running requests that will draw a token in the next step, if there is room for it."""
        return sum(request.pending == 1 for request in self.running)

    def schedule(self, now_ns: int, nodes: Nodes) -> Schedule:
        """Choose this step's requests and reserve KV room for all that they may write.

        `nodes`: how many nodes the next draft of a request may have.
        """
        plan = Schedule(self.max_step_tokens)
        has_place = self.waiting and len(self.running) < self.max_batch
        reserved = self.max_step_tokens // SHARE if has_place else 0
        for request in self.running:  # what the last step kept for drafts; so what is held follows from lengths alone
            self.room.give_back(request)
        for request in list(self.running):
            if request in self.running and plan.budget > reserved:
                self._plan(request, nodes, plan, plan.budget - reserved)
        self._take_turns(plan)
        while self.waiting and len(self.running) < self.max_batch and plan.budget > 0:
            if plan.preempted or plan.held_back or not self._admit(nodes, plan, now_ns):
                break
        return plan

    def _admit(self, nodes: Nodes, plan: Schedule, now_ns: int) -> bool:
        """Take the first of the queue in, or out where it cannot run at all; False where it has to wait."""
        request = self.waiting[0]
        if request.refused:
            self._fail(self.waiting.popleft(), plan, request.refused)
            return True
        part = self._part(request, nodes, plan.budget)
        fits = self._reserve(part) or (not self.running and self._reserve(part, drafts=False))
        if not fits:
            if not self.running:
                self._fail(self.waiting.popleft(), plan)
            return not self.running
        self.waiting.popleft()
        self.running.append(request)
        if request.admitted_ns == 0:
            request.admitted_ns = now_ns
            plan.admitted.append(request)
        plan.add(part)
        return True

    def _plan(self, request: Request, nodes: Nodes, plan: Schedule, budget: int) -> None:
        """Schedule a running request; later arrivals make room for it."""
        part = self._part(request, nodes, budget)
        while not self._reserve(part):
            later = sorted((other for other in self.running if _age(other) > _age(request)), key=_age, reverse=True)
            if victim := next((other for other in later if plan.has(other)), None):
                plan.drop(victim)
                self.room.give_back(victim)
                plan.held_back.append(victim)
            elif later:
                self._preempt(later[0], plan)
            elif len(later) < len(self.running) - 1:
                plan.held_back.append(request)  # an earlier one goes on
                return
            elif self._reserve(part, drafts=False):
                break  # the drafter alone has no room, and never will
            else:
                self.running.remove(request)
                self._fail(request, plan)
                return
        plan.add(part)

    def _take_turns(self, plan: Schedule) -> None:
        """Those that got nothing, or a scrap of a prefill, come first the next time."""
        turn = self.max_step_tokens // SHARE
        served = {part.request.id for part in plan.parts if part.decodes or part.feed >= turn}
        self.running.sort(key=lambda request: request.id in served)

    def _part(self, request: Request, nodes: Nodes, budget: int) -> Scheduled:
        pending = request.pending
        if self.root_alone and pending > 1 and len(request.tokens) > len(request.prompt_tokens):
            pending -= 1  # a request that comes back drafts again from the very step in which it would have
        feed = max(min(pending, budget), 1)
        decodes = feed == request.pending
        return Scheduled(request, feed, nodes(request) if decodes else 0, decodes)

    def _reserve(self, part: Scheduled, *, drafts: bool = True) -> bool:
        return self.room.reserve(part.request, part.cost, drafts=drafts and part.nodes > 0)

    def _preempt(self, victim: Request, plan: Schedule) -> None:
        """Take a request's KV; it goes to the head of the queue and is computed again from its tokens."""
        self.running.remove(victim)
        plan.drop(victim)
        self._let_go(victim)
        victim.preceded = Preceded.PREEMPTION
        self.waiting.appendleft(victim)
        plan.preempted.append(victim)

    def _let_go(self, request: Request) -> None:
        self.room.free(request)
        request.computed = 0

    def _fail(self, request: Request, plan: Schedule, why: str = TOO_SMALL) -> None:
        request.finish, request.error = FinishReason.ERROR, why
        self.room.free(request)
        plan.failed.append(request)

    def retire(self, request: Request) -> None:
        """Take a finished or cancelled request out and free its blocks."""
        if request in self.running:
            self.running.remove(request)
        elif request in self.waiting:
            self.waiting.remove(request)
        self.room.free(request)


def _age(request: Request) -> tuple[int, str]:
    """The order of arrival."""
    return request.arrival_ns, request.id


class SpeculationGate:
    """Whether a step drafts at all: not where that was chosen, nor while many requests decode.

    At the limit the number of requests goes up and down from step to step, so drafting is on again only well below it.
    Prefills do not count: they come and go in bursts (vLLM 49548). Which requests draft decides how drafts fall, and
    so which tokens a sampled request is given, though not how they are distributed.
    """

    def __init__(self, *, chosen: bool = True, disable_above: int | None = None) -> None:
        """`disable_above`: the most requests that decode in a step that drafts."""
        self.chosen, self.disable_above = chosen, disable_above
        self.crowded = False  # whether drafting went off because of the load

    def why_off(self, decoding: int) -> str:
        """Why the next step does not draft, in which so many requests decode; "" where it does."""
        if not self.chosen:
            return "set to off"
        limit = self.disable_above
        if limit is None:
            return ""
        again = limit - max(limit // QUIETER, 1)
        self.crowded = decoding > (again if self.crowded else limit)
        if not self.crowded:
            return ""
        return f"decoding requests above {limit}" if decoding > limit else f"decoding requests still above {again}"
