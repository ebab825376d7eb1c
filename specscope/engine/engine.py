"""The engine: sequences the phases of a step (schedule, draft, forward, verify, commit), and nothing more."""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from torch import Tensor

from specscope.engine.build import Parts, build_parts
from specscope.engine.clock import DeviceClock
from specscope.engine.config import EngineConfig
from specscope.engine.generate import GenerateMixin, Prompt, check_length, title_of
from specscope.engine.request import Request
from specscope.engine.scheduler import Scheduled, Scheduler
from specscope.engine.state import NO_NODES, PHASES, LastStep, StepState
from specscope.engine.timeline import Timeline
from specscope.errors import UserError
from specscope.model.batch import Segment
from specscope.speculate.adaptive import Sizer
from specscope.speculate.drafters.base import NO_DRAFT, Context
from specscope.speculate.verify.verifier import Verifier
from specscope.trace.bus import Bus, Sink, Subscription
from specscope.trace.changes import Changes
from specscope.trace.params import SamplingParams
from specscope.trace.plan import DynamicPlan
from specscope.trace.records import FinishReason, Moved, Phase, RequestStep, RunInfo, StepRecord, Verdict, followed_by
from specscope.trace.vocabulary import Vocabulary


class Engine(GenerateMixin):
    """A target, a drafter, and the requests that they serve.

    Engine(target="folder", drafter="ngram") or Engine(EngineConfig(...)). Not thread-safe: one thread steps it.
    """

    def __init__(
        self,
        config: EngineConfig | None = None,
        *,
        progress: Callable[[str], None] = lambda _: None,
        parts: Parts | None = None,
        changes: Changes | None = None,
        **settings: Any,  # noqa: ANN401
    ) -> None:
        if config is not None and settings:
            raise UserError("give Engine a config or settings, not both")
        self.config = config or EngineConfig(**settings)
        parts = parts or build_parts(self.config, progress)
        self.changes = changes  # what is forced in it, where it is a fork
        self.runner = parts.runner
        self.drafter = parts.drafter
        self.verifier = Verifier(
            self.runner.cache.backend, notes=parts.run_info.evidence == "full", rule=self.config.rule
        )
        self.tokenizer = parts.tokenizer
        self.vocabulary: Vocabulary = parts.vocabulary
        self._longest = max(map(len, self.vocabulary.pieces.values()), default=1)  # bytes of a token
        self.max_context = parts.max_context
        self.run_info: RunInfo = parts.run_info
        self.bus = Bus()
        self.scheduler = Scheduler(
            self.runner.cache,
            self.config.max_batch,
            self.config.max_step_tokens,
            self.drafter.max_nodes,
            root_alone=bool(self.drafter.aux_layers),
        )
        plan = self.config.plan
        self.sizer = Sizer(plan, parts.costs) if parts.costs is not None and isinstance(plan, DynamicPlan) else None
        self.clock = DeviceClock() if self.runner.loaded.device.type == "cuda" else None
        self.steps = 0
        self.current: StepState | None = None  # a step that was begun and not finished
        self.last: LastStep | None = None  # kept to be looked at, where there is a timeline
        self._cancel_later: list[str] = []
        self._names = itertools.count()
        self.timeline: Timeline | None = None
        self.requests: dict[str, Request] = {}  # waiting and running, by id
        self.ended: list[Request] = []  # cancelled or failed between steps; reported by the next one

    # Requests

    def add(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        name: str | None = None,
        labels: Mapping[str, str] | None = None,
    ) -> str:
        """Queue a request and return its id. Raises UserError for a prompt that cannot run."""
        text, tokens = self.encode(prompt)
        if name in self.requests:
            raise UserError(f"a request named {name!r} is already running")
        if not tokens:
            raise UserError("the prompt is empty: it has no tokens")
        if len(tokens) >= self.max_context:
            raise UserError(f"the prompt has {len(tokens)} tokens; the limit is {self.max_context - 1}")
        if not self.scheduler.fits(len(tokens)):
            raise UserError(f"the prompt has {len(tokens)} tokens, more than the KV cache holds: raise --kv-memory")
        params = params or SamplingParams()
        outside = max(params.logit_bias, default=0)
        if outside >= self.runner.loaded.vocab_size:
            raise UserError(f"logit_bias: token id {outside} is outside the vocabulary ({self._ids()})")
        name = self._new_name() if name is None else name
        request = Request(name, text, tokens, params, labels or {}, time.time_ns(), title_of(prompt))
        self.requests[name] = request
        self.scheduler.waiting.append(request)
        if self.timeline is not None:
            self.timeline.arrived(request)
        return name

    def _new_name(self) -> str:
        return next(name for i in self._names if (name := f"r{i}") not in self.requests)

    def encode(self, prompt: Prompt) -> tuple[str, list[int]]:
        """(text, token ids) of a prompt: text as it is, chat messages through the model's template, or ids."""
        check_length(prompt, self.max_context, self._longest)
        if isinstance(prompt, str):
            return prompt, list(self.tokenizer(prompt)["input_ids"])
        if prompt and isinstance(prompt[0], Mapping):
            if not self.tokenizer.chat_template:
                raise UserError("chat messages need a model with a chat template: give the prompt as text")
            try:
                text = self.tokenizer.apply_chat_template(list(prompt), add_generation_prompt=True, tokenize=False)
            except Exception as error:
                raise UserError(f"the chat template rejects these messages: {error}") from error
            return text, list(self.tokenizer(text, add_special_tokens=False)["input_ids"])
        tokens = [int(t) for t in prompt]  # type: ignore[arg-type]
        bad = next((t for t in tokens if not 0 <= t < self.runner.loaded.vocab_size), None)
        if bad is not None:
            raise UserError(f"token id {bad} is outside the vocabulary ({self._ids()})")
        return "", tokens

    def _ids(self) -> str:
        return f"0 to {self.runner.loaded.vocab_size - 1}"

    def turn(self, prompt: Prompt, *, raw: bool = False) -> Prompt:
        """Text as a chat turn of the user, where the model has a chat template and `raw` is False."""
        if isinstance(prompt, str) and not raw and self.tokenizer.chat_template:
            return [{"role": "user", "content": prompt}]
        return prompt

    def cancel(self, name: str) -> None:
        """End a request now; what it has emitted stays. Unknown or ended ids are ignored.

        Between the phases of a step it ends after the step.
        """
        if self.current is not None:
            self._cancel_later.append(name)
            return
        request = self.requests.get(name)
        if request is not None:
            if self.timeline is not None:
                self.timeline.arrived(request, cancels=True)
            request.finish = FinishReason.CANCELLED
            self._retire(request)
            self.ended.append(request)

    def cancel_all(self) -> None:
        """End every request now; the next step reports them."""
        for name in list(self.requests):
            self.cancel(name)

    @property
    def busy(self) -> bool:
        """Whether a step would do anything."""
        return bool(self.requests or self.ended or self.current)  # a step that was begun may be all that is left

    def subscribe(self, sink: Sink, *, lossless: bool = False) -> Subscription:
        """Hand every record to `sink`, on a thread of its own. A lossless sink may make the engine wait."""
        return self.bus.subscribe(sink, lossless=lossless)

    def close(self) -> None:
        """Flush and close every sink."""
        self.bus.close()

    # A step

    def step(self) -> StepRecord:
        """Run one step over all requests, or what is left of it, and publish its record."""
        while True:
            record = self.phase()
            if record is not None:
                return record

    def phase(self) -> StepRecord | None:
        """Run the next phase of a step; the record after the last. Between phases `current` holds what there is."""
        if self.current is None:
            if self.timeline is not None:
                self.timeline.note(self)
            self.current = StepState()
        now = self.current
        name = PHASES[len(now.phases)]
        if self.clock is not None:
            self.clock.mark()
        start = time.time_ns()
        getattr(self, f"_{name}")(now)
        now.phases.append(Phase(name, start, max(time.time_ns(), start)))
        if len(now.phases) < len(PHASES):
            return None
        return self._end(now, self._record(now))

    def _end(self, now: StepState, record: StepRecord) -> StepRecord:
        """The step is whole: number it, publish it, or say that it came out as it is known."""
        is_new = True
        if self.timeline is not None:
            record, is_new = self.timeline.settle(record)
            self.last = LastStep(record, now)
        if self.sizer is not None:
            self.sizer.learn(now.outcomes())
            for ended in now.finished:
                self.sizer.forget(ended.id)
        self.current = None
        self.steps = record.step + 1 if self.timeline is None else self.timeline.step
        while self._cancel_later:
            self.cancel(self._cancel_later.pop(0))
        self.bus.publish(record if is_new else Moved(record.step))
        return record

    def keep_timeline(self) -> Timeline:
        """Keep what going back takes, from the next step on."""
        self.timeline = self.timeline or Timeline(self.run_info.dtype, self.steps, self.steps - 1)
        return self.timeline

    def rewind(self, step: int) -> None:
        """Make the engine what it was before `step`; a step that was begun is given up. Raises UserError."""
        if self.timeline is None:
            raise UserError("this engine keeps no timeline, so it cannot go back")
        if step == self.steps and self.current is None:
            return
        self.timeline.rewind(self, step)
        self.current, self.last, self.steps = None, None, self.timeline.step
        self._cancel_later.clear()
        if self.clock is not None:
            self.clock.give_up()
        self.bus.publish(Moved(self.timeline.last))

    def _schedule(self, now: StepState) -> None:
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
        fits = [part.decodes and self._has_room(part.request) for part in now.plan.parts]
        able = [self._context(now, part.request) for part, fit in zip(now.plan.parts, fits, strict=True) if fit]
        now.budgets = {context.request: context.budget for context in able if context.budget is not None}
        proposed = iter(self.drafter.propose(able)) if able else iter(())
        now.passes = self.drafter.passes if able else ()
        now.drafts = [next(proposed) if fit else NO_DRAFT for fit in fits]

    def _has_room(self, request: Request) -> bool:
        """Whether the longest draft fits into the request's context."""
        return len(request.tokens) + self.drafter.max_depth < self.max_context

    def _most_nodes(self, now: StepState, request: Request) -> int:
        """Nodes that the request's draft may have in this step; where trees are adaptive, its budget is set here."""
        if not self._has_room(request):
            return 0
        if self.sizer is not None:
            batch = max(len(self.scheduler.running), 1)
            now.budgets[request.id] = self.sizer.choose(request.id, batch, greedy=request.params.greedy)
        return self.drafter.most_nodes(self._context(now, request))

    def _context(self, now: StepState, request: Request) -> Context:
        """What the drafter may know of a request, and how much it shall draft where trees are adaptive."""
        budget = now.budgets.get(request.id)
        return request.context if budget is None else dataclasses.replace(request.context, budget=budget)

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
        judged = iter(self.verifier.verify(asked, self.changes))
        both = [next(judged) if part.decodes else (None, None) for part in now.plan.parts]
        now.verdicts, now.parents = [verdict for verdict, _ in both], [notes for _, notes in both]

    def _commit(self, now: StepState) -> None:
        for i, (part, verdict) in enumerate(zip(now.plan.parts, now.verdicts, strict=True)):
            if self.drafter.aux_layers:
                self._show_features(part, verdict, now.features[i])
            now.parts.append(self._commit_one(now, i))
            if part.request.finish is not None:
                self._retire(part.request)
                now.finished.append(part.request)
        if now.moves:
            self.runner.cache.move(list(now.moves.values()))

    def _show_features(self, part: Scheduled, verdict: Verdict | None, features: Tensor) -> None:
        """Hand the drafter the features of what is committed: the fed tokens and the accepted path."""
        rows = [*range(part.feed), *(() if verdict is None else (part.feed + verdict.path).tolist())]
        self.drafter.observe(part.request.id, part.request.computed, features[rows], part.request.tokens)

    def _commit_one(self, now: StepState, place: int) -> RequestStep:
        """Keep the accepted path's KV, append what was committed, and write the record."""
        part, draft, verdict = now.plan.parts[place], now.drafts[place], now.verdicts[place]
        request, start, budget = part.request, part.request.computed, now.budgets.get(part.request.id)
        emitted, preceded = 0, request.preceded
        request.computed += part.feed
        if verdict is not None:
            if len(draft.tree):
                self.drafter.commit(request.context, draft.tree, verdict)
            self._keep_path(now, request, verdict)
            tokens = [*draft.tree.token[verdict.path].tolist(), verdict.token]
            emitted = request.accept(tokens, self.run_info.eos_tokens, self.max_context, self.vocabulary)
            request.preceded = followed_by(verdict)
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

    def _retire(self, request: Request) -> None:
        self.scheduler.retire(request)
        self.drafter.release(request.id)
        self.requests.pop(request.id, None)

    def _record(self, now: StepState) -> StepRecord:
        pool = self.runner.cache.pool
        end_ns = now.phases[-1].end_ns
        return StepRecord(
            step=self.steps,
            phases=tuple(now.phases),
            running=len(now.plan.parts),
            waiting=now.waiting,
            blocks_used=pool.used,
            blocks_free=pool.free,
            speculation=self.drafter.max_nodes > 0,
            speculation_off="" if self.drafter.max_nodes > 0 else "the drafter is none",
            admitted=tuple(request.info for request in now.plan.admitted),
            requests=tuple(now.parts),
            preempted=tuple(request.id for request in now.plan.preempted),
            finished=tuple(request.end(end_ns) for request in now.finished),
            passes=now.passes,
            device_ns=() if self.clock is None else self.clock.turn(),
        )
