"""What the questions are asked of: the decode steps as arrays, and what else is known about each step."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from specscope.analyze.evidence.arrays import Indices, doubles, flags
from specscope.analyze.evidence.columns import Columns
from specscope.analyze.evidence.visits import visits
from specscope.trace.history.history import History
from specscope.trace.history.wording import plural
from specscope.trace.record.records import RunInfo
from specscope.trace.record.tree import Bools

COUNTS_ONLY = "this capture holds counts only, so there are no steps"
ALL_FORCED = "nothing was judged: every outcome was forced"
NO_DRAFTS = "nothing was drafted"


def snapshot(history: History) -> History:
    """The history as it stands: another thread may read it while the history goes on."""
    return dataclasses.replace(history, steps=list(history.steps), requests=dict(history.requests))


@dataclass(frozen=True)
class Evidence:
    """S decode steps, with their N nodes in `columns`; [S] or [N] arrays."""

    columns: Columns
    run: RunInfo | None
    counts_only: bool  # whether there are intervals and no steps

    @staticmethod
    def of(history: History, request: str | None = None) -> Evidence:
        """The evidence on all requests on the path, or on one."""
        chosen = [visit for visit in visits(history) if request is None or visit.part.request == request]
        return Evidence(Columns.of(chosen), history.run, bool(history.acceptance.aggregates) and not chosen)

    def lacking(self, asked: Bools) -> tuple[str, ...]:
        """Why there is nothing to ask of these nodes or steps; empty where there is something."""
        if self.counts_only:
            return (COUNTS_ONLY,)
        if not len(self.columns.token):
            return (NO_DRAFTS,)
        return () if asked.any() else (ALL_FORCED,)

    # [N] the drafter's probability of the node: q of a sampled one, else its own; NaN where it has none
    confidence = doubles(lambda e: np.where(e.columns.sampled, e.columns.q, e.columns.draft_prob))
    # [S] whether something was drafted, and nothing in the step was forced
    drafts = flags(
        lambda e: (np.diff(e.columns.start) > 0) & ~e.columns.any_in_step(e.columns.forced) & ~e.columns.forced_final
    )

    @cached_property
    def judged(self) -> Bools:
        """[N] whether the rule decided on the node, unforced, at a place that the output reached.

        Rules that look ahead also try nodes below those that they reject: these are left out.
        """
        c = self.columns
        reached = (c.above < 0) | c.on_path[c.above] if len(c.token) else c.tried
        return c.tried & ~c.forced & (~c.ahead[c.step] | reached)

    @cached_property
    def taken(self) -> Indices:
        """[N] the token that the target put in the node's place: the accepted sibling's, or the final token.

        -1 where it put none: the path ended above, or the final token was forced.
        """
        c = self.columns
        at_row = np.full(c.rows, -1, np.int64)
        at_row[c.row[c.on_path]] = c.token[c.on_path]
        at_row[c.final_row] = np.where(c.forced_final, -1, c.final)
        return at_row[c.row]

    @property
    def left_out(self) -> int:
        """Drafts that were left out because something in them was forced."""
        return int((np.diff(self.columns.start) > 0).sum() - self.drafts.sum())

    @property
    def notes(self) -> tuple[str, ...]:
        notes = []
        if self.run is not None and not self.run.tells_tokens:
            notes.append(f"{self.run.privacy.lack}: which token it was and where the target's choice was is unknown")
        if self.left_out:
            notes.append(f"left out: {plural(self.left_out, 'draft')} with forced outcomes")
        if beyond := int((self.columns.tried & ~self.columns.forced & ~self.judged).sum()):
            notes.append(f"left out: {plural(beyond, 'node')} that the rule tried below rejected ones")
        return tuple(notes)
