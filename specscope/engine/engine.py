"""The engine: requests that come and go, and steps over them, one by one or one ahead.

Async scheduling: a worker thread runs each step from schedule to commit, so that the next one knows all that it would
without. What is left of a step (what is noted beside its verdicts, its record, and whoever reads that) changes nothing;
the caller's thread does it one step late, while the worker already runs the next one.
"""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from specscope.engine.build import Parts, build_parts
from specscope.engine.config import EngineConfig, named_code
from specscope.engine.intake import Intake
from specscope.engine.phases import Phases, StepState
from specscope.engine.prompts import NO_KWARGS, Encoded, Prompt, PromptEncoder, PromptSpec, template_label
from specscope.engine.request import Request
from specscope.engine.scheduler import Room, Scheduler, SpeculationGate
from specscope.engine.timeline import Timeline
from specscope.errors import UserError
from specscope.gone import refuse_gone
from specscope.speculate.changes import Changes
from specscope.speculate.drafters.base import Drafter
from specscope.speculate.drafters.model_drafter import ModelDrafter
from specscope.speculate.verify.verifier import Verifier
from specscope.trace.history.stats import Acceptance, measure
from specscope.trace.record.notes import OutputLogprob
from specscope.trace.record.params import SamplingParams
from specscope.trace.record.records import FinishReason, Flight, Moved, Origin, RequestEnd, RequestStep, StepRecord
from specscope.trace.record.vocabulary import Vocabulary
from specscope.trace.wire.outputs import Bus, Sink, Subscription

AHEAD = 2  # steps at once: one is accounted for while one runs
Job = Callable[[bool], StepState | None]  # whether it is run where there is nothing to do; None where it was not
Account = Callable[[StepState, int, int], StepRecord]  # ... launched_ns, read_ns
new_worker = partial(ThreadPoolExecutor, 1, thread_name_prefix="specscope-steps")


class Pipeline:
    """Runs an engine's steps one ahead. One thread calls it."""

    def __init__(self, job: Job, account: Account) -> None:
        """`job` runs a step, on the worker; `account` makes its record, on the caller's thread."""
        self._job, self._account = job, account
        self.flying: deque[tuple[int, Future[StepState | None]]] = deque()  # launched, when, and not accounted for
        self._worker = new_worker()
        self._error: Exception | None = None

    def step(self) -> StepRecord:
        """Account for the next step, with the one after it launched behind it."""
        record, idle = None, False
        while record is None:
            while len(self.flying) < AHEAD:
                self.flying.append((time.time_ns(), self._worker.submit(self._run, idle or not self.flying)))
                idle = False
            record = self._take()
            idle = True  # what was launched ahead had nothing to do: an idle engine's step is an empty one
        return record

    def drain(self) -> list[StepRecord]:
        """Wait for what was launched, and account for it. No step runs when this returns."""
        return [record for record in [self._take() for _ in range(len(self.flying))] if record is not None]

    def close(self) -> None:
        """Wait for what was launched and end the worker. What has run is not accounted for."""
        self._worker.shutdown()
        self._worker = new_worker()
        self.flying.clear()

    def _run(self, even_idle: bool) -> StepState | None:
        """A step, on the worker. One that fails is the caller's to know of, and no further one runs."""
        if self._error is not None:
            raise self._error
        try:
            return self._job(even_idle)
        except Exception as error:
            self._error = error
            raise

    def _take(self) -> StepRecord | None:
        """Account for the step that was launched first; None where there was nothing to do."""
        launched_ns, step = self.flying.popleft()
        state = step.result()
        return None if state is None else self._account(state, launched_ns, time.time_ns())


Prompts = Prompt | Sequence[Prompt]
Params = SamplingParams | Sequence[SamplingParams] | None  # one for all, or one for each


@dataclass
class Result:
    """What a request came to. Filled by Engine.generate."""

    id: str
    prompt: str
    text: str  # the output, cut at a stop string
    token_ids: list[int]
    origins: list[Origin]  # where each output token came from
    finish: FinishReason
    counts: list[int]  # [drafts, accepted at depth 1, accepted at depth 2, ...]
    acceptance: Acceptance
    steps: list[RequestStep]  # the request's records, whole
    logprobs: list[OutputLogprob] | None = None  # of each output token; None where they were not asked for
    error: str = ""

    @staticmethod
    def of(end: RequestEnd, steps: list[RequestStep], vocabulary: Vocabulary) -> Result:
        """The result of a request that ended, from its records."""
        tokens, acceptance = end.output.tolist(), measure(steps)
        logprobs = [each for step in steps if step.logprobs is not None for each in step.logprobs.each(step.output())]
        return Result(
            id=end.info.id,
            prompt=end.info.prompt,
            text=end.text(tokens if end.stop_token is None else tokens[:-1], vocabulary),
            token_ids=tokens,
            origins=[origin for step in steps if step.verdict for origin in step.verdict.origins()[: step.emitted]],
            finish=end.reason,
            counts=acceptance.counts,
            acceptance=acceptance,
            steps=steps,
            logprobs=None if end.info.params.logprobs is None else logprobs,
            error=end.error,
        )


def paired(prompts: Prompts, params: Params) -> list[tuple[Any, SamplingParams | None]]:
    """Each prompt with its parameters. Raises UserError where they are not as many."""
    is_one = isinstance(prompts, str) or (bool(prompts) and isinstance(prompts[0], int | Mapping))
    many: Sequence[Any] = [prompts] if is_one else prompts
    each = list(params) if isinstance(params, Sequence) else [params] * len(many)
    if len(each) != len(many):
        raise UserError(f"{len(many)} prompts, but {len(each)} sampling parameters")
    return list(zip(many, each, strict=True))


class Engine:
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
        """`changes`: what is forced in it, where it is a fork."""
        if config is not None and settings:
            raise UserError("give Engine a config or settings, not both")
        for name in settings.keys() - EngineConfig.__dataclass_fields__.keys():
            refuse_gone(f"--{name.replace('_', '-')}")
        self.config = config or EngineConfig(**named_code(settings))
        own_rule = self.config.load_rule()
        self.parts = parts = parts or build_parts(self.config, progress)
        self.runner, self.tokenizer = parts.runner, parts.tokenizer
        self.vocabulary, self.run_info = parts.vocabulary, parts.run_info
        self.max_context = parts.run_info.max_context  # tokens of a prompt and its output at most
        longest = max(map(len, self.vocabulary.pieces.values()), default=1)
        self.encoder = PromptEncoder(self.tokenizer, self.runner.loaded.vocab_size, self.max_context, longest)
        self.encode, self.turn = self.encoder.encode, self.encoder.turn
        room = Room(self.runner, self.drafter, self.max_context)
        self.scheduler = Scheduler(room, self.config.max_batch, self.config.max_step_tokens)
        self.intake = Intake(parts, self.scheduler, self._note_input)
        self.requests, self.ended, self.forms = self.intake.requests, self.intake.ended, self.intake.forms
        notes = self.run_info.evidence == "full"
        self.verifier = Verifier(self.runner.cache.backend, notes=notes, rule=self.config.rule, own=own_rule)
        self.gate = SpeculationGate(chosen=self.config.speculation != "off", disable_above=self.config.disable_above)
        self.phases = Phases(parts, self.intake, self.scheduler, self.verifier, self.gate, changes)
        self.pipeline = Pipeline(self._job, self._account) if self.config.async_scheduling else None
        self.bus = Bus()
        self.timeline: Timeline | None = None
        self.steps = 0
        self.current: StepState | None = None  # a step that was begun phase by phase, and not finished
        self._runs_ahead = False  # whether one is under way on the pipeline's thread
        self.last: StepState | None = None  # with the very tensors that it was judged by, where there is a timeline
        self._cancel_later: list[str] = []
        self._unread = 0  # steps of the pipeline that were begun, and are not accounted for

    @property
    def drafter(self) -> Drafter:
        """The drafter: who measures an engine may give its parts another."""
        return self.parts.drafter

    def add(
        self,
        prompt: Prompt | Encoded,
        params: SamplingParams | None = None,
        *,
        name: str | None = None,
        labels: Mapping[str, str] | None = None,
        traceparent: str = "",
        served: bool = False,
        template: Mapping[str, Any] = NO_KWARGS,
    ) -> str:
        """Queue a request and return its id. Raises UserError for what cannot run.

        `traceparent`: its caller's span. `served`: it came over HTTP. `template`: chat_template_kwargs.
        """
        text, tokens, title = prompt if isinstance(prompt, Encoded) else self.encode(prompt, template)
        labels, params = {**template_label(template), **(labels or {})}, params or SamplingParams()
        self.encoder.check(tokens)
        self.scheduler.room.check(len(tokens), params.max_tokens)
        self.forms.check(params)
        now = time.time_ns()
        return self.intake.add(Request(name or "", text, tokens, params, labels, now, title, traceparent, served))

    def _note_input(self, request: Request, *, cancels: bool = False) -> None:
        if self.timeline is not None:
            self.timeline.arrived(request, cancels=cancels)

    def add_spec(self, spec: PromptSpec) -> str:
        """Queue a request as a user wrote it, and return its id. Raises UserError for what cannot run."""
        prompt = self.turn(spec.prompt, raw=spec.raw)
        return self.add(prompt, spec.params, labels=spec.labels, template=spec.template)

    def cancel(self, name: str) -> None:
        """End a request now; what it has emitted stays. Unknown or ended ids are ignored.

        Between the phases of a step it ends after the step.
        """
        with self.intake.lock:
            if self.current is not None or self._runs_ahead:
                self._cancel_later.append(name)
            else:
                self.intake.cancel(name)

    def cancel_all(self) -> None:
        """End every request now; the next step reports them."""
        for name in (*self.requests, *self.forms.compiling):
            self.cancel(name)

    @property
    def busy(self) -> bool:
        """Whether a step would do anything."""
        with self.intake.lock:  # a step that was begun, or was not accounted for, may be all that is left
            return bool(self.requests or self.forms.compiling or self.ended or self.current or self._unread)

    def generate(self, prompts: Prompts, params: Params = None) -> list[Result]:
        """Run prompts to their ends, batched; one Result each, in their order.

        `params`: one for all, or one for each. Requests that were added before run along.
        """
        names: list[str] = []
        try:
            for prompt, wanted in paired(prompts, params):
                names.append(self.add(prompt, wanted))
        except UserError:
            for name in names:
                self.cancel(name)
            raise
        records = defaultdict[str, list[RequestStep]](list)
        ended: dict[str, Result] = {}
        while not ended.keys() >= {*names}:
            record = self.step()
            for part in record.requests:
                records[part.request].append(part)
            ended |= {end.info.id: Result.of(end, records[end.info.id], self.vocabulary) for end in record.finished}
        return [ended[name] for name in names]

    def subscribe(self, sink: Sink, *, lossless: bool = False) -> Subscription:
        """Hand every record to `sink`, on a thread of its own. A lossless sink may make the engine wait."""
        return self.bus.subscribe(sink, lossless=lossless)

    def close(self) -> None:
        """Wait for what was launched; flush and close every sink."""
        if self.pipeline is not None:
            self.pipeline.close()
        self.bus.close()

    def step(self) -> StepRecord:
        """Run one step over all requests, or what is left of it, and publish its record."""
        if self.pipeline is not None and self.timeline is None and self.current is None:
            return self.pipeline.step()
        while (record := self.phase()) is None:
            pass
        return record

    def phase(self) -> StepRecord | None:
        """Run the next phase of a step; the record after the last. Between phases `current` holds what there is.

        A step that runs ahead is the next one, whole.
        """
        now = self.current
        if now is None:
            if ahead := self.drain():
                return ahead[-1]
            self.intake.await_forms()
            if self.timeline is not None:
                self.timeline.note(self.phases)
            self.current = now = StepState()
        if not self.phases.run_next(now):
            return None
        self._finish(now)
        return self._account(now)

    def drain(self) -> list[StepRecord]:
        """Wait for steps that run ahead, and publish their records. Nothing runs when this returns."""
        return [] if self.pipeline is None else self.pipeline.drain()

    def _job(self, even_idle: bool) -> StepState | None:
        """All phases of a step, on the pipeline's thread. None where there is nothing to do."""
        if even_idle or self.requests or self.ended:
            self.intake.await_forms()
        with self.intake.lock:
            if not (even_idle or self.requests or self.ended):
                return None
            self._runs_ahead = True
            self._unread += 1
        now = StepState()
        while not self.phases.run_next(now):
            pass
        self._finish(now)
        return now

    def _finish(self, now: StepState) -> None:
        """End a step that has run. The next one may begin before this one is accounted for."""
        pool = self.runner.cache.pool
        with self.intake.lock:
            now.number, now.blocks = self.steps, (pool.used, pool.free)
            self.current, self._runs_ahead = None, False
            self.steps += 1
            while self._cancel_later:
                self.cancel(self._cancel_later.pop(0))

    def _account(self, now: StepState, launched_ns: int = 0, read_ns: int = 0) -> StepRecord:
        """Number the step and publish its record, or say that it came out as it is known. Changes no request."""
        record, is_new = now.record(notes=self.verifier.notes), True
        if self.timeline is not None:
            now.known, is_new = self.timeline.settle(record)
            record, self.last, self.steps = now.known, now, self.timeline.step
        if launched_ns:
            record = replace(record, flight=Flight(launched_ns, read_ns, time.time_ns()))
            with self.intake.lock:
                self._unread -= 1
        self.bus.publish(record if is_new else Moved(record.step))
        return record

    def keep_timeline(self) -> Timeline:
        """Keep what going back takes, from the next step on."""
        self.drain()
        if isinstance(self.drafter, ModelDrafter):
            self.drafter.can_go_back = True
        self.timeline = self.timeline or Timeline(self.run_info.dtype, self.steps, self.steps - 1)
        return self.timeline

    def rewind(self, step: int) -> None:
        """Make the engine what it was before `step`; a step that was begun is given up. Raises UserError."""
        if self.timeline is None:
            raise UserError("this engine keeps no timeline and cannot go back")
        if step == self.steps and self.current is None:
            return
        self.timeline.rewind(self.phases, step)
        self.current, self.last, self.steps = None, None, self.timeline.step
        self._cancel_later.clear()
        self.bus.publish(Moved(self.timeline.last))
