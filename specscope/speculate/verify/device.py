"""Verification of a whole batch on the device: one launch, and one read of the verdicts with their evidence."""

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
    return BatchEvidence(
        outcome=read.outcome.numpy(),
        p=read.p.numpy(),
        p_trial=read.p_trial.numpy(),
        q_trial=read.q_trial.numpy(),
        accept_prob=read.accept_prob.numpy(),
        residual_mass=read.residual_mass.numpy(),
        token=read.token.numpy(),
        final_p=read.final_p.numpy(),
        final_margin=read.final_margin.numpy(),
        recovered=read.recovered.numpy(),
        coin=batch.trees.coin,
    ).verdicts(batch)
