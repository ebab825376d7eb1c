"""Verification of a whole batch on the device: a launch or a few, and one read of the verdicts with their evidence."""

from __future__ import annotations

import numpy as np
import torch

from specscope.kernels.flat_trees import NOBODY, FlatTrees, Tree
from specscope.kernels.tree_verify import BLOCK, tree_verify
from specscope.speculate.verify.evidence import BatchEvidence
from specscope.speculate.verify.inputs import VerifyBatch
from specscope.trace.record.records import Verdict


def verify(batch: VerifyBatch, block: int = BLOCK) -> list[Verdict]:
    """A verdict for each tree: as host.verify, on the same coins."""
    p, q = batch.target.p, torch.stack(list(batch.q)) if batch.q else None
    read = tree_verify(batch.trees.on(p.device), p, batch.target.choices, q, block).to_host()
    return BatchEvidence(coin=batch.trees.coin, **read).verdicts(batch)  # type: ignore[arg-type]


@torch.inference_mode()
def warm_up_verdicts(vocabulary: int, device: torch.device) -> None:
    """Compile what verdicts launch: of a tree with one node."""
    p = torch.full((2, vocabulary), 1 / vocabulary, device=device)
    nobody, token = np.full(1, NOBODY, np.int32), np.zeros(1, np.int32)
    tree = Tree(token, nobody, token.astype(np.uint8), np.full(2, 0.5), np.full(2, NOBODY))
    tree_verify(FlatTrees.build([tree]).on(device), p, torch.zeros(0, dtype=torch.int64, device=device), None)
