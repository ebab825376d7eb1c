"""What an engine holds of a step: while it happens, and of the last one to be looked at."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from specscope.engine.request import Request
from specscope.engine.scheduler import Schedule
from specscope.speculate.adaptive import Budget, Outcome
from specscope.speculate.drafters.base import Draft
from specscope.trace.records import ParentNotes, Phase, RequestStep, StepRecord, Verdict

PHASES = ("schedule", "draft", "forward", "verify", "commit")
NO_NODES = np.zeros(0, np.int32)
Slots = NDArray[np.int64]


@dataclass
class StepState:
    """An engine step while it happens; each phase fills its part."""

    plan: Schedule = field(default_factory=Schedule)
    drafts: list[Draft] = field(default_factory=list)  # one for each scheduled part
    logits: list[Tensor] = field(default_factory=list)
    features: list[Tensor] = field(default_factory=list)  # empty where the drafter wants none
    verdicts: list[Verdict | None] = field(default_factory=list)
    parents: list[ParentNotes | None] = field(default_factory=list)  # what was noted beside each verdict
    parts: list[RequestStep] = field(default_factory=list)
    moves: dict[str, tuple[Slots, Slots]] = field(default_factory=dict)  # of accepted paths, by request: from, to
    finished: list[Request] = field(default_factory=list)
    phases: list[Phase] = field(default_factory=list)
    passes: tuple[Phase, ...] = ()  # the drafter's
    budgets: dict[str, Budget] = field(default_factory=dict)  # by request, where trees are adaptive
    waiting: int = 0  # requests that were left in the queue

    def outcomes(self) -> list[Outcome]:
        """What became of the budgets of the requests that decoded. When the step is whole."""
        return [
            Outcome(
                request=part.request.id,
                greedy=part.request.params.greedy,
                budget=self.budgets.get(part.request.id),
                levels=draft.levels,
                tree=draft.tree,
                scores=np.zeros(0, np.float32) if draft.notes is None else draft.notes.score,
                path=verdict.path,
                tokens=verdict.accepted + 1,
            )
            for part, draft, verdict in zip(self.plan.parts, self.drafts, self.verdicts, strict=True)
            if verdict is not None
        ]


@dataclass(frozen=True)
class LastStep:
    """The step that ran last, with the very tensors that it was judged by."""

    record: StepRecord
    state: StepState
