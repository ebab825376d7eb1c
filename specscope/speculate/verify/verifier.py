"""Verifier: the verdicts of an engine's steps, on the backend that holds its tensors."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from specscope.model.backend import Backend
from specscope.speculate.drafters.base import Context, Draft
from specscope.speculate.sampling import Memory
from specscope.speculate.verify import host, match, traversal
from specscope.speculate.verify.inputs import VerifyBatch, step_batch
from specscope.speculate.verify.left import Left
from specscope.speculate.verify.parents import parent_notes
from specscope.trace.changes import Changes
from specscope.trace.records import ParentNotes, Verdict
from specscope.trace.rules import LOOK_AHEAD, MATCH, STANDARD


class Verifier:
    """A pure function of each step, but for the memory that it uses again."""

    def __init__(self, backend: Backend, *, notes: bool = False, rule: str = STANDARD) -> None:
        self.backend, self.rule = backend, rule
        self.notes = notes  # whether to note what target and drafter gave at the parents that were tried
        self._memory = Memory()

    def verify(
        self, parts: Sequence[tuple[Context, Draft, Tensor]], changes: Changes | None = None
    ) -> list[tuple[Verdict, ParentNotes | None]]:
        """A verdict for each part: a request, its draft, and the target's logits [n + 1, V] at the root and each node.

        `changes`: what a fork forces.
        """
        if not parts:
            return []
        batch = step_batch(parts, changes, self.backend, self._memory)
        verdicts, drawn_from = self._judge(batch)
        notes = parent_notes(batch, verdicts, parts, drawn_from) if self.notes else [None] * len(parts)
        return list(zip(verdicts, notes, strict=True))

    def _judge(self, batch: VerifyBatch) -> tuple[list[Verdict], list[Left] | None]:
        """Verdicts, and what the final tokens were drawn from where that is at hand."""
        if self.rule in LOOK_AHEAD:  # these have no kernels
            return traversal.verify(batch.on_host(), self.rule)
        if self.rule == MATCH:
            return match.verify(batch.on_host())
        if self.backend is Backend.TORCH:
            return host.verify(batch), None
        from specscope.speculate.verify import device  # triton is imported only where it runs

        return device.verify(batch), None
