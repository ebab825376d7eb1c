"""What a step does: its five phases, in the order in which they stand here."""

from __future__ import annotations

import time

import numpy as np
from torch import Tensor

from specscope.engine.gate import SpeculationGate
from specscope.engine.request import Request
from specscope.engine.scheduler import Scheduled, Scheduler
from specscope.engine.state import NO_NODES, StepState
from specscope.engine.timeline import Timeline
from specscope.model.batch import Segment
from specscope.model.runner import ModelRunner
from specscope.speculate.drafters.base import NO_DRAFT, Drafter
from specscope.speculate.raw_rows import form_notes
from specscope.speculate.raw_rows import logprobs as raw_logprobs
from specscope.speculate.sizing.sizer import Sizer
from specscope.speculate.verify.verifier import Verifier
from specscope.trace.changes import Changes
from specscope.trace.record.records import RequestStep, RunInfo, Verdict, followed_by
from specscope.trace.record.vocabulary import Vocabulary


class PhasesMixin:
    """Schedule, draft, forward, verify, commit. Each fills its part of a StepState; the engine sequences them."""

    scheduler: Scheduler
    drafter: Drafter
    runner: ModelRunner
    verifier: Verifier
    sizer: Sizer | None  # where trees are adaptive
    gate: SpeculationGate
    changes: Changes | None  # what is forced, in a fork
    timeline: Timeline | None
    requests: dict[str, Request]
    ended: list[Request]
    run_info: RunInfo
    vocabulary: Vocabulary
    max_context: int

    def _schedule(self, now: StepState) -> None:
        now.off = "the drafter is none" if not self.drafter.max_nodes else self.gate.why_off(self.scheduler.decoding)
        self.scheduler.room.found_then = None if self.timeline is None else self.timeline.found_then
        now.plan = self.scheduler.schedule(time.time_ns(), lambda request: self._most_nodes(now, request))
        now.waiting = len(self.scheduler.waiting)
        for request in now.plan.preempted:
            self.drafter.release(request.id)
        for request in now.plan.failed:
            self._retire(request)
        now.finished = [*self.ended, *now.plan.failed]
        self.ended = []

    def _draft(self, now: StepState) -> None:
        """Trees for the requests that decode in this step and have room for one in their context."""
        fits = [part.decodes and part.request.id in now.contexts for part in now.plan.parts]
        able = [now.contexts[part.request.id] for part, fit in zip(now.plan.parts, fits, strict=True) if fit]
        proposed = iter(self.drafter.propose(able)) if able else iter(())
        now.passes = self.drafter.passes if able else ()
        now.drafts = [next(proposed) if fit else NO_DRAFT for fit in fits]

    def _has_room(self, request: Request) -> bool:
        """Whether the longest draft fits into the request's context."""
        return len(request.tokens) + self.drafter.max_depth < self.max_context

    def _most_nodes(self, now: StepState, request: Request) -> int:
        """Nodes that the request's draft may have in this step; where trees are adaptive, its budget is set here."""
        if now.off or not self._has_room(request):
            return 0
        budget = None
        if self.sizer is not None:
            batch = max(len(self.scheduler.running), 1)
            greedy, length = request.params.greedy, len(request.tokens)
            budget = now.budgets[request.id] = self.sizer.choose(request.id, batch, greedy=greedy, length=length)
            if budget.is_off:
                return 0
        context = now.contexts[request.id] = request.to_draft(budget)
        return self.drafter.most_nodes(context)

    def _forward(self, now: StepState) -> None:
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
            now.logits, now.features = self.runner.forward_with_features(segments)

    def _verify(self, now: StepState) -> None:
        parts = zip(now.plan.parts, now.drafts, now.logits, strict=True)
        asked = [(part.request.context, draft, logits) for part, draft, logits in parts if part.decodes]
        now.judged = self.verifier.judge(asked, now.memory, self.changes)
        verdicts = iter(() if now.judged is None else now.judged.verdicts)
        now.verdicts = [next(verdicts) if part.decodes else None for part in now.plan.parts]
        now.parents = [None] * len(now.verdicts)
        if self.verifier.notes and not now.apart:
            now.note()

    def _commit(self, now: StepState) -> None:
        if now.features and any(len(draft.tree) for draft in now.drafts):  # a view would keep what others drafted
            rows = zip(now.features, now.drafts, strict=True)
            now.features = [features if len(draft.tree) else features.clone() for features, draft in rows]
        for i, (part, verdict) in enumerate(zip(now.plan.parts, now.verdicts, strict=True)):
            if self.drafter.aux_layers:
                self._show_features(part, verdict, now.features[i])
            now.parts.append(self._commit_one(now, i))
        if now.moves:
            self.runner.cache.move(list(now.moves.values()))
        self.scheduler.publish(now.plan)  # what was moved is final now
        for request in (part.request for part in now.plan.parts if part.request.finish is not None):
            self._retire(request)
            now.finished.append(request)

    def _show_features(self, part: Scheduled, verdict: Verdict | None, features: Tensor) -> None:
        """Hand the drafter the features of what is committed: the fed tokens and the accepted path."""
        if verdict is None or not len(verdict.path):
            kept = features[: part.feed].clone() if len(features) > part.feed else features
        else:
            kept = features[[*range(part.feed), *(part.feed + verdict.path).tolist()]]
        self.drafter.observe(part.request.id, part.request.computed, kept, part.request.tokens)

    def _commit_one(self, now: StepState, place: int) -> RequestStep:
        """Keep the accepted path's KV, append what was committed, and write the record."""
        part, draft, verdict = now.plan.parts[place], now.drafts[place], now.verdicts[place]
        request, start, budget = part.request, part.request.computed, now.budgets.get(part.request.id)
        emitted, preceded, form, logprobs = 0, request.preceded, None, None
        request.computed += part.feed
        if verdict is not None:
            if draft is not NO_DRAFT:
                self.drafter.commit(now.contexts[request.id], draft.tree, verdict)
            self._keep_path(now, request, verdict)
            form = form_notes(request.context, draft, now.logits[place], verdict, full=self.verifier.notes)
            tokens = [*draft.tree.token[verdict.path].tolist(), verdict.token]
            emitted = request.accept(tokens, self.run_info.eos_tokens, self.max_context, self.vocabulary)
            request.preceded = followed_by(verdict)
            if request.params.logprobs is not None:
                logprobs = raw_logprobs(now.logits[place], verdict, tokens[:emitted], request.params.logprobs)
        step = RequestStep(
            request=request.id,
            index=request.steps,
            context_len=start,
            prefill_tokens=part.feed - (1 if part.decodes else 0),
            drafter=self.drafter.name if len(draft.tree) else "none",
            tree=draft.tree,
            verdict=verdict,
            emitted=emitted,
            notes=draft.notes,
            sizing=budget.reason if budget is not None and (draft.levels or not budget.depth) else "",
            preceded=None if verdict is None else preceded,
            blocks=request.table.written(start, start + part.feed + len(draft.tree)),
            moved=NO_NODES if verdict is None or request.id not in now.moves else verdict.path,
            parents=now.parents[place],
            method=draft.method,
            form=form,
            logprobs=logprobs,
            found=request.found,
        )
        request.steps, request.found = request.steps + 1, 0
        return step

    def _keep_path(self, now: StepState, request: Request, verdict: Verdict) -> None:
        """The accepted path moves from where the tree lay to the slots after the root."""
        path, base = verdict.path, request.computed
        if len(path) and not np.array_equal(path, np.arange(len(path))):
            slots = request.table.slots(base, base + int(path.max()) + 1)
            now.moves[request.id] = (slots[path], slots[: len(path)])
        request.computed = base + len(path)

    def _retire(self, request: Request) -> None:
        self.scheduler.retire(request)
        self.drafter.release(request.id)
        self.requests.pop(request.id, None)
