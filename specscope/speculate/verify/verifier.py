"""Verifier: the verdicts of an engine's steps, on the backend that holds its tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from specscope.kernels.flat_trees import NOBODY, FlatTrees, Tree
from specscope.model.places import Backend
from specscope.speculate.changes import Changes
from specscope.speculate.verify import host, match, traversal
from specscope.speculate.verify.distribution import Left
from specscope.speculate.verify.evidence import BatchEvidence
from specscope.speculate.verify.inputs import VerifyBatch, step_batch
from specscope.speculate.verify.notes import Part, parent_notes
from specscope.trace.record.own_rule import OwnRule
from specscope.trace.record.records import ParentNotes, Verdict
from specscope.trace.record.rules import LOOK_AHEAD, MATCH, STANDARD


@dataclass(frozen=True)
class JudgedStep:
    """The verdicts of a step, and what they were judged by."""

    verdicts: list[Verdict]
    batch: VerifyBatch
    parts: Sequence[Part]
    drawn_from: list[Left] | None  # what the final tokens were drawn from, where that is at hand

    def notes(self) -> list[ParentNotes]:
        """What target and drafter gave at the parents that were tried, for each part."""
        return parent_notes(self.batch, self.verdicts, self.parts, self.drawn_from)


@dataclass
class Verifier:
    """Verifies steps: a pure function of each."""

    backend: Backend
    notes: bool = False  # whether to note what target and drafter gave at the parents that were tried
    rule: str = STANDARD
    own: OwnRule | None = None  # the rule, where it is somebody's own

    def judge(self, parts: Sequence[Part], changes: Changes | None = None) -> JudgedStep | None:
        """Verdicts of one part or more: a request, its draft, the target's logits [n + 1, V] at the root and each node.

        `changes`: what a fork forces. None where there is no part.
        """
        if not parts:
            return None
        batch = step_batch(parts, changes)
        if self.rule == STANDARD and self.backend is Backend.TRITON:
            return JudgedStep(on_device(batch), batch, parts, None)
        batch = batch.on_host()  # the other rules have no kernels
        if self.rule in LOOK_AHEAD:
            verdicts, drawn_from = traversal.verify(batch, self.rule)
        else:
            verdicts, drawn_from = match.verify(batch) if self.rule == MATCH else host.verify(batch, self.own)
        return JudgedStep(verdicts, batch, parts, drawn_from)


def on_device(batch: VerifyBatch, block: int | None = None) -> list[Verdict]:
    """A verdict for each tree, as host.verify on the same coins: a launch, and one read of all evidence."""
    from specscope.kernels.tree_verify import BLOCK, tree_verify  # triton is imported only where it runs

    p, q = batch.target.p, torch.stack(list(batch.q)) if batch.q else None
    read = tree_verify(batch.trees.on(p.device), p, batch.target.choices, q, block or BLOCK).to_host()
    return BatchEvidence(coin=batch.trees.coin, **read).verdicts(batch)  # type: ignore[arg-type]


@torch.inference_mode()
def warm_up_verdicts(vocabulary: int, device: torch.device) -> None:
    """Compile what verdicts launch: of a tree with one node."""
    from specscope.kernels.tree_verify import tree_verify

    p = torch.full((2, vocabulary), 1 / vocabulary, device=device)
    nobody, token = np.full(1, NOBODY, np.int32), np.zeros(1, np.int32)
    tree = Tree(token, nobody, token.astype(np.uint8), np.full(2, 0.5), np.full(2, NOBODY))
    tree_verify(FlatTrees.build([tree]).on(device), p, torch.zeros(0, dtype=torch.int64, device=device), None)
