"""The distributions that a batch's verdicts begin with."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from specscope.kernels.flat_trees import DETERMINISTIC, NOBODY
from specscope.speculate.verify.distribution import Chosen, DrafterRow, Left, Residual
from specscope.speculate.verify.inputs import VerifyBatch
from specscope.trace.record.tree import Doubles


def target_rows(batch: VerifyBatch) -> list[Left]:
    """[R] the target's distribution at each row."""
    choices, p = batch.target.choices.tolist(), batch.target.p.unbind()
    greedy = batch.by_row(batch.trees.greedy).tolist()
    return [
        Chosen(choices[behind]) if one_hot else Residual(p[behind])
        for behind, one_hot in zip(batch.trees.p_row.tolist(), greedy, strict=True)
    ]


def p_of_nodes(batch: VerifyBatch) -> Doubles:
    """[R] the target's probability of each node's token, as its parent's row has it; 0 at roots."""
    trees, target, greedy = batch.trees, batch.target, batch.by_row(batch.trees.greedy)
    behind = trees.p_row[np.maximum(trees.parent, 0)]
    out = np.zeros(len(greedy))
    out[greedy] = target.choices.numpy()[behind[greedy]] == trees.token[greedy]
    out[~greedy] = target.p.numpy()[behind[~greedy], trees.token[~greedy]]
    out[trees.parent == NOBODY] = 0
    return out


def drafter_row(batch: VerifyBatch, row: int, children: Sequence[int]) -> DrafterRow | None:
    """What the children of a row were drawn from; None where they are deterministic."""
    trees = batch.trees
    return None if trees.drawn[children[0]] == DETERMINISTIC else DrafterRow(batch.q[trees.q_row[row]])
