"""What an engine holds of a step: while it happens, and of the last one to be looked at."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from specscope.engine.request import Request
from specscope.speculate.drafters.base import NO_DRAFT, Context, Draft
from specscope.speculate.sampling import Memory
from specscope.speculate.verify.verifier import JudgedStep
from specscope.trace.record.records import Phase, RequestStep, StepRecord, Verdict

Slots = NDArray[np.int64]


@dataclass
class Turn:
    """One request's turn in a step. The scheduler makes it, and each phase fills its part."""

    request: Request
    context: Context  # before the step: its tokens grow in commit
    feed: int  # pending tokens to feed
    decodes: bool  # whether the feed reaches the root, so that a token is drawn
    nodes: int = 0  # room for a draft; 0 where it does not draft
    draft: Draft = NO_DRAFT
    logits: Tensor | None = None  # [n + 1, V] of root and nodes; [0, V] where it only prefills
    features: Tensor | None = None  # [feed + n, F] where the drafter wants them
    verdict: Verdict | None = None
    moves: tuple[Slots, Slots] | None = None  # of the accepted path's KV, from and to, where it does not lie there
    step: RequestStep | None = None  # what became of it

    @property
    def cost(self) -> int:
        """Rows of the step that it may take."""
        return self.feed + self.nodes


@dataclass
class Schedule:
    """What one step will do. Filled by Scheduler.schedule."""

    budget: int = 0  # tokens that are left
    turns: list[Turn] = field(default_factory=list)
    admitted: list[Request] = field(default_factory=list)  # joined the batch for the first time
    preempted: list[Request] = field(default_factory=list)
    held_back: list[Request] = field(default_factory=list)  # keep their KV, and wait for the next step
    failed: list[Request] = field(default_factory=list)  # cannot run at all: their KV does not fit

    def add(self, turn: Turn) -> None:
        """Give a request its turn."""
        self.turns.append(turn)
        self.budget -= turn.cost

    def drop(self, request: Request) -> None:
        """Take a request's turn back, where it has one."""
        self.budget += sum(turn.cost for turn in self.turns if turn.request is request)
        self.turns = [turn for turn in self.turns if turn.request is not request]

    def has(self, request: Request) -> bool:
        """Whether a request has a turn."""
        return any(turn.request is request for turn in self.turns)


@dataclass
class StepState:
    """An engine step while it happens; each phase fills its part."""

    memory: Memory  # where the target's probabilities are put; another step's once this one was accounted for
    apart: bool = False  # whether it is accounted for while the next one runs
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
    device_ns: tuple[int, ...] = ()

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
            device_ns=self.device_ns,
        )


@dataclass(frozen=True)
class LastStep:
    """The step that ran last, with the very tensors that it was judged by."""

    record: StepRecord
    state: StepState
