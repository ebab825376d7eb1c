"""Faults in the sampling rules along a tree's paths."""

from __future__ import annotations

import dataclasses

import numpy as np
import torch

from specscope.analyze.diagnose.causes import Cause
from specscope.speculate.sampling import LogitRows, Memory, target_rows
from specscope.speculate.verify import inputs, verifier
from tests.faults.fault import Fault


def penalties_of_the_root(patch, engine):
    """Penalties count prompt and output, but not the drafted tokens on the way to a node."""

    def rows(context, draft, logits):
        if not context.params.penalised:
            return LogitRows(logits, context.params)
        return LogitRows(logits, context.params, context.counts, [[]] * (len(draft.tree) + 1))

    patch.setattr(inputs, "_rows", rows)


def cut_at_the_root(**without):
    """Top-k, top-p and min-p are applied at the root alone."""

    def install(patch, engine):
        step_batch = verifier.step_batch

        def relaxed(parts, changes, backend, memory):
            batch = step_batch(parts, changes, backend, memory)
            free = [
                (dataclasses.replace(context, params=dataclasses.replace(context.params, **without)), draft, logits)
                for context, draft, logits in parts
            ]
            other = target_rows([inputs._rows(*part) for part in free], backend, Memory())
            below = np.concatenate([np.arange(len(draft.tree) + 1) > 0 for _, draft, _ in parts])
            p = torch.where(torch.from_numpy(below)[:, None], other.p, batch.target.p)
            return dataclasses.replace(batch, target=dataclasses.replace(batch.target, p=p))

        patch.setattr(verifier, "step_batch", relaxed)

    return install


FAULTS = [
    Fault(
        "penalties of the root",
        Cause.RULES_OFF_PATH,
        penalties_of_the_root,
        "model tree rules",
        "drafted tokens on a node's path are not counted",
    ),
    Fault(
        "top-p at the root",
        Cause.RULES_OFF_PATH,
        cut_at_the_root(top_p=1.0),
        "model tree top-p",
        "below the root top-p is not applied",
    ),
    Fault(
        "top-k at the root",
        Cause.RULES_OFF_PATH,
        cut_at_the_root(top_k=0),
        "eagle tree top-k",
        "below the root top-k is not applied",
    ),
]
