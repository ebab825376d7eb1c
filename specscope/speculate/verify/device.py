"""Verification of a whole batch on the device: one launch, and one read of the verdicts with their evidence."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specscope.kernels.flat_trees import NOBODY, Forest, Planted, Verdicts
from specscope.kernels.tree_verify import tree_verify
from specscope.speculate.verify.distribution import Dense
from specscope.speculate.verify.inputs import VerifyInput
from specscope.trace.records import FinalKind, Outcome, Verdict


def verify_on_device(inputs: Sequence[VerifyInput]) -> list[Verdict]:
    """A verdict for each one, all of whose distributions are Dense. As `verify`, on the same coins."""
    p = torch.stack([row.probs for one in inputs for row in one.p if isinstance(row, Dense)])
    q: list[Tensor] = []
    trees = []
    for one in inputs:
        q_row = np.full(len(one.tree) + 1, NOBODY, dtype=np.int64)
        for node, distribution in one.q.items():
            q_row[node + 1] = len(q)
            q.append(distribution.probs)
        tree = one.tree
        trees.append(Planted(tree.token, tree.parent, tree.drawn, one.coin, q_row))
    forest = Forest.plant(trees, p.device)
    verdicts = tree_verify(forest, p, torch.stack(q) if q else None)
    at_parent = p[forest.parent.clamp(min=0).long(), forest.token.long()]
    return _read(inputs, verdicts, at_parent)


def _read(inputs: Sequence[VerifyInput], verdicts: Verdicts, at_parent: Tensor) -> list[Verdict]:
    """The tensors of a batch as Verdicts. All are copied to the host together: the step's one wait for the device."""
    by_row = torch.stack(
        [
            x.double()
            for x in (
                verdicts.outcome,
                at_parent,
                verdicts.p_trial,
                verdicts.q_trial,
                verdicts.accept_prob,
                verdicts.residual_mass,
            )
        ]
    )
    by_tree = torch.stack([x.double() for x in (verdicts.token, verdicts.final_p, verdicts.final_margin)])
    both = _to_host(torch.cat([by_row.flatten(), by_tree.flatten()])).numpy().copy()  # pinned memory is not kept
    rows, trees = both[: by_row.numel()].reshape(6, -1), both[by_row.numel() :].reshape(3, -1)
    out, start = [], 0
    for i, one in enumerate(inputs):
        end = start + len(one.coin)
        out.append(_verdict(one, rows[:, start + 1 : end], trees[:, i]))
        start = end
    return out


def _to_host(x: Tensor) -> Tensor:
    """A copy on the host; from a GPU through pinned memory, once all that was launched before has run."""
    if x.device.type != "cuda":
        return x.cpu()
    host = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
    host.copy_(x, non_blocking=True)
    torch.cuda.current_stream(x.device).synchronize()
    return host


def _verdict(one: VerifyInput, rows: NDArray[np.float64], final: NDArray[np.float64]) -> Verdict:
    """rows [6, n]: outcome, p, p and q as tried, acceptance probability, residual mass of each node.

    final [3]: the final token, the probability it was drawn with, and the draw's margin.
    """
    outcome = rows[0].astype(np.uint8)
    path = np.flatnonzero(outcome == Outcome.ACCEPTED).astype(np.int32)
    end = int(path[-1]) if len(path) else NOBODY
    children = one.tree.children(end)
    kind = FinalKind.RECOVERED if children else FinalKind.BONUS if len(path) else FinalKind.TARGET
    return Verdict(
        outcome=outcome,
        p=rows[1].astype(np.float32),
        p_trial=rows[2].astype(np.float32),
        q_trial=rows[3].astype(np.float32),
        accept_prob=rows[4],
        coin=np.array(one.coin[1:]),
        residual_mass=rows[5],
        path=path,
        token=int(final[0]),
        kind=kind,
        final_p=float(final[1]),
        final_coin=float(one.coin[0]),
        final_margin=float(final[2]),
    )
