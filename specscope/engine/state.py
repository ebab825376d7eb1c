"""What an engine holds of a step: while it happens, and of the last one to be looked at."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from specscope.engine.request import Request
from specscope.engine.scheduler import Schedule
from specscope.speculate.drafters.base import Context, Draft
from specscope.speculate.sampling import Memory
from specscope.speculate.verify.verifier import JudgedStep
from specscope.trace.record.records import ParentNotes, Phase, RequestStep, StepRecord, Verdict

NO_NODES = np.zeros(0, np.int32)
Slots = NDArray[np.int64]


@dataclass
class StepState:
    """An engine step while it happens; each phase fills its part."""

    memory: Memory  # where the target's probabilities are put; another step's once this one was accounted for
    apart: bool = False  # whether it is accounted for while the next one runs, with what is noted beside verdicts
    plan: Schedule = field(default_factory=Schedule)
    drafts: list[Draft] = field(default_factory=list)  # one for each scheduled part
    logits: list[Tensor] = field(default_factory=list)
    features: list[Tensor] = field(default_factory=list)  # empty where the drafter wants none
    verdicts: list[Verdict | None] = field(default_factory=list)
    judged: JudgedStep | None = None  # what they were judged by
    parents: list[ParentNotes | None] = field(default_factory=list)  # what was noted beside each verdict
    parts: list[RequestStep] = field(default_factory=list)
    moves: dict[str, tuple[Slots, Slots]] = field(default_factory=dict)  # of accepted paths, by request: from, to
    finished: list[Request] = field(default_factory=list)
    phases: list[Phase] = field(default_factory=list)
    passes: tuple[Phase, ...] = ()  # the drafter's
    contexts: dict[str, Context] = field(default_factory=dict)  # of the requests that may draft, as they were told it
    waiting: int = 0  # requests that were left in the queue
    off: str = ""  # why it does not draft, "" where it does
    # When it has run
    number: int = 0
    blocks: tuple[int, int] = (0, 0)  # KV blocks of the target: used and free
    device_ns: tuple[int, ...] = ()

    def note(self) -> None:
        """Note what target and drafter gave beside the verdicts."""
        noted = iter(() if self.judged is None else self.judged.notes())
        self.parents = [None if verdict is None else next(noted) for verdict in self.verdicts]

    def record(self) -> StepRecord:
        """The record of the step, when it has run. Changes nothing."""
        end_ns = self.phases[-1].end_ns
        return StepRecord(
            step=self.number,
            phases=tuple(self.phases),
            running=len(self.plan.parts),
            waiting=self.waiting,
            blocks_used=self.blocks[0],
            blocks_free=self.blocks[1],
            speculation=not self.off,
            speculation_off=self.off,
            admitted=tuple(request.info for request in self.plan.admitted),
            requests=tuple(self.parts),
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
