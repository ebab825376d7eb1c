"""What is left of p and of q at a node while its children are tried; and the rows that this begins with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from specscope.kernels.flat_trees import DETERMINISTIC, NOBODY
from specscope.speculate.draws import draw
from specscope.speculate.verify.inputs import VerifyBatch
from specscope.trace.record.tree import Doubles


class DrafterRow:
    """What is left of q at a node while its children are tried."""

    def __init__(self, row: Tensor) -> None:
        self.row = row

    def without(self, token: int) -> DrafterRow:
        """The token zeroed and the rest renormalised; unchanged where nothing else has mass."""
        row = self.row.clone()
        row[token] = 0
        mass = float(row.sum())
        return DrafterRow(row.div_(mass)) if mass > 0 else self


@dataclass(frozen=True)
class Chosen:
    """A greedy target: all of p is at one token, and stays there."""

    token: int

    def prob(self, token: int) -> float:
        """1 at the token, 0 elsewhere."""
        return 1.0 if token == self.token else 0.0

    def reject(self, token: int, q: DrafterRow | None, scale: float = 1.0) -> tuple[Chosen, float]:
        """What is left, and the mass that it had before it was renormalised. `scale`: of p."""
        taken = scale * self.prob(token) if q is None else float(q.row[self.token])
        return self, max(scale - taken, 0.0)

    def draw(self, coin: float) -> tuple[int, float, float]:
        """The token, whatever the coin; its probability, and the draw's margin."""
        return self.token, 1.0, 1.0


class Residual:
    """What is left of p [V] at a node while its children are tried. Its row is never changed in place."""

    def __init__(self, row: Tensor) -> None:
        self.row = row

    def prob(self, token: int) -> float:
        """Probability of a token, after renormalising."""
        return float(self.row[token])

    def reject(self, token: int, q: DrafterRow | None, scale: float = 1.0) -> tuple[Residual, float]:
        """What is left, and the mass that it had before it was renormalised; all of it where that would be nothing.

        `scale`: of p, by the ratio of the path where that counts.
        """
        left = self.row.clone() if scale == 1 else self.row * scale
        if q is None:
            left[token] = 0
        else:
            left = left.sub_(q.row).clamp_(min=0)
        mass = float(left.sum())
        return (Residual(left.div_(mass)) if mass > 0 else self), mass

    def draw(self, coin: float) -> tuple[int, float, float]:
        """The token at which the cumulative sum passes the coin, its probability, and the draw's margin."""
        return draw(self.row, coin)


Left = Chosen | Residual


def rejected(
    p: Left, q: DrafterRow | None, token: int, *, gone: bool, scale: float = 1.0
) -> tuple[Left, DrafterRow | None, float]:
    """What is left of p and of q after a child was rejected, and the residual's mass before it was renormalised.

    `gone`: whether the child's token leaves q: it was drawn without replacement, and a sibling follows. `scale`: of p.
    """
    left, mass = p.reject(token, q, scale)
    return left, q.without(token) if gone and q is not None else q, mass


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
