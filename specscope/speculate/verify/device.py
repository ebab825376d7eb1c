"""Verification of a whole batch on the device: a launch or a few, and one read of the verdicts with their evidence."""

from __future__ import annotations

import torch

from specscope.kernels.tree_verify import tree_verify
from specscope.speculate.verify.evidence import BatchEvidence
from specscope.speculate.verify.inputs import VerifyBatch
from specscope.trace.records import Verdict


def verify(batch: VerifyBatch) -> list[Verdict]:
    """A verdict for each tree: as host.verify, on the same coins."""
    target = batch.target
    trees = batch.trees.on(target.p.device)
    q = torch.stack(list(batch.q)) if batch.q else None
    read = tree_verify(trees, target.p, target.choices, q).to_host()
    del read["final_row"]  # where the final token was drawn: the path says it
    return BatchEvidence(coin=batch.trees.coin, **read).verdicts(batch)  # type: ignore[arg-type]
