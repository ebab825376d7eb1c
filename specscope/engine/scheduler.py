"""The scheduler: who runs in the next step, how many tokens each feeds, and who must make room."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from specscope.engine.request import Request
from specscope.model.kv_cache import BLOCK_SIZE, KVCache, OutOfBlocksError
from specscope.trace.records import FinishReason, Preceded

SHARE = 4  # one in so many tokens of a step: kept for who waits while the batch has a place; a prefill's turn, at least

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
    failed: list[Request] = field(default_factory=list)  # cannot run at all: their KV does not fit

    def add(self, part: Scheduled) -> None:
        """Give a request its share."""
        self.parts.append(part)
        self.budget -= part.cost

    def drop(self, request: Request) -> None:
        """Take a request's share back, where it has one."""
        self.budget += sum(part.cost for part in self.parts if part.request is request)
        self.parts = [part for part in self.parts if part.request is not request]


class Scheduler:
    """Continuous batching: running requests in turn, and new ones with the rest of the token budget.

    Where the budget does not reach every running request, those that were left out come first in the next step, so
    that none holds KV without being fed. Whose turn it is lies in the order of `running` alone. The last arrival is
    the first to make room.
    """

    def __init__(
        self, cache: KVCache, max_batch: int, max_step_tokens: int, max_nodes: int, *, root_alone: bool = False
    ) -> None:
        self.root_alone = root_alone  # the drafter needs the features of all before the root
        self.cache = cache
        self.max_batch = max_batch
        self.max_step_tokens = max_step_tokens
        self.max_nodes = max_nodes  # nodes of the largest draft tree
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []  # in the order in which they are served

    def fits(self, tokens: int) -> bool:
        """Whether a request of that many tokens can ever run."""
        return tokens + 1 + self.max_nodes <= self.cache.pool.blocks * BLOCK_SIZE

    def schedule(self, now_ns: int, nodes: Nodes) -> Schedule:
        """Choose this step's requests and reserve KV room for all that they may write.

        `nodes`: how many nodes the next draft of a request may have.
        """
        plan = Schedule(self.max_step_tokens)
        has_place = self.waiting and len(self.running) < self.max_batch
        kept = self.max_step_tokens // SHARE if has_place else 0
        for request in self.running:  # what the last step kept for drafts; so what is held follows from lengths alone
            self.cache.truncate(request.table, request.computed)
        for request in list(self.running):
            if request in self.running and plan.budget > kept:
                self._plan(request, nodes, plan, plan.budget - kept)
        self._take_turns(plan)
        while self.waiting and len(self.running) < self.max_batch and plan.budget > 0 and not plan.preempted:
            request = self.waiting[0]
            part = self._part(request, nodes, plan.budget)
            try:
                self._reserve(part)
            except OutOfBlocksError:
                if not self.running:
                    self._fail(self.waiting.popleft(), plan)
                    continue
                break
            self.waiting.popleft()
            self.running.append(request)
            if request.admitted_ns == 0:
                request.admitted_ns = now_ns
                plan.admitted.append(request)
            plan.add(part)
        return plan

    def _plan(self, request: Request, nodes: Nodes, plan: Schedule, budget: int) -> None:
        """Schedule a running request, preempting later arrivals while there is no room."""
        part = self._part(request, nodes, budget)
        while True:
            try:
                self._reserve(part)
            except OutOfBlocksError:
                victim = max(self.running, key=lambda r: r.arrival_ns)
                if victim is request and len(self.running) == 1:
                    self.running.remove(request)
                    self._fail(request, plan)
                    return
                self._preempt(victim, plan)
                if victim is request:
                    return
            else:
                plan.add(part)
                return

    def _take_turns(self, plan: Schedule) -> None:
        """Those that got nothing, or a scrap of a prefill, come first the next time."""
        turn = self.max_step_tokens // SHARE
        served = {part.request.id for part in plan.parts if part.decodes or part.feed >= turn}
        self.running.sort(key=lambda request: request.id in served)

    def _part(self, request: Request, nodes: Nodes, budget: int) -> Scheduled:
        most = request.pending
        if self.root_alone and most > 1 and len(request.tokens) > len(request.prompt_tokens):
            most -= 1  # a request that comes back drafts again from the very step in which it would have
        feed = max(min(most, budget), 1)
        decodes = feed == request.pending
        return Scheduled(request, feed, nodes(request) if decodes else 0, decodes)

    def _reserve(self, part: Scheduled) -> None:
        request = part.request
        self.cache.reserve(request.table, request.computed + part.cost, request.computed)

    def _preempt(self, victim: Request, plan: Schedule) -> None:
        """Take a request's KV; it goes to the head of the queue and is computed again from its tokens."""
        self.running.remove(victim)
        plan.drop(victim)
        self._free(victim)
        victim.computed, victim.preceded = 0, Preceded.PREEMPTION
        self.waiting.appendleft(victim)
        plan.preempted.append(victim)

    def _fail(self, request: Request, plan: Schedule) -> None:
        request.finish = FinishReason.ERROR
        request.error = "the KV cache is too small for this request alone: raise --kv-memory"
        self._free(request)
        plan.failed.append(request)

    def retire(self, request: Request) -> None:
        """Take a finished or cancelled request out and free its blocks."""
        if request in self.running:
            self.running.remove(request)
        elif request in self.waiting:
            self.waiting.remove(request)
        self._free(request)

    def _free(self, request: Request) -> None:
        self.cache.truncate(request.table, 0)
        request.kv_life += 1
