"""What a step does: its five phases, in the order in which they stand here, and how one after another is run."""

from __future__ import annotations

import time
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from specscope.engine.build import Parts
from specscope.engine.intake import Intake
from specscope.engine.request import Request
from specscope.engine.scheduler import Scheduled, Scheduler, SpeculationGate
from specscope.engine.state import NO_NODES, StepState
from specscope.model.batch import Segment
from specscope.speculate.changes import Changes
from specscope.speculate.drafters.base import NO_DRAFT
from specscope.speculate.raw_rows import form_notes
from specscope.speculate.raw_rows import logprobs as raw_logprobs
from specscope.speculate.verify.verifier import Verifier
from specscope.trace.record.records import PHASES, Phase, RequestStep, Verdict, followed_by

LOCKED = ("schedule", "commit")  # phases that nobody may add or cancel a request meanwhile


@dataclass
class Phases:
    """Schedule, draft, forward, verify, commit. Each fills its part of a StepState, on any one thread at a time."""

    parts: Parts
    intake: Intake
    scheduler: Scheduler
    verifier: Verifier
    commits: StepCommit
    gate: SpeculationGate
    device: torch.device  # of whatever thread runs a phase: Triton's launches and events go by it
    changes: Changes | None = None  # what is forced, in a fork
    clock: DeviceClock | None = None

    def run_next(self, now: StepState) -> bool:
        """Run the next phase of a step; whether it was the last."""
        name = PHASES[len(now.phases)]
        is_last = name == PHASES[-1]
        with torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext():
            if self.clock is not None:
                self.clock.mark()
            start = time.time_ns()
            with self.intake.lock if name in LOCKED else nullcontext():
                getattr(self, name)(now)
            now.phases.append(Phase(name, start, max(time.time_ns(), start)))
            if is_last and self.clock is not None:
                now.device_ns = self.clock.turn()
        return is_last

    def schedule(self, now: StepState) -> None:
        """Which requests run, what they feed, and how much each may draft."""
        drafts = self.parts.drafter.max_nodes > 0
        now.off = self.gate.why_off(self.scheduler.decoding) if drafts else "the drafter is none"
        now.plan = self.scheduler.schedule(time.time_ns(), lambda request: self._most_nodes(now, request))
        now.waiting = len(self.scheduler.waiting)
        for request in now.plan.preempted:
            self.parts.drafter.release(request.id)
        for request in now.plan.failed:
            self.intake.retire(request)
        now.finished = [*self.intake.ended, *now.plan.failed]
        self.intake.ended.clear()

    def draft(self, now: StepState) -> None:
        """Trees for the requests that decode in this step and have room for one in their context."""
        fits = [part.decodes and part.request.id in now.contexts for part in now.plan.parts]
        able = [now.contexts[part.request.id] for part, fit in zip(now.plan.parts, fits, strict=True) if fit]
        proposed = iter(self.parts.drafter.propose(able)) if able else iter(())
        now.passes = self.parts.drafter.passes if able else ()
        now.drafts = [next(proposed) if fit else NO_DRAFT for fit in fits]

    def forward(self, now: StepState) -> None:
        """Root and drafts of every request, and prefill chunks, as one ragged batch."""
        segments = [
            Segment.of_tree(
                part.request.table,
                part.request.computed,
                part.request.tokens[part.request.computed : part.request.computed + part.feed],
                draft.tree,
                logits=part.decodes,
            )
            for part, draft in zip(now.plan.parts, now.drafts, strict=True)
        ]
        if segments:
            now.logits, now.features = self.parts.runner.forward_with_features(segments)

    def verify(self, now: StepState) -> None:
        """A verdict for each request that decodes."""
        parts = zip(now.plan.parts, now.drafts, now.logits, strict=True)
        asked = [(part.request.context, draft, logits) for part, draft, logits in parts if part.decodes]
        now.judged = self.verifier.judge(asked, now.memory, self.changes)
        verdicts = iter(() if now.judged is None else now.judged.verdicts)
        now.verdicts = [next(verdicts) if part.decodes else None for part in now.plan.parts]
        now.parents = [None] * len(now.verdicts)
        if self.verifier.notes and not now.apart:
            now.note()

    def commit(self, now: StepState) -> None:
        """Tokens and KV of the accepted paths; requests that ended leave."""
        if now.features and any(len(draft.tree) for draft in now.drafts):  # a view would keep what others drafted
            rows = zip(now.features, now.drafts, strict=True)
            now.features = [features if len(draft.tree) else features.clone() for features, draft in rows]
        for i, (part, verdict) in enumerate(zip(now.plan.parts, now.verdicts, strict=True)):
            if self.parts.drafter.aux_layers:
                self.commits.show_features(part, verdict, now.features[i])
            now.parts.append(self.commits.commit(now, i))
        if now.moves:
            self.parts.runner.cache.move(list(now.moves.values()))
        for request in (part.request for part in now.plan.parts if part.request.finish is not None):
            self.intake.retire(request)
            now.finished.append(request)

    def _has_room(self, request: Request) -> bool:
        """Whether the longest draft fits into the request's context."""
        return len(request.tokens) + self.parts.drafter.max_depth < self.parts.max_context

    def _most_nodes(self, now: StepState, request: Request) -> int:
        """Nodes that the request's draft may have in this step."""
        if now.off or not self._has_room(request):
            return 0
        context = now.contexts[request.id] = request.context
        return self.parts.drafter.most_nodes(context)


@dataclass
class StepCommit:
    """What a commit does with each request."""

    parts: Parts
    full: bool  # whether all is noted

    def show_features(self, part: Scheduled, verdict: Verdict | None, features: Tensor) -> None:
        """Hand the drafter the features of what is committed: the fed tokens and the accepted path."""
        if verdict is None or not len(verdict.path):
            committed = features[: part.feed].clone() if len(features) > part.feed else features
        else:
            committed = features[[*range(part.feed), *(part.feed + verdict.path).tolist()]]
        self.parts.drafter.observe(part.request.id, part.request.computed, committed, part.request.tokens)

    def commit(self, now: StepState, place: int) -> RequestStep:
        """Keep the accepted path's KV, append what was committed, and write the record."""
        part, draft, verdict = now.plan.parts[place], now.drafts[place], now.verdicts[place]
        request, start = part.request, part.request.computed
        emitted, preceded, form, logprobs = 0, request.preceded, None, None
        request.computed += part.feed
        if verdict is not None:
            if draft is not NO_DRAFT:
                self.parts.drafter.commit(now.contexts[request.id], draft.tree, verdict)
            self._keep_path(now, request, verdict)
            form = form_notes(request.context, draft, now.logits[place], verdict, full=self.full)
            tokens = [*draft.tree.token[verdict.path].tolist(), verdict.token]
            eos = self.parts.run_info.eos_tokens
            emitted = request.accept(tokens, eos, self.parts.max_context, self.parts.vocabulary)
            request.preceded = followed_by(verdict.kind, len(verdict.outcome), verdict.accepted)
            if request.params.logprobs is not None:
                logprobs = raw_logprobs(now.logits[place], verdict, tokens[:emitted], request.params.logprobs)
        step = RequestStep(
            request=request.id,
            index=request.steps,
            context_len=start,
            prefill_tokens=part.feed - (1 if part.decodes else 0),
            drafter=self.parts.drafter.name if len(draft.tree) else "none",
            tree=draft.tree,
            verdict=verdict,
            emitted=emitted,
            notes=draft.notes,
            preceded=None if verdict is None else preceded,
            blocks=request.table.written(start, start + part.feed + len(draft.tree)),
            moved=NO_NODES if verdict is None or request.id not in now.moves else verdict.path,
            parents=now.parents[place],
            method=draft.method,
            form=form,
            logprobs=logprobs,
        )
        request.steps += 1
        return step

    def _keep_path(self, now: StepState, request: Request, verdict: Verdict) -> None:
        """The accepted path moves from where the tree lay to the slots after the root."""
        path, base = verdict.path, request.computed
        if len(path) and not np.array_equal(path, np.arange(len(path))):
            slots = request.table.slots(base, base + int(path.max()) + 1)
            now.moves[request.id] = (slots[path], slots[: len(path)])
        request.computed = base + len(path)


class DeviceClock:
    """What the phases of a step take on a GPU: the host only launches them, so its own clock says where it waited.

    A phase's time is from where the device began with it to where it began with the next: what it waited for is in it.
    The marks are read one step late: by then they have passed, and reading waits for nothing.
    """

    def __init__(self) -> None:
        self._now: list[torch.cuda.Event] = []
        self._last: list[torch.cuda.Event] = []

    def mark(self) -> None:
        """Mark the beginning of a phase."""
        self._now.append(self._make())

    def turn(self) -> tuple[int, ...]:
        """End a step. Returns what each phase of the step before it took, in nanoseconds; empty for the first."""
        self.mark()
        if self._last:
            self._last[-1].synchronize()  # it has passed, unless neither step read anything
        times = tuple(round(a.elapsed_time(b) * 1e6) for a, b in pairwise(self._last))
        self._last, self._now = self._now, []
        return times

    def give_up(self) -> None:
        """Drop the marks of a step that will not be finished."""
        self._now = []

    def _make(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event
