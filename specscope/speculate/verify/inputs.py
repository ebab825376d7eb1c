"""What the verdicts of a step follow from, as one structure for every backend: the tensors of the whole batch."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from specscope.kernels.flat_trees import ACCEPTED, DETERMINISTIC, NOBODY, REJECTED, UNTRIED, FlatTrees, Tree
from specscope.speculate.changes import Changes
from specscope.speculate.drafters.base import Context, Draft
from specscope.speculate.sampling import LogitRows, Memory, TargetRows, target_rows
from specscope.speculate.verify.distribution import Chosen, DrafterRow, Left, Residual
from specscope.trace.record.coins import Stream, coins
from specscope.trace.record.tree import ROOT, Doubles, DraftTree


@dataclass(frozen=True)
class VerifyInput:
    """What is verified for one request: its tree, its coins, and what is forced. The target's rows are kept apart."""

    tree: DraftTree
    q: Mapping[int, Tensor]  # [V], the drafter's at each parent of sampled nodes, ROOT for the first level
    coin: Doubles  # [n + 1]: coin[0] draws the final token, coin[i + 1] is node i's
    greedy: bool  # whether the target's rows are choices, not probabilities
    forced: Mapping[int, bool] = field(default_factory=dict)  # nodes that are forced accepted (True) or rejected
    final: int | None = None  # the final token, where that is forced


@dataclass(frozen=True)
class VerifyBatch:
    """B trees with R = sum(n + 1) rows, each root and then its nodes, and the distributions at these rows."""

    inputs: Sequence[VerifyInput]  # [B]
    trees: FlatTrees  # the same laid end to end: which row of what follows is whose
    target: TargetRows  # its choices at greedy rows, its probabilities at the others
    q: Sequence[Tensor]  # [Q] rows, float32 [V] each: the tensors that the drafter sampled from

    @staticmethod
    def build(inputs: Sequence[VerifyInput], target: TargetRows) -> VerifyBatch:
        """`target`: rows of greedy and of sampled inputs, each in the inputs' order."""
        q: list[Tensor] = []
        trees = [_tree(tree_input, q) for tree_input in inputs]
        return VerifyBatch(inputs, FlatTrees.build(trees), target, q)

    def on_host(self) -> VerifyBatch:
        """The same batch with its tensors on the host."""
        if self.target.p.device.type == "cpu":
            return self
        target = TargetRows(self.target.choices.cpu(), self.target.p.cpu())
        return VerifyBatch(self.inputs, self.trees, target, [row.cpu() for row in self.q])

    def by_row(self, by_tree: NDArray[Any]) -> NDArray[Any]:
        """[R] what is said of each tree [B], at each of its rows."""
        return np.repeat(by_tree, np.diff(self.trees.root))


def step_batch(parts: Sequence[tuple[Context, Draft, Tensor]], changes: Changes | None, memory: Memory) -> VerifyBatch:
    """The batch of an engine's step. A part: a request, its draft, and the target's logits [n + 1, V] at its rows.

    `changes`: what a fork forces; `memory`: where the target's probabilities are put.
    """
    inputs = []
    for context, draft, _ in parts:
        coin = coins(context.params.seed, Stream.VERIFY, context.position, len(draft.tree) + 1)
        tree_input = VerifyInput(draft.tree, draft.q, coin, context.params.greedy)
        inputs.append(tree_input if changes is None else changed_input(tree_input, changes, context.position))
    return VerifyBatch.build(inputs, target_rows([logit_rows(*part) for part in parts], memory))


def changed_input(tree_input: VerifyInput, changes: Changes, position: int) -> VerifyInput:
    """The input with what a fork forces at this position of the request."""
    coin = tree_input.coin.copy()
    nodes = range(len(tree_input.tree))
    for node in nodes:
        coin[node + 1] = changes.coins.get((position, node), coin[node + 1])
    forced = {node: changes.outcomes[position, node] for node in nodes if (position, node) in changes.outcomes}
    return dataclasses.replace(tree_input, coin=coin, forced=forced, final=changes.tokens.get(position))


def logit_rows(context: Context, draft: Draft, logits: Tensor) -> LogitRows:
    """The target's logits at the root and at each node, with the tokens on the way there where they count."""
    tree = draft.tree
    return context.rows(logits, lambda: [[], *(tree.token[tree.path_to(node)].tolist() for node in range(len(tree)))])


def _tree(tree_input: VerifyInput, q: list[Tensor]) -> Tree:
    """The tree as the backends walk it. Its rows of q are appended to `q`."""
    tree, nodes = tree_input.tree, len(tree_input.tree)
    q_row, forced = np.full(nodes + 1, NOBODY), np.full(nodes, UNTRIED, dtype=np.uint8)
    for node, row in tree_input.q.items():
        q_row[node - ROOT] = len(q)
        q.append(row)
    for node, accepted in tree_input.forced.items():
        forced[node] = ACCEPTED if accepted else REJECTED
    final = NOBODY if tree_input.final is None else tree_input.final
    return Tree(tree.token, tree.parent, tree.drawn, tree_input.coin, q_row, forced, final, tree_input.greedy)


def target_left(batch: VerifyBatch) -> list[Left]:
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
