"""Verifier: the verdicts of an engine's steps, on the backend that holds its tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from specscope.model.places import Backend
from specscope.speculate.changes import Changes
from specscope.speculate.sampling import Memory
from specscope.speculate.verify import host, match, traversal
from specscope.speculate.verify.distribution import Left
from specscope.speculate.verify.inputs import VerifyBatch, step_batch
from specscope.speculate.verify.notes import Part, parent_notes
from specscope.trace.record.records import ParentNotes, Verdict
from specscope.trace.record.rules import LOOK_AHEAD, MATCH, STANDARD


@dataclass(frozen=True)
class JudgedStep:
    """The verdicts of a step, and what they were judged by: `memory` holds it until it is given to another step."""

    verdicts: list[Verdict]
    batch: VerifyBatch
    parts: Sequence[Part]
    drawn_from: list[Left] | None  # what the final tokens were drawn from, where that is at hand

    def notes(self) -> list[ParentNotes]:
        """What target and drafter gave at the parents that were tried, for each part."""
        return parent_notes(self.batch, self.verdicts, self.parts, self.drawn_from)


class Verifier:
    """Verifies steps: a pure function of each, except for the memory that it reuses."""

    def __init__(self, backend: Backend, *, notes: bool = False, rule: str = STANDARD) -> None:
        self.backend, self.rule = backend, rule
        self.notes = notes  # whether to note what target and drafter gave at the parents that were tried
        self._memory = Memory()

    def verify(self, parts: Sequence[Part], changes: Changes | None = None) -> list[tuple[Verdict, ParentNotes | None]]:
        """A verdict for each part, and what is noted beside it: `judge`, where nothing else is done meanwhile."""
        judged = self.judge(parts, self._memory, changes)
        if judged is None:
            return []
        notes = judged.notes() if self.notes else [None] * len(parts)
        return list(zip(judged.verdicts, notes, strict=True))

    def judge(self, parts: Sequence[Part], memory: Memory, changes: Changes | None = None) -> JudgedStep | None:
        """Verdicts of one part or more: a request, its draft, the target's logits [n + 1, V] at the root and each node.

        `memory`: where the target's probabilities are put; `changes`: what a fork forces. None where there is no part.
        """
        if not parts:
            return None
        batch = step_batch(parts, changes, memory)
        if self.rule == STANDARD and self.backend is Backend.TRITON:
            from specscope.speculate.verify import device  # triton is imported only where it runs

            return JudgedStep(device.verify(batch), batch, parts, None)
        batch = batch.on_host()  # the other rules have no kernels
        verdicts, drawn_from = self._judge(batch)
        return JudgedStep(verdicts, batch, parts, drawn_from)

    def _judge(self, batch: VerifyBatch) -> tuple[list[Verdict], list[Left] | None]:
        """Verdicts on the host, and what the final tokens were drawn from where that is at hand."""
        if self.rule in LOOK_AHEAD:
            return traversal.verify(batch, self.rule)
        return match.verify(batch) if self.rule == MATCH else (host.verify(batch), None)
