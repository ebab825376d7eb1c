"""An engine of ours, driven through recorded steps: each is one `Engine.step` with the recorded schedule, tree and
verdict, so that rounding, another dtype or machine cannot lead the run away. All else runs as it does in the engine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from specscope.analyze.audit.contexts import Contexts
from specscope.analyze.audit.options import ModelSource, Options
from specscope.analyze.findings import Reference
from specscope.engine.config import EngineConfig
from specscope.engine.engine import Engine
from specscope.engine.phases import StepState
from specscope.engine.request import Request, Turn
from specscope.engine.scheduler import Schedule
from specscope.measure.judges import engine_config_of
from specscope.model.kv_cache import BLOCK_SIZE, BlockTable
from specscope.plans.kinds import text_part
from specscope.speculate.drafters.base import Draft
from specscope.trace.history.history import History
from specscope.trace.record.records import RequestEnd, RequestStep, StepRecord
from specscope.trace.record.tree import ROOT, DraftTree, Drawn


def located_config(history: History, options: Options) -> EngineConfig:
    """The configuration of the engine that made a capture, in float32, one step at a time."""
    assert history.run is not None
    most = max((len(record.requests) for record in history.steps), default=1)
    return replace(
        engine_config_of(history.run, _named(options.target), _named(options.draft), **options.own),
        dtype="float32",
        max_batch=min(most, 1024) or 1,
        graphs="off",
        evidence="full",
        async_scheduling=False,
    )


def _named(source: ModelSource | None) -> str | None:
    """A model as --target or --draft-model takes it."""
    if source is None:
        return None
    layers, file = (source.arguments.get(key) for key in ("num_hidden_layers", "gguf_file"))
    return f"self:{layers}" if layers is not None else source.path if file is None else f"{source.path}/{file}"


@dataclass(frozen=True)
class WalkPlan:
    """Whom a walk watches, and how far it goes."""

    contexts: Mapping[str, Contexts]  # by request
    until: int  # the place in the history of the last step to run
    first: int = 0  # and of the first one

    @property
    def texts(self) -> dict[str, list[int]]:
        return {name: contexts.text for name, contexts in self.contexts.items()}


class KVStamp(NamedTuple):
    """What a request's committed KV was when a step had run: a sum over each slot's bits."""

    where: Reference  # the request's step
    slots: Tensor  # [n]
    sums: Tensor  # [layers, n]


@dataclass(frozen=True)
class KVOverwritten:
    """Committed KV of a request that changed while no step of it ran."""

    before: Reference  # the request's step after which it was still right
    layer: int  # the first in which it changed
    positions: list[int]

    @property
    def when(self) -> str:
        return f"between steps {self.before} and @{self.before.index + 1}"


@dataclass
class Drive:
    """One engine on its way through a history."""

    engine: Engine
    history: History
    only: frozenset[str] | None = None  # the requests that are run; None: all
    first: int = 0  # the place in the history from which on they are
    fed: tuple[RequestStep, ...] = ()  # whose rows are computed by the forward pass that runs now, in their order
    # Where there is one, each step is verified for real too, and shown to it before the recorded verdicts are taken
    decided: Callable[[StepState, tuple[RequestStep, ...]], None] | None = None
    stamped: frozenset[str] = frozenset()  # requests whose KV is compared again at their next step
    overwritten: list[KVOverwritten] = field(default_factory=list)
    _stamps: dict[str, KVStamp] = field(default_factory=dict)
    proposed: int = 0  # drafts that it was asked for
    otherwise: list[Reference] = field(default_factory=list)  # steps whose recorded tree it did not draft
    unlike: set[str] = field(default_factory=set)  # requests whose recorded tree has nodes that it did not draft so
    _requests: dict[str, Request] = field(default_factory=dict)
    place: int = 0  # in the history, of the step that runs
    _parts: tuple[RequestStep, ...] = ()  # those of it that are run: whose prompts are known

    def __post_init__(self) -> None:
        run = self.engine.phases.run
        forward, self._verified = run["forward"], run["verify"]

        def watched(now: StepState) -> None:
            self._compare_stamps()
            self.fed = self._parts
            try:
                forward(now)
            finally:
                self.fed = ()

        run |= {"schedule": self._schedule, "draft": self._draft, "forward": watched, "verify": self._verify}

    def steps(self, last: int) -> Iterator[StepRecord]:
        for place, record in enumerate(self.history.steps[: last + 1]):
            self.place = place
            self.engine.step()
            for part in self._parts:
                request = self._requests.get(part.request) if part.request in self.stamped else None
                if request is not None and part.request in self.engine.requests:  # else it has ended
                    held = len(request.table.blocks) * BLOCK_SIZE  # an engine that is wrong may count more
                    self._stamps[part.request] = self._stamp(part, min(request.computed, held))
            for end in record.finished:
                self._end(end)
            yield record

    def table_of(self, request: str) -> BlockTable | None:
        known = self._requests.get(request)
        return None if known is None else known.table

    def part_of(self, request: str) -> RequestStep | None:
        return next((part for part in self.history.steps[self.place].requests if part.request == request), None)

    def where(self, request: str) -> Reference:
        part = self.part_of(request)
        return Reference(request, 0 if part is None else part.index, self.history.steps[self.place].step)

    def _stamp(self, part: RequestStep, count: int) -> KVStamp:
        """The first slots of a request as they are now."""
        slots, cache = torch.from_numpy(self._requests[part.request].table.slots(0, count)), self.engine.runner.cache
        sums = []
        for key, value in zip(cache.key, cache.value, strict=True):
            rows = torch.cat([x[:, slots].transpose(0, 1).flatten(1).float() for x in (key, value)], dim=1)
            bits = rows.view(torch.int32).long()  # whole numbers: their sum is exact in any order
            sums.append((bits * torch.arange(1, bits.shape[1] + 1, device=bits.device)).sum(1))
        return KVStamp(self.where(part.request), slots, torch.stack(sums))

    def _compare_stamps(self) -> None:
        """Whether committed KV is still what it was when the request's last step had run, unless it lies elsewhere."""
        for part in self._parts:
            if (before := self._stamps.pop(part.request, None)) is not None:
                now = self._stamp(part, count := min(part.context_len, len(before.slots)))
                off = (before.sums[:, :count] != now.sums).nonzero()
                if len(off) and torch.equal(before.slots[:count], now.slots):
                    self.overwritten.append(KVOverwritten(before.where, int(off[0, 0]), off[:, 1].unique().tolist()))

    def _schedule(self, now: StepState) -> None:
        """The recorded schedule, with real KV blocks."""
        engine, record = self.engine, self.history.steps[self.place]
        room = engine.scheduler.room
        for name in record.preempted:
            if name in self._requests:
                room.free(self._requests[name])
                engine.drafter.release(name)
        for info in record.admitted:
            self._requests.pop(info.id, None)
        for running in engine.scheduler.running:
            room.give_back(running)
        now.plan = Schedule(sum(_rows(part) for part in record.requests))
        self._parts = ()
        for part in record.requests if self.place >= self.first else ():
            request = self._request(part) if self.only is None or part.request in self.only else None
            if request is None:
                continue
            decodes, context = part.verdict is not None, request.context
            nodes = max(len(part.tree), room.nodes(context) if decodes else 0)
            room.reserve(turn := Turn(request, context, part.prefill_tokens + decodes, decodes, nodes))
            now.plan.turns.append(turn)
            self._parts += (part,)

    def _draft(self, now: StepState) -> None:
        """What the drafter drafts now, with the recorded trees."""
        pairs = [pair for pair in zip(now.turns, self._parts, strict=True) if len(pair[1].tree)]
        asked = [turn for turn, part in pairs if part.notes is not None or not text_part(part.drafter)]
        self.proposed += len(asked)
        proposed = self.engine.drafter.propose([turn.context for turn in asked])
        drafted, self.unlike = {turn.request.id: draft for turn, draft in zip(asked, proposed, strict=True)}, set()
        for turn, part in pairs:
            turn.draft = self._as_recorded(part, drafted.get(part.request, Draft(part.tree)))

    def _verify(self, now: StepState) -> None:
        """The recorded verdicts, after the engine's own were shown."""
        if self.decided is not None and now.turns:
            self._verified(now)
            self.decided(now, self._parts)
        for turn, part in zip(now.turns, self._parts, strict=True):
            turn.verdict = part.verdict
        now.judged = None

    def _request(self, part: RequestStep) -> Request | None:
        """The request of a part, with the KV that it had when the step began; None where its prompt is not known."""
        engine, request = self.engine, self._requests.get(part.request)
        if request is None:
            known = self.history.requests[part.request]
            before = known.before(part.index - known.steps[0].index, part.position + 1)
            info = known.info
            if info is None or len(before) < part.context_len:
                return None
            params = replace(info.params, logprobs=None)
            request = Request(info.id, "", info.prompt_tokens.tolist(), params, info.labels, info.arrival_ns)
            request.tokens.extend(before[len(request.prompt_tokens) :])
            request.allowed = engine.forms.allowed(params)
            self._requests[part.request] = engine.requests[part.request] = request
            engine.scheduler.running.append(request)
        if request.computed != part.context_len:  # it is new, came back from the queue, or its first steps are unknown
            self._stamps.pop(part.request, None)
            engine.scheduler.room.restore([(request, part.context_len)])
        return request

    def _as_recorded(self, part: RequestStep, draft: Draft) -> Draft:
        """The draft with the recorded tree."""
        same = draft.tree.token.tolist() == part.tree.token.tolist()
        if same and draft.tree.parent.tolist() == part.tree.parent.tolist():
            return draft
        self.otherwise.append(self.where(part.request))
        model, place = self.engine.scheduler.room.model, _places(part.tree, draft.tree)
        state = None if model is None else model.states.get(part.request)
        if state is not None and len(state.fed) == len(draft.tree):
            fed = [-1 if (node := place[own]) is None else int(state.fed[node]) for own in range(len(part.tree))]
            state.fed = np.array(fed, np.int32)
        tree, q = part.tree, dict[int, Tensor]()
        for parent in {int(above) for above in tree.parent[tree.drawn != Drawn.DETERMINISTIC]}:
            drawn = None if (above := place[parent]) is None else draft.q.get(above)
            if drawn is None:  # anything will do: the request is not judged in this step
                self.unlike.add(part.request)
                vocab = self.engine.runner.loaded.vocab_size
                drawn = torch.full((vocab,), 1 / vocab)
            q[parent] = drawn
        return replace(draft, tree=tree, q=q)

    def _end(self, end: RequestEnd) -> None:
        request = self._requests.pop(end.info.id, None)
        if request is not None and end.info.id in self.engine.requests:
            self.engine.intake.retire(request)


def _places(tree: DraftTree, drafted: DraftTree) -> dict[int, int | None]:
    """Which node of another tree each node of this one is, by their paths; None: there is none."""
    child = {both: node for node, both in enumerate(zip(drafted.parent.tolist(), drafted.token.tolist(), strict=True))}
    place: dict[int, int | None] = {ROOT: ROOT}
    for node, (parent, token) in enumerate(zip(tree.parent.tolist(), tree.token.tolist(), strict=True)):
        place[node] = None if (above := place[parent]) is None else child.get((above, token))
    return place


def _rows(part: RequestStep) -> int:
    return part.prefill_tokens + (part.verdict is not None) + len(part.tree)
