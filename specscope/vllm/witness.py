"""Witness: makes a StepRecord of each of vLLM's steps. Its methods are called on the worker's thread, by the hooks.

A step is told when the next one begins: only then does the scheduler say which requests it ended. Where its verdicts
are still on their way from a device it is told later, and nothing waits for it.
"""

from __future__ import annotations

import dataclasses
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from specscope.trace.inside.chain import NO_FLOATS, NO_INTS
from specscope.trace.inside.gathered import Judgements
from specscope.trace.inside.recorder import Known, Recorder
from specscope.trace.record.notes import MethodNotes
from specscope.trace.record.privacy import strip
from specscope.trace.record.records import Phase, Preceded, RequestInfo, RequestStep, StepRecord
from specscope.trace.record.rules import LOSSY
from specscope.trace.record.tree import Ints
from specscope.vllm.run_info import ended, known
from specscope.vllm.scheduling import ATTRIBUTE, Arrival, Ended, SchedulerNotes

LOSSLESS = ("standard", "block")  # of `rejection_sample_method`; every other is not, or is not known to be


@dataclass
class BatchPlace:
    """A request's place in the batch of a step, as the host knows it."""

    name: str
    row: int  # in the sampler's batch
    context: int  # tokens whose KV was there; too many where the host runs ahead of the device
    count: int  # tokens that were fed, and `drafts` of them drafts
    drafts: int  # that were scheduled; fewer may have been verified
    ended_prompt: bool  # False for a chunk of a prompt that did not reach its end
    ahead: bool = False  # whether the host runs ahead of the device


class BlockLists:
    """The KV blocks of each request, as the scheduler gives them out; none where the model has several caches.

    A list grows while its request runs, and is another one after a preemption: who holds one has what was there.
    """

    def __init__(self) -> None:
        self._of: dict[str, list[int]] = {}

    def update(self, scheduled: Any) -> None:
        """`scheduled`: vLLM's SchedulerOutput. V2's preempted requests come back as new ones."""
        cached = scheduled.scheduled_cached_reqs
        new = [(request.req_id, request.block_ids) for request in scheduled.scheduled_new_reqs]
        for name in (*scheduled.finished_req_ids, *cached.resumed_req_ids, *(name for name, _ in new)):
            self._of.pop(name, None)
        for name, blocks in (*new, *zip(cached.req_ids, cached.new_block_ids, strict=True)):
            if blocks is not None and len(blocks) == 1:
                self._of.setdefault(name, []).extend(blocks[0])

    def of(self, name: str) -> list[int]:
        """A request's own list."""
        return self._of.get(name, [])


@dataclass
class _Step:
    """A step from its beginning until it is published."""

    notes: SchedulerNotes  # how things stood when it was scheduled
    tokens: int = 0  # that were scheduled
    phases: list[Phase] = field(default_factory=list)
    admitted: list[RequestInfo] = field(default_factory=list)
    resumed: list[str] = field(default_factory=list)
    places: list[tuple[BatchPlace, list[int]]] = field(default_factory=list)  # with the request's blocks
    judgements: Judgements | None = None
    budget: int | None = None  # drafts that it may verify, where that is limited
    ended: list[Ended] = field(default_factory=list)  # by what the step gave, or while it ran


class Witness:
    """What vLLM's hooks tell, put together a step at a time. It never waits, but for `settle` and `standing`."""

    def __init__(self, recorder: Recorder, *, full: bool) -> None:
        self.recorder, self.run, self.full = recorder, recorder.run, full
        self.bytes = 0  # that were copied from a device
        method = str(self.run.speculation.get("rejection_sample_method") or "standard")
        self._rule = method if method in LOSSLESS else f"{LOSSY}:{method}"
        self._requests: dict[str, Known] = {}
        self._blocks = BlockLists()
        self._running: _Step | None = None
        self._untold: deque[_Step] = deque()

    def begin(self, scheduled: Any) -> None:
        """A step begins. `scheduled`: vLLM's SchedulerOutput."""
        notes = getattr(scheduled, ATTRIBUTE, None) or SchedulerNotes()
        notes.preempted += sorted((scheduled.preempted_req_ids or set()).difference(notes.preempted))
        self.finish(notes)
        if not scheduled.total_num_scheduled_tokens:
            self.settle()  # vLLM has nothing to do: nobody may come back for what is on its way
        self._blocks.update(scheduled)
        step = self._running = _Step(notes, scheduled.total_num_scheduled_tokens)
        now = notes.schedule_ns[0] or time.time_ns()  # a request's wait ends where its first step begins
        for new in scheduled.scheduled_new_reqs:
            if new.req_id in self._requests:  # V2: one that was preempted comes back as a new one
                step.resumed.append(new.req_id)
                continue
            arrival = notes.arrived.get(new.req_id) or Arrival(now, {})
            prompt, admitted = list(new.prompt_token_ids or ()), max(now, arrival.arrival_ns)
            made = known(self.recorder, new.req_id, prompt, new.sampling_params, arrival, admitted)
            self._requests[new.req_id] = made
            step.admitted.append(made.info)
        step.resumed += [name for name in scheduled.scheduled_cached_reqs.resumed_req_ids if name in self._requests]
        if notes.schedule_ns[0]:
            self.phase("schedule", *notes.schedule_ns)

    def phase(self, name: str, start_ns: int, end_ns: int) -> None:
        """A phase of the step that runs, on the host's clock. A start of 0 means: where the one before ended."""
        if self._running is not None and self._running.tokens:
            before = self._running.phases[-1].end_ns if self._running.phases else end_ns
            self._running.phases.append(Phase(name, start_ns or before, max(end_ns, start_ns or before)))

    def judged(self, places: Sequence[BatchPlace], judgements: Judgements, budget: int | None = None) -> None:
        """The sampler has run. `budget`: how many drafts were verified, where that is limited."""
        if self._running is None:
            return
        there = [place for place in places if place.name in self._requests]
        self._running.places = [(place, self._blocks.of(place.name)) for place in there]
        self._running.judgements, self._running.budget = judgements, budget
        self.bytes += judgements.bytes

    def finish(self, notes: SchedulerNotes | None) -> None:
        """The step that ran is over, with what the scheduler ended since. None: there is no next step."""
        ends = notes.ended if notes else []
        step, self._running = self._running, None
        if step is None and not ends:
            return
        step = step or _Step(SchedulerNotes())
        step.ended = ends
        self._untold.append(step)
        self._tell()

    def rest(self, notes: SchedulerNotes | None) -> None:
        """Likewise, and no step may follow: this waits for what is on its way."""
        self.finish(notes)
        self.settle()

    def _tell(self) -> None:
        """Publish the steps whose verdicts have come, in order."""
        while self._untold and ((first := self._untold[0]).judgements is None or first.judgements.ready()):
            self._publish(self._untold.popleft())

    def settle(self) -> None:
        """Publish the steps before the one that runs, and wait for what is on its way."""
        for step in self._untold:
            if step.judgements is not None:
                step.judgements.wait()
        self._tell()

    def standing(self) -> StepRecord | None:
        """The step that runs, as far as it has come, without what privacy leaves out."""
        step = self._running
        if step is None:
            return None
        if step.judgements is not None:
            step.judgements.wait()
        copies = {name: dataclasses.replace(request) for name, request in self._requests.items()}
        return strip(self._record(step, self._parts(step, copies)), self.run.privacy)

    def _publish(self, step: _Step) -> None:
        parts = self._parts(step, self._requests)
        there = [(end, self._requests.get(end.request)) for end in step.ended]  # not those that never ran
        told = self.run.eos_tokens, self.recorder.vocabulary
        finished = tuple(ended(end, known.info, *told) for end, known in there if known is not None)
        preempted = tuple(name for name in step.notes.preempted if name in self._requests)
        if not (parts or finished or preempted or step.admitted):
            return
        outputs = {end.info.id: len(end.output) for end in finished}
        parts = [self._corrected(part, outputs.get(part.request)) for part in parts]
        record = self._record(step, parts, preempted=preempted, finished=finished)
        for name in outputs:
            self._requests.pop(name, None)
        self.recorder.publish(record)

    def _record(self, step: _Step, parts: Sequence[RequestStep], **more: Any) -> StepRecord:
        state = {name: getattr(step.notes, name) for name in ("running", "waiting", "blocks_used", "blocks_free")}
        return self.recorder.record(step.phases, parts, admitted=step.admitted, budget=step.budget, **state, **more)

    def _parts(self, step: _Step, requests: dict[str, Known]) -> list[RequestStep]:
        """The parts of the requests in its batch, whose counts move on."""
        for name in step.resumed:
            requests[name].preceded = Preceded.PREEMPTION
        there = [(place, blocks) for place, blocks in step.places if place.name in requests]
        return [self._part(place, blocks, step.judgements, requests[place.name]) for place, blocks in there]

    def _part(self, place: BatchPlace, blocks: list[int], judgements: Judgements | None, request: Known) -> RequestStep:
        def written(context: int, count: int) -> Ints:
            """The KV blocks that so many tokens behind a context are written to."""
            size = self.run.block_size
            return np.array(blocks[context // size : (context + count - 1) // size + 1], NO_INTS.dtype)

        if not place.ended_prompt or judgements is None:
            return request.chunk(place.context, place.count, written(place.context, place.count))
        judged = judgements.of(place.row)
        prefill, verified = place.count - 1 - place.drafts, len(judged.tree) + judged.invalid
        context = request.context if place.ahead and not prefill and request.committed else place.context
        tokens = [*judged.tree.token[judged.verdict.path].tolist(), judged.verdict.token]
        method = MethodNotes(
            confidence=NO_FLOATS if judged.confidence is None else judged.confidence,
            unverified=max(place.drafts - verified, 0),
        )
        return self.recorder.decoded(
            request,
            judged,
            request.kept(tokens, self.run.max_context),
            context=context,
            prefill=prefill,
            rule=self._rule,
            method=method,
            sizing=f"{judged.invalid} invalid drafts left out" if judged.invalid else "",
            blocks=written(context, prefill + 1 + verified),
        )

    def _corrected(self, part: RequestStep, output: int | None) -> RequestStep:
        """A request's last step gave out what vLLM says it did: a stop that we do not know of may have cut it.

        `output`: the tokens that vLLM gave back, where the request has ended.
        """
        if output is None or part.verdict is None:
            return part
        emitted = part.emitted - (self._requests[part.request].emitted - output)
        return dataclasses.replace(part, emitted=min(max(emitted, 0), part.verdict.accepted + 1))
