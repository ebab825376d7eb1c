"""The scheduler: which requests run in the next step, how many tokens each feeds, and which must make room of KV."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import attrgetter

from specscope.engine.prompts import TooLargeError
from specscope.engine.request import Request, Turn
from specscope.model.kv_cache import BLOCK_SIZE, OutOfBlocksError
from specscope.model.runner import ModelRunner
from specscope.speculate.drafters.base import Context, Drafter
from specscope.speculate.drafters.model_drafter import ModelDrafter
from specscope.trace.record.records import FinishReason, Preceded

SHARE = 4  # one in so many tokens of a step: kept for who waits while the batch has a place; a prefill's turn, at least
QUIETER = 4  # drafting is on again when a quarter fewer requests decode than where it goes off
AGE = attrgetter("arrival_ns", "id")  # the order of arrival
TOO_SMALL = "the KV cache is too small for this request alone: raise --kv-memory"


@dataclass
class Schedule:
    """What one step will do. Filled by Scheduler.schedule."""

    most: int = 0  # tokens
    turns: list[Turn] = field(default_factory=list)
    admitted: list[Request] = field(default_factory=list)  # joined the batch for the first time
    preempted: list[Request] = field(default_factory=list)
    held_back: list[Request] = field(default_factory=list)  # keep their KV, and wait for the next step
    failed: list[Request] = field(default_factory=list)  # cannot run at all: their KV does not fit

    @property
    def budget(self) -> int:
        """Tokens that are left."""
        return self.most - sum(turn.cost for turn in self.turns)

    def drop(self, request: Request) -> bool:
        """Take a request's turn back; whether it had one."""
        before, self.turns = self.turns, [turn for turn in self.turns if turn.request is not request]
        return len(self.turns) < len(before)


class Room:
    """The KV caches of the target and of a drafter that is a model, as the scheduler hands them out."""

    def __init__(self, runner: ModelRunner, drafter: Drafter, max_context: int) -> None:
        self.runner, self.cache, self.drafter = runner, runner.cache, drafter
        self.model = drafter if isinstance(drafter, ModelDrafter) else None
        self.max_nodes, self.max_depth, self.max_context = drafter.max_nodes, drafter.max_depth, max_context
        self._caches = [(self.max_nodes, self.cache, "the KV cache")]  # the most slots for drafts, the cache, its name
        if self.model is not None:
            self._caches.append((self.model.max_fed, self.model.cache, "the drafter's KV cache"))
        self.root_alone = bool(drafter.aux_layers)  # the drafter needs the features of all before the root

    def nodes(self, context: Context) -> int:
        """What is kept for a request's draft: the largest, where the longest fits into its context; else 0."""
        return self.max_nodes if len(context.tokens) + self.max_depth < self.max_context else 0

    @property
    def longest(self) -> int:
        """Tokens to which a request may grow that is alone."""
        return min(self.max_context, *(c.pool.blocks * BLOCK_SIZE + 1 - draft for draft, c, _ in self._caches))

    def check(self, prompt: int, max_tokens: int) -> None:
        """Raise TooLargeError for a request that would not fit even alone."""
        total = min(prompt + max_tokens, self.max_context)
        for draft, cache, name in self._caches:
            needed = -(-(total - 1 + draft) // BLOCK_SIZE)  # the last token is never fed
            if needed > (blocks := cache.pool.blocks):
                drafts = f" (with {draft} slots for drafts)" if draft else ""
                raise TooLargeError(
                    f"the request does not fit: {prompt:,} prompt tokens may grow to {total:,} tokens{drafts}, which "
                    f"need {needed:,} KV blocks, and {name} has {blocks:,}: raise --kv-memory or lower max_tokens"
                )

    def reserve(self, turn: Turn) -> bool:
        """Room for a turn's rows behind what is computed, and for the drafter where it drafts.

        False where there are too few blocks; nothing is held then but what was.
        """
        request = turn.request
        try:
            self.cache.reserve(request.table, request.computed + turn.cost, request.computed)
        except OutOfBlocksError:
            return False
        if not turn.nodes or self.model is None or self.model.make_room(turn.context):
            return True
        self.give_back(request)
        return False

    def give_back(self, request: Request) -> None:
        """Give back what is kept for drafts: all behind the committed tokens."""
        self.cache.truncate(request.table, request.computed)
        if self.model is not None:
            self.model.give_back(request.id)

    def free(self, request: Request) -> None:
        """Give back everything; the drafter forgets the request."""
        self.cache.truncate(request.table, 0)
        self.drafter.release(request.id)
        request.kv_life += 1
        request.computed = 0

    def restore(self, wanted: Sequence[tuple[Request, int]]) -> None:
        """Requests that lost their KV get that of so many of their first tokens again, as when they were there first.

        Raises OutOfBlocksError.
        """
        for request, _ in wanted:
            self.free(request)
        for request, length in wanted:
            self.cache.reserve(request.table, length, 0)
            for start, features in self.runner.compute(request.table, request.tokens[:length]):
                if features is not None:
                    self.drafter.observe(request.id, start, features, request.tokens)
            request.computed = length


class Scheduler:
    """Continuous batching: running requests in turn, and new ones with the rest of the token budget.

    Where the budget does not reach every running request, those that were left out come first in the next step, so
    that none holds KV without being fed. Whose turn it is lies in the order of `running` alone.

    Where KV blocks run out the last arrival makes room: first its slots of this step, so that it keeps its KV and
    waits; then, where that is not enough, its KV, which is computed again later. Trees stay as they are: which token a
    sampled request draws depends on its tree, and how many of a greedy one's drafts are accepted too. The first arrival
    never makes room, so every request ends after so many steps; new ones come in the order in which they arrived.
    """

    def __init__(self, room: Room, max_batch: int, max_step_tokens: int) -> None:
        self.room, self.max_batch, self.max_step_tokens = room, max_batch, max_step_tokens
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []  # in the order in which they are served

    def schedule(self, now_ns: int, *, drafts: bool) -> Schedule:
        """Choose this step's requests and reserve KV room for all that they may write, and for the largest draft.

        `drafts`: whether the step drafts.
        """
        plan, share = Schedule(self.max_step_tokens), self.max_step_tokens // SHARE
        kept = share if self.waiting and len(self.running) < self.max_batch else 0
        for request in self.running:  # what the last step kept for drafts; so what is held follows from lengths alone
            self.room.give_back(request)
        for request in list(self.running):
            if request in self.running and plan.budget > kept:
                self._plan(request, plan, plan.budget - kept, drafts=drafts)
        # Those that got nothing, or a scrap of a prefill, come first the next time
        served = {turn.request.id for turn in plan.turns if turn.decodes or turn.feed >= share}
        self.running.sort(key=lambda request: request.id in served)
        while self.waiting and len(self.running) < self.max_batch and plan.budget > 0:
            if plan.preempted or plan.held_back or not self._admit(plan, now_ns, drafts=drafts):
                break
        return plan

    def _admit(self, plan: Schedule, now_ns: int, *, drafts: bool) -> bool:
        """Take the first of the queue in, or out where it cannot run at all; False where it has to wait."""
        request = self.waiting[0]
        if request.refused:
            self._fail(self.waiting.popleft(), plan, request.refused)
            return True
        turn = self._turn(request, plan.budget, drafts=drafts)
        if not self.room.reserve(turn):
            if not self.running:
                self._fail(self.waiting.popleft(), plan)
            return not self.running
        self.waiting.popleft()
        self.running.append(request)
        if request.admitted_ns == 0:
            request.admitted_ns = now_ns
            plan.admitted.append(request)
        plan.turns.append(turn)
        return True

    def _plan(self, request: Request, plan: Schedule, budget: int, *, drafts: bool) -> None:
        """Schedule a running request; later arrivals make room for it."""
        turn = self._turn(request, budget, drafts=drafts)
        while not self.room.reserve(turn):
            later = sorted((other for other in self.running if AGE(other) > AGE(request)), key=AGE, reverse=True)
            if victim := next(filter(plan.drop, later), None):
                self.room.give_back(victim)
                plan.held_back.append(victim)
            elif later:
                self.preempt(later[0], plan)
            elif len(self.running) > 1:
                plan.held_back.append(request)  # an earlier one goes on
                return
            else:
                self.running.remove(request)
                self._fail(request, plan)
                return
        plan.turns.append(turn)

    def _turn(self, request: Request, budget: int, *, drafts: bool) -> Turn:
        pending, context = request.pending, request.context
        if self.room.root_alone and pending > 1 and len(request.tokens) > len(request.prompt_tokens):
            pending -= 1  # a request that comes back drafts again from the very step in which it would have
        feed = max(min(pending, budget), 1)
        decodes = feed == request.pending
        drafts &= decodes and (feed == 1 or not self.room.root_alone)
        return Turn(request, context, feed, decodes, self.room.nodes(context) if drafts else 0)

    def preempt(self, victim: Request, plan: Schedule) -> None:
        """Take a request's KV; it goes to the head of the queue and is computed again from its tokens."""
        self.running.remove(victim)
        plan.drop(victim)
        self.room.free(victim)
        victim.preceded = Preceded.PREEMPTION
        self.waiting.appendleft(victim)
        plan.preempted.append(victim)

    def _fail(self, request: Request, plan: Schedule, why: str = TOO_SMALL) -> None:
        request.finish, request.error = FinishReason.ERROR, why
        self.room.free(request)
        plan.failed.append(request)

    def retire(self, request: Request) -> None:
        """Take a finished or cancelled request out and free its blocks."""
        for group in (self.running, self.waiting):
            if request in group:
                group.remove(request)
        self.room.free(request)


@dataclass
class SpeculationGate:
    """Whether a step drafts at all: not where that was chosen, nor while many requests decode.

    At the limit the number of requests goes up and down from step to step, so drafting is on again only well below it.
    Prefills do not count: they come and go in bursts (vLLM 49548). Which requests draft decides how drafts fall, and
    so which tokens a sampled request is given, though not how they are distributed.
    """

    chosen: bool = True
    disable_above: int | None = None  # the most requests that decode in a step that drafts
    crowded: bool = False  # whether drafting went off because of the load

    def why_off(self, decoding: int) -> str:
        """Why the next step does not draft, in which so many requests decode; "" where it does."""
        limit = self.disable_above
        if not self.chosen or limit is None:
            return "" if self.chosen else "set to off"
        again = limit - max(limit // QUIETER, 1)
        self.crowded = decoding > (again if self.crowded else limit)
        above = f"above {limit}" if decoding > limit else f"still above {again}"
        return f"decoding requests {above}" if self.crowded else ""
