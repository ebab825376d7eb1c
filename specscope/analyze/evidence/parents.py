"""What the evidence says about the parents that were tried, over many steps, as arrays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from specscope.analyze.evidence.arrays import Indices
from specscope.analyze.evidence.fields import lengths, of_finals, of_parents, of_their_nodes, stacked, width_of
from specscope.trace.record.tree import Bools, Doubles
from specscope.trace.run.packed import Picked


@dataclass(frozen=True)
class TreeRows:
    """The rows of S trees with N nodes, see columns.py."""

    steps: Indices  # [N] the step of each node
    of_nodes: Indices  # [N] the row of each node's parent
    of_roots: Indices  # [S] the row of each root
    count: int  # of them all


@dataclass(frozen=True)
class TriedParents:
    """K parents that were tried, of the steps whose evidence has them; with what it says of nodes and final tokens."""

    picked: Sequence[Picked]  # all steps
    there: Bools  # [S] whether the step's evidence has parents
    rows: TreeRows

    # [K] fields of ParentNotes
    node = of_parents("node", np.int64)  # within its tree; ROOT
    choice = of_parents("choice", np.int64)
    choice_p = of_parents("choice_p", np.float64)
    entropy = of_parents("entropy", np.float64)
    varentropy = of_parents("varentropy", np.float64)
    q_entropy = of_parents("q_entropy", np.float64)
    q_varentropy = of_parents("q_varentropy", np.float64)
    choice_rank = of_parents("choice_rank", np.int64)
    choice_q = of_parents("choice_q", np.float64)
    outside = of_parents("outside", np.float64)
    # [K, t] the target's likeliest tokens, raw; [K, m] the drafter's; -1 where there are none, and probability 0
    top = stacked("top", np.int64)
    top_p = stacked("top_p", np.float64)
    draft_top = stacked("draft_top", np.int64)
    draft_top_p = stacked("draft_top_p", np.float64)
    tops, draft_tops = width_of("top_p"), width_of("draft_top_p")  # [K] how many of the t and m are recorded
    # [N] of each node; 0 where there are no notes
    raw_p = of_their_nodes("raw_p", np.float64)
    rank = of_their_nodes("rank", np.int64)
    q_rank = of_their_nodes("q_rank", np.int64)
    # [S] of the final token: of what it was drawn from, and its p before any rejection
    final_entropy = of_finals("final_entropy")
    final_varentropy = of_finals("final_varentropy")
    final_p = of_finals("final_target_p")

    @cached_property
    def step(self) -> Indices:
        """[K] the step of each."""
        counts = lengths(self.picked, "parents", "node")
        return np.repeat(np.arange(len(counts)), counts)

    @cached_property
    def row(self) -> Indices:
        """[K] the row of each."""
        return self.rows.of_roots[self.step] + 1 + self.node

    @cached_property
    def at_row(self) -> Indices:
        """[rows] the parent at each row, -1 where there is none."""
        parents = np.full(self.rows.count, -1)
        parents[self.row] = np.arange(len(self.row))
        return parents

    @cached_property
    def at_node(self) -> Indices:
        """[N] the parent under which each node was tried, -1 where there is none."""
        return self.at_row[self.rows.of_nodes]

    def of_rows(self, values: Doubles, rows: Indices) -> Doubles:
        """The values [K] of the parents at these rows; NaN where there is none."""
        parents = self.at_row[rows]
        return np.where(parents >= 0, values[parents], np.nan) if len(values) else np.full(len(parents), np.nan)

    @cached_property
    def gap(self) -> Doubles:
        """[K] the target's raw first less its raw second probability; NaN where two were not recorded."""
        if self.top_p.shape[1] < 2:
            return np.full(len(self), np.nan)
        return np.where(self.tops >= 2, self.top_p[:, 0] - self.top_p[:, 1], np.nan)

    def __len__(self) -> int:
        return len(self.step)

    def shares(self) -> dict[str, Doubles]:
        """[K] or [K, t] each, by name: all that is a probability."""
        return {
            "p of the likeliest tokens": self.top_p,
            "p of the choice": self.choice_p,
            "the drafter's probability of its likeliest tokens": self.draft_top_p,
            "the drafter's probability of the choice": self.choice_q,
        }

    def nats(self) -> dict[str, Doubles]:
        """[K] each, by name: entropies and varentropies."""
        return {name: getattr(self, name) for name in ("entropy", "varentropy", "q_entropy", "q_varentropy")}

    def drafters(self, parents: Indices, token: Indices) -> Doubles:
        """The drafter's raw probability of these tokens at these parents; NaN where it is not among the likeliest."""
        if not self.draft_top.size:
            return np.full(len(parents), np.nan)
        same = (self.draft_top[parents] == token[:, None]) & (parents >= 0)[:, None]
        return np.where(same.any(axis=1), np.where(same, self.draft_top_p[parents], 0).sum(axis=1), np.nan)
