"""Ratios of paths, which block verification and traversal go by, from a step's evidence.

speculate/verify/traversal.py has the rule. A node's ratio follows from p and q as tried and from the masses that
rejected siblings left, so a verdict can be computed again without any distribution.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from specscope.trace.record.records import Outcome, Verdict
from specscope.trace.record.tree import Doubles, DraftTree


@dataclass(frozen=True)
class Ratios:
    """The ratios of the n nodes of a tree; 0 at nodes that were not tried."""

    parent: Doubles  # [n] what was left of the parent's ratio when the node came up
    own: Doubles  # [n] the node's own then
    left: Doubles  # [n] and what is left of it when all below was rejected: what its coin is held against


def ratios(tree: DraftTree, verdict: Verdict) -> Ratios:
    """The ratios of a step under a rule that looks ahead."""
    n = len(tree)
    parent, own_ratio, left = np.zeros((3, n + 1))  # the root comes last: its index is -1
    left[-1] = 1.0
    forced = set(verdict.forced.tolist())
    rows = zip(
        tree.parent.tolist(),
        verdict.outcome.tolist(),
        verdict.p_trial.tolist(),
        verdict.q_trial.tolist(),
        verdict.residual_mass.tolist(),
        strict=True,
    )
    for node, (above, outcome, p, q, mass) in enumerate(rows):
        if outcome == Outcome.UNTRIED:
            continue
        ratio = parent[node] = left[above]
        own_ratio[node] = left[node] = min(1.0, ratio * p / q) if q > 0 else 0.0
        if outcome == Outcome.REJECTED:
            left[above] = mass / (mass + (1 - ratio)) if mass > 0 else float(ratio == 1)
        elif node in forced:
            left[node] = 1.0
    return Ratios(parent[:n], own_ratio[:n], left[:n])
