"""Witness: makes a StepRecord of each of vLLM's steps. Its methods are called on the worker's thread, by the hooks.

A step is told when the next one begins: only then does the scheduler say which requests it ended.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from specscope.trace.records import (
    Phase,
    Preceded,
    RequestEnd,
    RequestInfo,
    RequestStep,
    RunInfo,
    StepRecord,
    followed_by,
)
from specscope.trace.tree import DraftTree
from specscope.trace.vocabulary import Vocabulary
from specscope.vllm.call import Call
from specscope.vllm.judged import NO_FLOATS, NO_INTS, Judged, judge
from specscope.vllm.requests import Known, ended, known
from specscope.vllm.scheduling import ATTRIBUTE, Arrival, Ended, SchedulerNotes

NO_TREE = DraftTree(NO_INTS, NO_INTS, NO_FLOATS, np.zeros(0, np.uint8))
Publish = Callable[[StepRecord], None]


class _Begun:
    """A step while it runs."""

    def __init__(self, scheduled: Any, notes: SchedulerNotes) -> None:
        self.scheduled = scheduled  # vLLM's SchedulerOutput
        self.notes = notes
        self.phases: list[Phase] = []
        self.admitted: list[RequestInfo] = []
        self.parts: list[RequestStep] = []
        self.drafter: dict[str, list[Tensor]] = {}  # the drafter's logits for each request's drafts


class Witness:
    """`publish` takes each finished record, and must not wait."""

    def __init__(self, run: RunInfo, vocabulary: Vocabulary, publish: Publish, *, full: bool) -> None:
        self.run = run
        self._vocabulary, self._publish, self._full = vocabulary, publish, full
        self._requests: dict[str, Known] = {}
        self._begun: _Begun | None = None
        self._steps = 0
        self._scores: list[Tensor] = []  # the drafter's logits, one pass after the other, while it drafts
        self._scored: dict[str, tuple[list[Tensor], int]] = {}  # by request: the passes, and its row in each
        self._listens = False

    def begin(self, scheduled: Any) -> None:
        """A step begins. `scheduled`: vLLM's SchedulerOutput."""
        notes = getattr(scheduled, ATTRIBUTE, None) or SchedulerNotes()
        self.finish(notes)
        begun = self._begun = _Begun(scheduled, notes)
        now = time.time_ns()
        for new in scheduled.scheduled_new_reqs:
            arrival = notes.arrived.get(new.req_id) or Arrival(now, {})
            made = known(
                new.req_id, list(new.prompt_token_ids or ()), new.sampling_params, arrival, now, self._vocabulary
            )
            self._requests[new.req_id] = made
            begun.admitted.append(made.info)
        for name in scheduled.scheduled_cached_reqs.resumed_req_ids:
            if name in self._requests:
                self._requests[name].preceded = Preceded.PREEMPTION
        if notes.schedule_ns[0]:
            self.phase("schedule", *notes.schedule_ns)

    def phase(self, name: str, start_ns: int, end_ns: int) -> None:
        """A phase of the step that runs, on the host's clock. A start of 0 means: where the one before ended."""
        if self._begun is not None and self._begun.scheduled.total_num_scheduled_tokens:
            before = self._begun.phases[-1].end_ns if self._begun.phases else end_ns
            self._begun.phases.append(Phase(name, start_ns or before, max(end_ns, start_ns or before)))

    def judged(self, runner: Any, call: Call | None) -> None:
        """The sampler has run. `runner`: vLLM's, whose batch still is as it was judged."""
        if self._begun is None or call is None:
            return
        batch, scheduled = runner.input_batch, self._begun.scheduled
        names = list(batch.req_ids)
        unfinished = runner.discard_request_mask.np[: len(names)].copy()
        for row, name in enumerate(names):
            if name not in self._requests or name not in scheduled.num_scheduled_tokens:
                continue
            context, count = int(batch.num_computed_tokens_cpu[row]), scheduled.num_scheduled_tokens[name]
            self._begun.drafter[name] = self._drafter(name)
            one = None if unfinished[row] else judge(call, row, self._begun.drafter[name], full=self._full)
            blocks = _blocks(batch, row, context, count, self.run.block_size)
            self._begun.parts.append(self._part(name, context, count, one, blocks))

    def standing(self) -> StepRecord | None:
        """The step that runs, as far as it has come."""
        return None if self._begun is None else self._record(self._begun, tuple(self._begun.parts))

    def drafter_logits(self, name: str, node: int) -> Tensor | None:
        """What the drafter's model gave where it drafted a node of the step that runs; None where it told nothing."""
        known = [] if self._begun is None else self._begun.drafter.get(name, [])
        return known[node] if node < len(known) else None

    def judge_again(self, call: Call, row: int, name: str) -> None:
        """A decision was forced: the request's part of the step that runs is another now."""
        assert self._begun is not None
        parts, request = self._begun.parts, self._requests[name]
        at = next(at for at, part in enumerate(parts) if part.request == name)
        old = parts[at]
        request.index, request.emitted = old.index, request.emitted - old.emitted
        request.preceded = old.preceded or request.preceded
        one = judge(call, row, self._begun.drafter[name], full=self._full)
        count = old.prefill_tokens + 1 + len(one.tree) + one.invalid
        parts[at] = self._part(name, old.context_len, count, one, old.blocks)

    def _drafter(self, name: str) -> list[Tensor]:
        """The drafter's logits [V] for each of a request's drafts; empty where it tells none."""
        passes, row = self._scored.pop(name, ((), 0))
        return [one[row] for one in passes]

    def _part(self, name: str, context: int, count: int, one: Judged | None, blocks: np.ndarray) -> RequestStep:
        request = self._requests[name]
        index, request.index = request.index, request.index + 1
        if one is None:
            return RequestStep(name, index, context, count, "none", NO_TREE, None, 0, blocks=blocks)
        verdict, preceded = one.verdict, request.preceded
        tokens = [*one.tree.token[verdict.path].tolist(), verdict.token]
        emitted = request.kept(tokens, self.run.max_context)
        request.emitted += emitted
        request.preceded = followed_by(verdict)
        return RequestStep(
            request=name,
            index=index,
            context_len=context,
            prefill_tokens=count - 1 - len(one.tree) - one.invalid,
            drafter=self.run.drafter if len(one.tree) else "none",
            tree=one.tree,
            verdict=verdict,
            emitted=emitted,
            notes=one.notes,
            sizing=f"{one.invalid} invalid drafts left out" if one.invalid else "",
            rule=str(self.run.speculation.get("rejection_sample_method") or "standard"),
            preceded=preceded,
            blocks=blocks,
            parents=one.parents,
        )

    def drafts(self, runner: Any) -> None:
        """The drafter begins to draft for the next step."""
        if self._begun is not None:
            self._begun.drafter.clear()
        if not self._listens:
            self._listens = True
            self._listen(getattr(runner.drafter, "model", None))
        self._scores = []

    def drafted(self, runner: Any) -> None:
        """It has drafted, for the rows of the batch."""
        names = list(runner.input_batch.req_ids)
        passes, self._scores = self._scores, []
        if self._full and all(len(one) == len(names) and one.device.type == "cpu" for one in passes):
            self._scored = {name: (passes, row) for row, name in enumerate(names)}

    def _listen(self, model: Any) -> None:
        """Keep what this drafter's own model says while it drafts; n-gram and suffix have none."""
        original = getattr(model, "compute_logits", None)
        if original is None:
            return

        sampled = self.run.speculation.get("draft_sample_method") == "probabilistic"

        def compute_logits(*args: Any, **kwargs: Any) -> Any:
            logits = original(*args, **kwargs)
            if isinstance(logits, Tensor):  # sampling divides them by the temperature in place
                self._scores.append(logits.clone() if sampled else logits)
            return logits

        model.compute_logits = compute_logits

    def finish(self, notes: SchedulerNotes | None) -> None:
        """Publish the step that ran, with what the scheduler ended since. None: there is no next step."""
        begun, self._begun = self._begun, None
        finished = [] if notes is None else [self._end(one) for one in notes.ended]
        preempted = () if notes is None else tuple(name for name in notes.preempted if name in self._requests)
        if begun is None and not finished:
            return
        parts = () if begun is None else tuple(self._corrected(begun.parts, finished))
        if not (parts or finished or preempted or (begun is not None and begun.admitted)):
            return
        for end in finished:
            self._requests.pop(end.info.id, None)
        record = self._record(begun, parts, preempted, tuple(finished))
        self._steps += 1
        self._publish(record)

    def _record(
        self,
        begun: _Begun | None,
        parts: tuple[RequestStep, ...],
        preempted: tuple[str, ...] = (),
        finished: tuple[RequestEnd, ...] = (),
    ) -> StepRecord:
        now = time.time_ns()
        stands = SchedulerNotes() if begun is None else begun.notes
        return StepRecord(
            step=self._steps,
            phases=(() if begun is None else tuple(begun.phases)) or (Phase("schedule", now, now),),
            running=stands.running,
            waiting=stands.waiting,
            blocks_used=stands.blocks_used,
            blocks_free=stands.blocks_free,
            speculation=bool(self.run.speculation),
            speculation_off="" if self.run.speculation else "vLLM runs without a speculative config",
            admitted=() if begun is None else tuple(begun.admitted),
            requests=parts,
            preempted=preempted,
            finished=finished,
        )

    def _end(self, end: Ended) -> RequestEnd:
        request = self._requests.get(end.request)
        if request is None:  # it was aborted before it was admitted
            request = known(end.request, end.prompt, end.params, Arrival(end.finished_ns, {}), 0, self._vocabulary)
        return ended(end, request.info, self.run.eos_tokens)

    def _corrected(self, parts: Sequence[RequestStep], finished: Sequence[RequestEnd]) -> list[RequestStep]:
        """A request's last step gave out what vLLM says it did: a stop that we do not know of may have cut it."""
        outputs = {end.info.id: len(end.output) for end in finished}
        found = []
        for part in parts:
            request = self._requests.get(part.request)
            if part.request in outputs and request is not None and part.verdict is not None:
                surplus = request.emitted - outputs[part.request]
                emitted = min(max(part.emitted - surplus, 0), part.verdict.accepted + 1)
                part = part if emitted == part.emitted else _with_emitted(part, emitted)
            found.append(part)
        return found


def _with_emitted(part: RequestStep, emitted: int) -> RequestStep:
    values = {name: getattr(part, name) for name in part.__dataclass_fields__}
    return RequestStep(**(values | {"emitted": emitted}))


def _blocks(batch: Any, row: int, context: int, count: int, size: int) -> np.ndarray:
    """The KV blocks that a step writes to; none where the model has several kinds of cache."""
    tables = batch.block_table.block_tables
    if len(tables) != 1:
        return NO_INTS
    table: np.ndarray = tables[0].block_table.np[row]
    return table[context // size : (context + count - 1) // size + 1].astype(np.int32)
