"""The engine: sequences the phases of a step (schedule, draft, forward, verify, commit), and nothing more."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

from specscope.engine.build import Parts, build_parts
from specscope.engine.clock import DeviceClock
from specscope.engine.config import EngineConfig
from specscope.engine.forms import Forms
from specscope.engine.gate import SpeculationGate
from specscope.engine.generate import Encoded, GenerateMixin, Prompt, title_of
from specscope.engine.phases import PhasesMixin
from specscope.engine.pipeline import Pipeline
from specscope.engine.prompt_encoder import PromptEncoder
from specscope.engine.prompts import NO_KWARGS, PromptSpec, template_label
from specscope.engine.request import Request
from specscope.engine.room import Room
from specscope.engine.scheduler import Scheduler
from specscope.engine.state import PHASES, LastStep, StepState
from specscope.engine.timeline import Timeline
from specscope.errors import UserError
from specscope.speculate.adaptive import Sizer
from specscope.speculate.sampling import Memory
from specscope.speculate.verify.verifier import Verifier
from specscope.trace.changes import Changes
from specscope.trace.plan import DynamicPlan
from specscope.trace.record.params import SamplingParams
from specscope.trace.record.records import FinishReason, Flight, Moved, Phase, RunInfo, StepRecord
from specscope.trace.record.rules import MATCH
from specscope.trace.record.vocabulary import Vocabulary
from specscope.trace.wire.bus import Bus, Sink, Subscription


class Engine(PhasesMixin, GenerateMixin):
    """A target, a drafter, and the requests that they serve.

    Engine(target="folder", drafter="ngram") or Engine(EngineConfig(...)). One thread steps it, others may
    add and cancel.
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
        self.max_context = parts.max_context
        longest = max(map(len, self.vocabulary.pieces.values()), default=1)
        self.encoder = PromptEncoder(self.tokenizer, self.runner.loaded.vocab_size, self.max_context, longest)
        self.run_info: RunInfo = parts.run_info
        self.bus = Bus()
        self.scheduler = Scheduler(
            Room(self.runner, self.drafter, prefix_cache=self.config.prefix_cache),
            self.config.max_batch,
            self.config.max_step_tokens,
            root_alone=bool(self.drafter.aux_layers),
        )
        plan = self.config.plan
        self.sizer: Sizer | None = None
        if parts.costs is not None and isinstance(plan, DynamicPlan):
            self.sizer = Sizer(plan, parts.costs, draws=self.config.rule != MATCH)
        self.gate = SpeculationGate(chosen=self.config.speculation != "off", disable_above=self.config.disable_above)
        self.clock = DeviceClock() if self.runner.loaded.device.type == "cuda" else None
        self.steps = 0
        self.current: StepState | None = None  # a step that was begun and not finished
        self.last: LastStep | None = None  # kept to be looked at, where there is a timeline
        self._cancel_later: list[str] = []
        self._names = itertools.count()
        self.timeline: Timeline | None = None
        self.requests: dict[str, Request] = {}  # waiting and running, by id
        self.forms = Forms(self.vocabulary, self.runner.loaded.vocab_size, self.run_info.eos_tokens)
        self.ended: list[Request] = []  # cancelled or failed between steps; reported by the next one
        self._lock = threading.RLock()  # over all that a schedule reads and a commit changes
        self._memory = Memory()
        self._unread = 0  # steps of the pipeline that were begun, and are not accounted for
        self.pipeline = Pipeline(self._job, self._account) if self.config.async_scheduling else None

    # Requests

    def add(
        self,
        prompt: Prompt | Encoded,
        params: SamplingParams | None = None,
        *,
        name: str | None = None,
        labels: Mapping[str, str] | None = None,
        traceparent: str = "",
        template: Mapping[str, Any] = NO_KWARGS,
    ) -> str:
        """Queue a request and return its id. `template`: chat_template_kwargs. Raises UserError for what cannot run."""
        text, tokens = (prompt.text, prompt.tokens) if isinstance(prompt, Encoded) else self.encode(prompt, template)
        labels = {**template_label(template), **(labels or {})}
        self.encoder.check(tokens)
        params = params or SamplingParams()
        self.scheduler.room.check(len(tokens), params.max_tokens, self.max_context)
        self.forms.check(params, self.drafter.name)
        with self._lock:  # of two who give the same name at once, one is refused
            if self._is_known(name):
                raise UserError(f"a request named {name!r} is already running")
            name = self._new_name() if name is None else name
            request = Request(name, text, tokens, params, labels, time.time_ns(), title_of(prompt), traceparent)
            if self.forms.prepare(request):
                self._arrive(request)
        return name

    def _arrive(self, request: Request) -> None:
        """A request joins the queue: at once, or when its grammar is compiled."""
        self.requests[request.id] = request
        self.scheduler.waiting.append(request)
        if self.timeline is not None:
            self.timeline.arrived(request)

    def _await_forms(self) -> None:
        """Take in the requests whose grammars are compiled; where nothing else is to be done, wait for one."""
        if not (self.requests or self.ended):
            self.forms.wait()
        with self._lock:
            for request in self.forms.compiled():
                self._arrive(request)

    def _is_known(self, name: str | None) -> bool:
        return name in self.requests or name in self.forms.compiling

    def _new_name(self) -> str:
        return next(name for i in self._names if not self._is_known(name := f"r{i}"))

    def add_spec(self, spec: PromptSpec) -> str:
        """Queue a request as a user wrote it, and return its id. Raises UserError for what cannot run."""
        prompt = self.turn(spec.prompt, raw=spec.raw)
        return self.add(prompt, spec.params, labels=spec.labels, template=spec.template)

    def encode(self, prompt: Prompt, template: Mapping[str, Any] = NO_KWARGS) -> tuple[str, list[int]]:
        """(text, token ids) of a prompt. `template`: chat_template_kwargs. Raises UserError."""
        return self.encoder.encode(prompt, template)

    def turn(self, prompt: Prompt, *, raw: bool = False) -> Prompt:
        """Text as a chat turn of the user, where the model has a chat template and `raw` is False."""
        if isinstance(prompt, str) and not raw and self.tokenizer.chat_template:
            return [{"role": "user", "content": prompt}]
        return prompt

    def cancel(self, name: str) -> None:
        """End a request now; what it has emitted stays. Unknown or ended ids are ignored.

        Between the phases of a step it ends after the step.
        """
        with self._lock:
            if self.current is not None:
                self._cancel_later.append(name)
                return
            if name in self.forms.compiling:
                self._arrive(self.forms.compiling.pop(name)[0])
            request = self.requests.get(name)
            if request is not None:
                if self.timeline is not None:
                    self.timeline.arrived(request, cancels=True)
                request.finish = FinishReason.CANCELLED
                self._retire(request)
                self.ended.append(request)

    def cancel_all(self) -> None:
        """End every request now; the next step reports them."""
        for name in (*self.requests, *self.forms.compiling):
            self.cancel(name)

    @property
    def busy(self) -> bool:
        """Whether a step would do anything."""
        with self._lock:  # a step that was begun, or was not accounted for, may be all that is left
            return bool(self.requests or self.forms.compiling or self.ended or self.current or self._unread)

    def subscribe(self, sink: Sink, *, lossless: bool = False) -> Subscription:
        """Hand every record to `sink`, on a thread of its own. A lossless sink may make the engine wait."""
        return self.bus.subscribe(sink, lossless=lossless)

    def close(self) -> None:
        """Wait for what was launched; flush and close every sink."""
        if self.pipeline is not None:
            self.pipeline.close()
        self.bus.close()

    # A step

    def step(self) -> StepRecord:
        """Run one step over all requests, or what is left of it, and publish its record."""
        if self.pipeline is not None and self.timeline is None and self._begun() is None:
            return self.pipeline.step()
        while True:
            record = self.phase()
            if record is not None:
                return record

    def phase(self) -> StepRecord | None:
        """Run the next phase of a step; the record after the last. Between phases `current` holds what there is.

        A step that runs ahead is the next one, whole.
        """
        now = self._begun()
        if now is None:
            if ahead := self.drain():
                return ahead[-1]
            self._await_forms()
            if self.timeline is not None:
                self.timeline.note(self)
            self.current = now = StepState(self._memory)
        return self._account(now) if self._phase(now) else None

    def _begun(self) -> StepState | None:
        """The step that was begun phase by phase, and not by the pipeline."""
        now = self.current
        return None if now is None or now.apart else now

    def drain(self) -> list[StepRecord]:
        """Wait for steps that run ahead, and publish their records. Nothing runs when this returns."""
        return [] if self.pipeline is None else self.pipeline.drain()

    def _job(self, memory: Memory, even_idle: bool) -> StepState | None:
        """All phases of a step, on the pipeline's thread. None where there is nothing to do."""
        if even_idle or self.requests or self.ended:
            self._await_forms()
        with self._lock:
            if not (even_idle or self.requests or self.ended):
                return None
            self.current = now = StepState(memory, apart=True)
            self._unread += 1
        while not self._phase(now):
            pass
        return now

    def _phase(self, now: StepState) -> bool:
        """Run the next phase of a step; whether it was the last."""
        name = PHASES[len(now.phases)]
        if self.clock is not None:
            self.clock.mark()
        start = time.time_ns()
        with self._lock if name in ("schedule", "commit") else nullcontext():
            getattr(self, f"_{name}")(now)
        now.phases.append(Phase(name, start, max(time.time_ns(), start)))
        if len(now.phases) < len(PHASES):
            return False
        with self._lock:
            self._finish(now)
        return True

    def _finish(self, now: StepState) -> None:
        """The step has run. The next one may begin before this one was accounted for."""
        pool = self.runner.cache.pool
        now.number, now.blocks = self.steps, (pool.used, pool.free, pool.cached)
        now.device_ns = () if self.clock is None else self.clock.turn()
        if self.sizer is not None:
            self.sizer.learn(now.outcomes())
            for ended in now.finished:
                self.sizer.forget(ended.id)
        self.current = None
        self.steps += 1
        while self._cancel_later:
            self.cancel(self._cancel_later.pop(0))

    def _account(self, now: StepState, launched_ns: int = 0, read_ns: int = 0) -> StepRecord:
        """Number the step and publish its record, or say that it came out as it is known. Changes no request."""
        if now.apart and self.verifier.notes:
            now.note()
            now.parts = [replace(part, parents=notes) for part, notes in zip(now.parts, now.parents, strict=True)]
        record, is_new = now.record(), True
        if self.timeline is not None:
            record, is_new = self.timeline.settle(record)
            self.last = LastStep(record, now)
            self.steps = self.timeline.step
        if launched_ns:
            record = replace(record, flight=Flight(launched_ns, read_ns, time.time_ns()))
            with self._lock:
                self._unread -= 1
        self.bus.publish(record if is_new else Moved(record.step))
        return record

    def keep_timeline(self) -> Timeline:
        """Keep what going back takes, from the next step on."""
        self.drain()
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
