"""What a step does: its five phases, in the order in which they stand here, and how one after another is run."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from specscope.engine.build import Parts
from specscope.engine.intake import Intake
from specscope.engine.request import Request, Turn
from specscope.engine.scheduler import Schedule, Scheduler, SpeculationGate
from specscope.model.batch import Segment, pick
from specscope.model.kv_cache import BLOCK_SIZE
from specscope.speculate.changes import Changes
from specscope.speculate.drafters.base import NO_DRAFT
from specscope.speculate.verify.verifier import JudgedStep, Verifier, form_notes
from specscope.speculate.verify.verifier import logprobs as raw_logprobs
from specscope.trace.record.records import PHASES, Phase, RequestStep, StepRecord, followed_by

NO_NODES = np.zeros(0, np.int32)
LOCKED = ("schedule", "commit")  # phases that nobody may add or cancel a request meanwhile


@dataclass
class StepState:
    """An engine step while it happens; each phase fills its part."""

    plan: Schedule = field(default_factory=Schedule)
    judged: JudgedStep | None = None  # what the verdicts follow from
    finished: list[Request] = field(default_factory=list)
    phases: list[Phase] = field(default_factory=list)
    passes: tuple[Phase, ...] = ()  # the drafter's
    waiting: int = 0  # requests that were left in the queue
    off: str = ""  # why it does not draft, "" where it does
    # When it has run
    number: int = 0
    blocks: tuple[int, int] = (0, 0)  # KV blocks of the target: used and free
    known: StepRecord | None = None  # its record as it stands in the history, where there is a timeline

    @property
    def turns(self) -> list[Turn]:
        """Of the requests that run, in the order of the batch."""
        return self.plan.turns

    @property
    def decoding(self) -> list[Turn]:
        """Those that draw a token, in the order in which they are judged."""
        return [turn for turn in self.turns if turn.decodes]

    def record(self, *, notes: bool) -> StepRecord:
        """The record of the step, when it has run. Changes nothing.

        `notes`: with what target and drafter gave beside the verdicts.
        """
        end_ns, steps = self.phases[-1].end_ns, [turn.step for turn in self.turns if turn.step is not None]
        if notes and self.judged is not None:
            noted = iter(self.judged.notes())
            steps = [step if step.verdict is None else replace(step, parents=next(noted)) for step in steps]
        return StepRecord(
            step=self.number,
            phases=tuple(self.phases),
            running=len(self.turns),
            waiting=self.waiting,
            blocks_used=self.blocks[0],
            blocks_free=self.blocks[1],
            speculation=not self.off,
            speculation_off=self.off,
            admitted=tuple(request.info for request in self.plan.admitted),
            requests=tuple(steps),
            preempted=tuple(request.id for request in self.plan.preempted),
            finished=tuple(request.end(end_ns) for request in self.finished),
            passes=self.passes,
        )


@dataclass
class Phases:
    """Schedule, draft, forward, verify, commit. Each fills its part of a StepState, on any one thread at a time."""

    parts: Parts
    intake: Intake
    scheduler: Scheduler
    verifier: Verifier
    gate: SpeculationGate
    changes: Changes | None = None  # what is forced, in a fork
    # What runs as each phase. Who drives an engine from outside, or watches it, puts a function of its own in its place
    run: dict[str, Callable[[StepState], None]] = field(init=False)

    def __post_init__(self) -> None:
        self.device = self.parts.runner.loaded.device  # of whatever thread runs a phase: Triton's launches go by it
        self.run = {name: getattr(self, name) for name in PHASES}

    def run_next(self, now: StepState) -> bool:
        """Run the next phase of a step; whether it was the last."""
        name, start = PHASES[len(now.phases)], time.time_ns()
        lock = self.intake.lock if name in LOCKED else nullcontext()
        with torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext(), lock:
            self.run[name](now)
        now.phases.append(Phase(name, start, max(time.time_ns(), start)))
        return name == PHASES[-1]

    def schedule(self, now: StepState) -> None:
        """Which requests run, what they feed, and the room that each is given for a draft. No drafter is asked."""
        drafts = self.parts.drafter.max_nodes > 0
        decoding = sum(request.pending == 1 for request in self.scheduler.running)  # if there is room for all
        now.off = self.gate.why_off(decoding) if drafts else "the drafter is none"
        now.plan = self.scheduler.schedule(time.time_ns(), drafts=not now.off)
        now.waiting = len(self.scheduler.waiting)
        for request in now.plan.failed:
            self.intake.retire(request)
        now.finished = [*self.intake.ended, *now.plan.failed]
        self.intake.ended.clear()

    def draft(self, now: StepState) -> None:
        """Trees for the requests that have room for one; what they leave of it is given back."""
        if drafting := [turn for turn in now.turns if turn.nodes]:
            proposed = self.parts.drafter.propose([turn.context for turn in drafting])
            now.passes = self.parts.drafter.passes
            for turn, draft in zip(drafting, proposed, strict=True):
                turn.draft, kept = draft, turn.request.computed + turn.feed + len(draft.tree)
                self.parts.runner.cache.truncate(turn.request.table, kept)

    def forward(self, now: StepState) -> None:
        """Root and drafts of every request, and prefill chunks, as one ragged batch."""
        segments = []
        for turn in now.turns:
            table, start = turn.request.table, turn.request.computed
            fed = turn.request.tokens[start : start + turn.feed]
            segments.append(Segment.of_tree(table, start, fed, turn.draft.tree, logits=turn.decodes))
        if not segments:
            return
        logits, features = self.parts.runner.forward_with_features(segments)
        for turn, rows in zip(now.turns, logits, strict=True):
            turn.logits = rows
        for turn, rows in zip(now.turns, features, strict=False):  # none where the drafter wants none
            turn.features = rows

    def verify(self, now: StepState) -> None:
        """A verdict for each request that decodes."""
        asked = [(turn.context, turn.draft, turn.logits) for turn in now.decoding if turn.logits is not None]
        now.judged = self.verifier.judge(asked, self.changes)
        if now.judged is not None:
            for turn, verdict in zip(now.decoding, now.judged.verdicts, strict=True):
                turn.verdict = verdict

    def commit(self, now: StepState) -> None:
        """Tokens and KV of the accepted paths; requests that ended leave."""
        for turn in now.turns:
            self._keep(turn)
            if self.parts.drafter.aux_layers and turn.request.finish is None:
                self.show_features(turn)
        if moves := [turn.moves for turn in now.turns if turn.moves is not None]:
            self.parts.runner.cache.move(moves)
        for request in (turn.request for turn in now.turns if turn.request.finish is not None):
            self.intake.retire(request)
            now.finished.append(request)

    def show_features(self, turn: Turn) -> None:
        """Hand the drafter the features of what is committed: the fed tokens and the accepted path."""
        assert turn.features is not None
        assert turn.step is not None
        request, features, path = turn.request, turn.features, NO_NODES if turn.verdict is None else turn.verdict.path
        rows = [*range(turn.feed), *(turn.feed + path).tolist()]
        committed = pick(features, rows) if len(path) else features[: turn.feed].clone()  # a view would keep all rows
        self.parts.drafter.observe(request.id, turn.step.context_len, committed, request.tokens)

    def _keep(self, turn: Turn) -> None:
        """Keep the accepted path's KV, append what was committed, and say what became of the turn."""
        request, draft, verdict, start = turn.request, turn.draft, turn.verdict, turn.request.computed
        emitted, preceded, form, logprobs = 0, request.preceded, None, None
        end = start + turn.feed + len(draft.tree)
        request.computed += turn.feed
        if verdict is not None:
            assert turn.logits is not None
            if draft is not NO_DRAFT:
                self.parts.drafter.commit(turn.context, draft.tree, verdict)
            path, base = verdict.path, request.computed
            if len(path) and not np.array_equal(path, np.arange(len(path))):
                slots = request.table.slots(base, base + int(path.max()) + 1)
                turn.moves = slots[path], slots[: len(path)]  # from where the tree lay to the slots after the root
            request.computed += len(path)
            form = form_notes(turn.context, draft, turn.logits, verdict, full=self.verifier.notes)
            tokens = [*draft.tree.token[path].tolist(), verdict.token]
            info = self.parts.run_info
            emitted = request.accept(tokens, info.eos_tokens, info.max_context, self.parts.vocabulary)
            request.preceded = followed_by(verdict.kind, len(verdict.outcome), verdict.accepted)
            if request.params.logprobs is not None:
                logprobs = raw_logprobs(turn.logits, verdict, tokens[:emitted], request.params.logprobs)
        turn.step = RequestStep(
            request=request.id,
            index=request.steps,
            context_len=start,
            prefill_tokens=turn.feed - turn.decodes,
            drafter=self.parts.drafter.name if len(draft.tree) else "none",
            tree=draft.tree,
            verdict=verdict,
            emitted=emitted,
            notes=draft.notes,
            preceded=None if verdict is None else preceded,
            blocks=np.array(request.table.blocks[start // BLOCK_SIZE : -(-end // BLOCK_SIZE)], np.int32),
            moved=NO_NODES if verdict is None or turn.moves is None else verdict.path,
            method=draft.method,
            form=form,
            logprobs=logprobs,
        )
        request.steps += 1
