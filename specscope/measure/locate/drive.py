"""An engine of ours, driven through recorded steps: the recorded schedule, trees and verdicts, and all else for real.

What is computed in a step runs as it does in the engine: rows and masks, forward, the move of accepted paths, features,
the drafter's passes, the prefix cache. What is decided is taken from the record, so that rounding, another dtype or
another machine cannot lead the run away from what was recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from specscope.measure.audit_again import engine_config_of
from specscope.trace.history.history import History
from specscope.trace.record.records import RequestEnd, RequestStep, StepRecord

if TYPE_CHECKING:
    from specscope.engine.config import EngineConfig
    from specscope.engine.engine import Engine
    from specscope.engine.request import Request
    from specscope.speculate.drafters.base import Draft

MakeEngine = Callable[["EngineConfig"], "Engine"]


def located_config(history: History, target: str | None, draft_model: str | None) -> EngineConfig:
    """The configuration of the engine that made a capture, in float32, one step at a time."""
    assert history.run is not None
    records = history.steps
    shared = any(part.found for record in records for part in record.requests)
    return replace(
        engine_config_of(history.run, target, draft_model),
        dtype="float32",
        max_batch=min(max((len(record.requests) for record in records), default=1), 1024) or 1,
        prefix_cache=shared,
        graphs="off",
        evidence="full",
        async_scheduling=False,
        adaptive=False,
    )


@dataclass
class Drive:
    """One engine on its way through a history."""

    engine: Engine
    history: History
    fed: tuple[RequestStep, ...] = ()  # whose rows are computed by the forward pass that runs now, in their order
    other_drafts: int = 0  # drafts that came out unlike the recorded ones
    _requests: dict[str, Request] = field(default_factory=dict)

    def steps(self, last: int) -> Iterator[StepRecord]:
        """Run the steps up to the one at this place of the history; gives each when it has run."""
        for record in self.history.steps[: last + 1]:
            self._step(record)
            yield record

    def table_of(self, request: str) -> list[int]:
        """The KV blocks of a request, in order."""
        return self._requests[request].table.blocks

    def _step(self, record: StepRecord) -> None:
        from specscope.engine.scheduler import Schedule, Scheduled
        from specscope.engine.state import StepState
        from specscope.speculate.drafters.base import NO_DRAFT
        from specscope.speculate.sampling import Memory

        engine, now = self.engine, StepState(Memory())
        scheduler, room = engine.scheduler, engine.scheduler.room
        for name in record.preempted:
            if name in self._requests:
                scheduler._let_go(self._requests[name])
                engine.drafter.release(name)
        for info in record.admitted:
            self._requests.pop(info.id, None)
        for running in scheduler.running:
            room.give_back(running)
        plan = Schedule(sum(_rows(part) for part in record.requests))
        for part in record.requests:
            request = self._request(part)
            if request is None:
                continue
            nodes = max(len(part.tree), engine.drafter.most_nodes(request.context) if part.verdict is not None else 0)
            feed = part.prefill_tokens + (part.verdict is not None)
            room.reserve(request, feed + nodes, drafts=part.verdict is not None)
            plan.add(Scheduled(request, feed, nodes, part.verdict is not None))
        now.plan = plan
        parts = tuple(part for part in record.requests if any(p.request.id == part.request for p in plan.parts))
        able = [p for p, part in zip(plan.parts, parts, strict=True) if len(part.tree)]
        now.contexts = {p.request.id: p.request.context for p in able}
        proposed = dict(zip(now.contexts, engine.drafter.propose(list(now.contexts.values())), strict=True))
        now.drafts = [
            self._as_recorded(part, proposed[part.request]) if part.request in proposed else NO_DRAFT for part in parts
        ]
        with self._watched(parts):
            engine.phases.forward(now)
        now.verdicts, now.parents = [part.verdict for part in parts], [None] * len(parts)
        engine.phases.commit(now)
        engine.steps += 1
        for end in record.finished:
            self._end(end)

    @contextmanager
    def _watched(self, parts: tuple[RequestStep, ...]) -> Iterator[None]:
        self.fed = parts
        try:
            yield
        finally:
            self.fed = ()

    def _request(self, part: RequestStep) -> Request | None:
        """The request of a part, with the KV that it had when the step began; None where its prompt is not known."""
        from specscope.engine.request import Request

        engine = self.engine
        scheduler, room = engine.scheduler, engine.scheduler.room
        request = self._requests.get(part.request)
        if request is None:
            known = self.history.requests[part.request]
            before = known.before(part.index - known.steps[0].index, part.position + 1)
            info = known.info
            if info is None or len(before) < part.context_len:
                return None
            params = replace(info.params, logprobs=None)
            request = Request(info.id, "", info.prompt_tokens.tolist(), params, info.labels, info.arrival_ns)
            for token in before[len(request.prompt_tokens) :]:
                request.tokens.append(token)
            request.allowed = engine.forms.allowed(params)
            self._requests[part.request] = engine.requests[part.request] = request
            scheduler.running.append(request)
        if request.computed != part.context_len:  # it is new, came back from the queue, or its first steps are unknown
            room.free(request)
            request.computed = 0
            if part.found:
                room.adopt(request)
            if request.computed != part.context_len:
                room._fill(request, part.context_len)
                request.computed = part.context_len
        return request

    def _as_recorded(self, part: RequestStep, draft: Draft) -> Draft:
        """The draft with the recorded tree."""
        same = draft.tree.token.tolist() == part.tree.token.tolist()
        if same and draft.tree.parent.tolist() == part.tree.parent.tolist():
            return draft
        self.other_drafts += 1
        return replace(draft, tree=part.tree)

    def _end(self, end: RequestEnd) -> None:
        request = self._requests.pop(end.info.id, None)
        if request is not None and end.info.id in self.engine.requests:
            self.engine.intake.retire(request)


def _rows(part: RequestStep) -> int:
    return part.prefill_tokens + (part.verdict is not None) + len(part.tree)
