"""The numbers behind a batch's verdicts as arrays over its rows, and the Verdicts that they are cut into."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from specscope.kernels.flat_trees import ACCEPTED, NOBODY, UNTRIED
from specscope.speculate.verify.distribution import Left
from specscope.speculate.verify.inputs import VerifyBatch
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
        nodes, each = np.zeros((6, len(batch.trees.parent))), np.zeros((4, len(batch.trees.final)))
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
        """One verdict for each tree."""
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
