"""The numbers behind a batch's verdicts as arrays over its rows, and the Verdicts that they are cut into."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from specscope.kernels.flat_trees import ACCEPTED, UNTRIED
from specscope.speculate.verify.inputs import VerifyBatch, VerifyInput
from specscope.trace.record.records import FinalKind, Verdict
from specscope.trace.record.rules import STANDARD
from specscope.trace.record.tree import Doubles


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
        """Evidence before any node was tried."""
        rows, trees = len(batch.trees.parent), len(batch.inputs)
        nodes, each = np.zeros((6, rows)), np.zeros((4, trees))
        return BatchEvidence(*nodes, *each, batch.trees.coin.copy(), rule)  # type: ignore[call-arg]

    def trial(self, row: int, outcome: int, p: float, q: float, accept: float) -> None:
        """Note that a node was tried, and how it came out."""
        self.outcome[row], self.p_trial[row], self.q_trial[row], self.accept_prob[row] = outcome, p, q, accept

    def final(self, tree: int, token: int, prob: float, margin: float) -> None:
        """Note a tree's final token, its probability and the draw's margin."""
        self.token[tree], self.final_p[tree], self.final_margin[tree] = token, prob, margin

    def verdicts(self, batch: VerifyBatch) -> list[Verdict]:
        """One verdict for each tree."""
        root = batch.trees.root.tolist()
        return [
            self._verdict(tree_input, i, root[i], slice(root[i] + 1, root[i + 1]))
            for i, tree_input in enumerate(batch.inputs)
        ]

    def _verdict(self, tree_input: VerifyInput, tree: int, root: int, nodes: slice) -> Verdict:
        outcome = self.outcome[nodes].astype(np.uint8)
        path = np.flatnonzero(outcome == ACCEPTED).astype(np.int32)
        forced = [node for node in tree_input.forced if outcome[node] != UNTRIED]
        if tree_input.final is not None:
            forced.append(len(tree_input.tree))
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
