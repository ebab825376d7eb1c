"""The scheduler: who runs in the next step, how many tokens each feeds, and who must make room."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from specscope.engine.request import Request
from specscope.model.kv_cache import BLOCK_SIZE, KVCache, OutOfBlocksError
from specscope.trace.records import FinishReason


@dataclass
class Scheduled:
    """One request's share of a step."""

    request: Request
    feed: int  # pending tokens to feed
    decodes: bool  # whether the feed reaches the root, so that a token is drawn


@dataclass
class Schedule:
    """What one step will do. Filled by Scheduler.schedule."""

    parts: list[Scheduled] = field(default_factory=list)
    admitted: list[Request] = field(default_factory=list)  # joined the batch for the first time
    preempted: list[Request] = field(default_factory=list)
    failed: list[Request] = field(default_factory=list)  # cannot run at all: their KV does not fit


class Scheduler:
    """Continuous batching: decoding requests first, prefill chunks with the rest of the token budget."""

    def __init__(
        self, cache: KVCache, max_batch: int, max_step_tokens: int, max_nodes: int, *, root_alone: bool = False
    ) -> None:
        self.root_alone = root_alone  # the drafter needs the features of all before the root
        self.cache = cache
        self.max_batch = max_batch
        self.max_step_tokens = max_step_tokens
        self.max_nodes = max_nodes  # nodes of the largest draft tree: room is kept for them
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []  # in order of arrival

    def fits(self, tokens: int) -> bool:
        """Whether a request of that many tokens can ever run."""
        return tokens + 1 + self.max_nodes <= self.cache.pool.blocks * BLOCK_SIZE

    def schedule(self, now_ns: int) -> Schedule:
        """Choose this step's requests and reserve KV room for all that they may write."""
        plan = Schedule()
        budget = self.max_step_tokens
        for request in sorted(self.running, key=lambda r: r.pending > 1):
            if request in self.running and request not in plan.preempted:
                budget -= self._plan(request, budget, plan)
        while self.waiting and len(self.running) < self.max_batch and budget > 0 and not plan.preempted:
            request = self.waiting[0]
            part = self._part(request, budget)
            try:
                self._reserve(request, part)
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
            plan.parts.append(part)
            budget -= self._cost(part)
        return plan

    def _plan(self, request: Request, budget: int, plan: Schedule) -> int:
        """Schedule a running request, preempting later arrivals while there is no room; tokens used."""
        if budget <= 0:
            return 0
        part = self._part(request, budget)
        while True:
            try:
                self._reserve(request, part)
            except OutOfBlocksError:
                victim = self.running[-1]
                if victim is request and len(self.running) == 1:
                    self.running.remove(request)
                    self._fail(request, plan)
                    return 0
                self._preempt(victim, plan)
                if victim is request:
                    return 0
            else:
                plan.parts.append(part)
                return self._cost(part)

    def _part(self, request: Request, budget: int) -> Scheduled:
        most = request.pending
        if self.root_alone and most > 1 and request.output:
            most -= 1  # a request that comes back drafts again from the very step in which it would have
        feed = max(min(most, budget), 1)
        return Scheduled(request, feed, feed == request.pending)

    def _cost(self, part: Scheduled) -> int:
        return part.feed + (self.max_nodes if part.decodes else 0)

    def _reserve(self, request: Request, part: Scheduled) -> None:
        length = request.computed + self._cost(part)
        self.cache.reserve(request.table, length, request.computed)

    def _preempt(self, victim: Request, plan: Schedule) -> None:
        """Take a request's KV; it goes to the head of the queue and is computed again from its tokens."""
        self.running.remove(victim)
        plan.parts = [part for part in plan.parts if part.request is not victim]
        self._free(victim)
        victim.computed = 0
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
