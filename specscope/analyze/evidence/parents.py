"""What the evidence says about the parents that were tried, over many steps, as arrays."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from specscope.analyze.evidence.arrays import Indices
from specscope.analyze.evidence.fields import (
    column,
    doubles,
    flags,
    holding,
    indices,
    lengths,
    number_of,
    stacked,
    where_told,
    widths,
)
from specscope.trace.record.tree import Doubles
from specscope.trace.run.packed import Picked

if TYPE_CHECKING:
    from specscope.analyze.evidence.columns import Columns


@dataclass(frozen=True)
class TriedParents:
    """K parents that were tried, of the steps whose evidence has them; with what it says of nodes and final tokens."""

    columns: Columns  # of all steps

    # [K] fields of ParentNotes
    node = column("parents", "node", np.int64)  # within its tree; ROOT
    choice = column("parents", "choice", np.int64)
    choice_p = column("parents", "choice_p", np.float64)
    entropy = column("parents", "entropy", np.float64)
    varentropy = column("parents", "varentropy", np.float64)
    q_entropy = column("parents", "q_entropy", np.float64)
    q_varentropy = column("parents", "q_varentropy", np.float64)
    choice_rank = column("parents", "choice_rank", np.int64)
    choice_q = column("parents", "choice_q", np.float64)
    outside = column("parents", "outside", np.float64)
    # [K, t] the target's likeliest tokens, raw; [K, m] the drafter's; -1 where there are none, and probability 0
    top = stacked("top", np.int64)
    top_p = stacked("top_p", np.float64)
    draft_top = stacked("draft_top", np.int64)
    draft_top_p = stacked("draft_top_p", np.float64)
    tops = indices(lambda e: widths(e.picked, "parents", "top_p"))  # [K] how many of the t are recorded
    draft_tops = indices(lambda e: widths(e.picked, "parents", "draft_top_p"))  # and of the m
    # [N] of each node; 0 where there are no notes
    raw_p = doubles(lambda e: where_told(e.columns, "parents", "raw_p", np.float64, 0))
    rank = indices(lambda e: where_told(e.columns, "parents", "rank", np.int64, 0))
    q_rank = indices(lambda e: where_told(e.columns, "parents", "q_rank", np.int64, 0))
    # [S] whether the step's evidence has parents; of the final token: of what it was drawn from, and its p before any
    # rejection
    there = flags(lambda e: holding(e.picked, "parents"))
    final_entropy = number_of("parents", "final_entropy")
    final_varentropy = number_of("parents", "final_varentropy")
    final_p = number_of("parents", "final_target_p")
    # [K] the step and the row of each
    step = indices(lambda e: np.repeat(np.arange(len(e.columns)), lengths(e.picked, "parents", "node")))
    row = indices(lambda e: e.columns.root_row[e.step] + 1 + e.node)
    # [N] the parent under which each node was tried, -1 where there is none
    at_node = indices(lambda e: e.at_row[e.columns.row])

    @property
    def picked(self) -> list[Picked]:
        """The columns in which the steps lie."""
        return self.columns.picked

    @cached_property
    def at_row(self) -> Indices:
        """[rows] the parent at each row, -1 where there is none."""
        parents = np.full(self.columns.rows, -1)
        parents[self.row] = np.arange(len(self.row))
        return parents

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
