"""The tensors of a whole batch that the verdicts of a step follow from, and the numbers that become its verdicts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from specscope.kernels.tree_batch import ACCEPTED, DETERMINISTIC, NOBODY, REJECTED, UNTRIED, FlatTrees, Tree
from specscope.speculate.changes import Changes
from specscope.speculate.drafters.base import Context, Draft
from specscope.speculate.sampling import LogitRows, TargetRows, target_rows
from specscope.speculate.verify.distribution import Chosen, Left, Residual
from specscope.trace.record.coins import Stream, coins
from specscope.trace.record.records import FinalKind, Verdict
from specscope.trace.record.rules import STANDARD
from specscope.trace.record.tree import ROOT, Doubles, DraftTree


@dataclass(frozen=True)
class VerifyBatch:
    """B trees with R = sum(n + 1) rows, each root and then its nodes, and the distributions at these rows."""

    trees: FlatTrees  # which row of what follows is whose
    target: TargetRows  # its choices at rows of greedy trees, its probabilities at the others
    q: Sequence[Tensor]  # [Q] rows, float32 [V] each: the tensors that the drafter sampled from

    def on_host(self) -> VerifyBatch:
        if self.target.p.device.type == "cpu":
            return self
        target = TargetRows(self.target.choices.cpu(), self.target.p.cpu())
        return VerifyBatch(self.trees, target, [row.cpu() for row in self.q])

    def by_row(self, by_tree: NDArray[Any]) -> NDArray[Any]:
        """[R] what is said of each tree [B], at each of its rows."""
        return np.repeat(by_tree, np.diff(self.trees.root))


def step_batch(parts: Sequence[tuple[Context, Draft, Tensor]], changes: Changes | None = None) -> VerifyBatch:
    """The batch of an engine's step. A part: a request, its draft, and the target's logits [n + 1, V] at its rows.

    `changes`: what a fork forces.
    """
    trees, rows = [], list[Tensor]()
    for context, draft, _ in parts:
        position, greedy, nodes = context.position, context.params.greedy, range(len(draft.tree))
        coin = coins(context.params.seed, Stream.VERIFY, position, len(nodes) + 1)
        forced, final = dict[int, bool](), None
        if changes is not None:
            coin = np.array([coin[0], *(changes.coins.get((position, node), coin[node + 1]) for node in nodes)])
            forced = {node: changes.outcomes[position, node] for node in nodes if (position, node) in changes.outcomes}
            final = changes.tokens.get(position)
        trees.append(judged_tree(draft.tree, draft.q, coin, rows, greedy=greedy, forced=forced, final=final))
    return VerifyBatch(FlatTrees.build(trees), target_rows([logit_rows(*part) for part in parts]), rows)


def judged_tree(
    tree: DraftTree,
    q: Mapping[int, Tensor],
    coin: Doubles,
    rows: list[Tensor],
    *,
    greedy: bool = False,
    forced: Mapping[int, bool] | None = None,
    final: int | None = None,
) -> Tree:
    """A tree as the backends walk it; its rows of q, by parent, are appended to `rows`.

    coin [n + 1]: coin[0] draws the final token, coin[i + 1] is node i's; `greedy`: the target's rows are choices;
    `forced`: nodes that are forced accepted (True) or rejected; `final`: the final token, where that is forced.
    """
    q_row, outcome = np.full(len(tree) + 1, NOBODY), np.full(len(tree), UNTRIED, dtype=np.uint8)
    for node, row in q.items():
        q_row[node - ROOT] = len(rows)
        rows.append(row)
    for node, accepted in (forced or {}).items():
        outcome[node] = ACCEPTED if accepted else REJECTED
    return Tree(tree.token, tree.parent, tree.drawn, coin, q_row, outcome, NOBODY if final is None else final, greedy)


def logit_rows(context: Context, draft: Draft, logits: Tensor) -> LogitRows:
    """The target's logits at the root and at each node, with the tokens on the way there where they count."""
    tree = draft.tree
    return context.rows(logits, lambda: [tree.token[tree.path_to(node)].tolist() for node in range(ROOT, len(tree))])


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


def drafter_row(batch: VerifyBatch, row: int, children: Sequence[int]) -> Tensor | None:
    """What the children of a row were drawn from; None where they are deterministic."""
    trees = batch.trees
    return None if trees.drawn[children[0]] == DETERMINISTIC else batch.q[trees.q_row[row]]


@dataclass(frozen=True)
class BatchEvidence:
    """Of R rows and B trees. Zero at roots, and at nodes that were not tried (except p)."""

    outcome: Doubles  # [R]
    p: Doubles  # [R] the target's probability of the token at its parent
    p_trial: Doubles  # [R] as it was tried
    q_trial: Doubles  # [R]
    accept_prob: Doubles  # [R]
    residual_mass: Doubles  # [R] at rejected nodes
    token: Doubles  # [B] the final token
    final_p: Doubles  # [B] the probability it was drawn with
    final_margin: Doubles  # [B]
    recovered: Doubles  # [B] whether it was drawn from a residual
    coin: Doubles  # [R] as they were used; the final token's at roots
    rule: str = STANDARD

    @staticmethod
    def empty(batch: VerifyBatch, rule: str = STANDARD) -> BatchEvidence:
        nodes, each = np.zeros((6, len(batch.trees.parent))), np.zeros((4, len(batch.trees.final)))
        nodes[1] = p_of_nodes(batch)
        return BatchEvidence(*nodes, *each, batch.trees.coin.copy(), rule)  # type: ignore[call-arg]

    def trial(self, row: int, outcome: int, p: float, q: float, accept: float) -> None:
        """Note that a node was tried, and how it came out."""
        self.outcome[row], self.p_trial[row], self.q_trial[row], self.accept_prob[row] = outcome, p, q, accept

    def final(self, tree: int, token: int, prob: float, margin: float) -> None:
        """Note a tree's final token, its probability and the draw's margin."""
        self.token[tree], self.final_p[tree], self.final_margin[tree] = token, prob, margin

    def draw_final(self, batch: VerifyBatch, tree: int, left: Left) -> None:
        """Draw a tree's final token from what is left of p, unless it is given."""
        given = int(batch.trees.final[tree])
        if given == NOBODY:
            self.final(tree, *left.draw(float(batch.trees.coin[batch.trees.root[tree]])))
        else:
            self.final(tree, given, left.prob(given), 1.0)

    def verdicts(self, batch: VerifyBatch) -> list[Verdict]:
        return [self._verdict(batch, tree, root) for tree, root in enumerate(batch.trees.root[:-1].tolist())]

    def _verdict(self, batch: VerifyBatch, tree: int, root: int) -> Verdict:
        nodes = slice(root + 1, int(batch.trees.root[tree + 1]))
        outcome = self.outcome[nodes].astype(np.uint8)
        path = np.flatnonzero(outcome == ACCEPTED).astype(np.int32)
        forced = np.flatnonzero((batch.trees.forced[nodes] != UNTRIED) & (outcome != UNTRIED)).tolist()
        if batch.trees.final[tree] != NOBODY:
            forced.append(len(outcome))
        kind = FinalKind.BONUS if len(path) else FinalKind.TARGET
        return Verdict(
            outcome=outcome,
            p=self.p[nodes].astype(np.float32),
            p_trial=self.p_trial[nodes].astype(np.float32),
            q_trial=self.q_trial[nodes].astype(np.float32),
            accept_prob=self.accept_prob[nodes].copy(),
            coin=self.coin[nodes].copy(),
            residual_mass=self.residual_mass[nodes].copy(),
            path=path,
            token=int(self.token[tree]),
            kind=FinalKind.RECOVERED if self.recovered[tree] else kind,
            final_p=float(self.final_p[tree]),
            final_coin=float(self.coin[root]),
            final_margin=float(self.final_margin[tree]),
            forced=np.asarray(forced, dtype=np.int32),
            rule=self.rule,
        )
