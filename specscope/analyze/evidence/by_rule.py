"""What the checks need to know of the rule of each step: ratios of paths, and whose coin decided."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from specscope.analyze.evidence.arrays import join
from specscope.trace.history.ratios import ratios
from specscope.trace.record.records import Outcome, RequestStep
from specscope.trace.record.rules import BLOCK, MATCH, STANDARD, TRAVERSAL
from specscope.trace.record.tree import Bools, Doubles


@dataclass(frozen=True)
class ByRule:
    """Of S steps with N nodes. Ratios are 1 under rules that do not go by them."""

    walks: Bools  # [S] from the root down, sibling after sibling: standard and match
    ahead: Bools  # [S] block and traversal
    match: Bools  # [S]
    judged: Bools  # [N] whether the node's own coin decided
    parent: Doubles  # [N] what was left of the parent's ratio when the node came up
    left: Doubles  # [N] what was left of the node's own when its coin spoke
    open: Bools  # [N] whether what lies below a tried node could be accepted

    @property
    def told(self) -> Bools:
        """[S] rules whose steps can be checked."""
        return self.walks | self.ahead

    @staticmethod
    def of(parts: Sequence[RequestStep], *, ours: bool) -> ByRule:
        """`ours`: whether our engine made the run: another one's block verification tells less."""
        rule = np.array([part.rule for part in parts], np.str_)
        match = rule == MATCH
        ahead = np.isin(rule, (BLOCK, TRAVERSAL)) & ours
        outcome = join([part.verdict.outcome for part in parts if part.verdict is not None], np.uint8)
        judged, open_ = outcome != Outcome.UNTRIED, outcome == Outcome.ACCEPTED
        parent, left = np.ones((2, len(outcome)))
        ends = np.cumsum([len(part.tree) for part in parts], dtype=np.int64)
        for step in np.flatnonzero(ahead).tolist():
            part, end = parts[step], int(ends[step])
            assert part.verdict is not None
            mine, found = slice(end - len(part.tree), end), ratios(part.tree, part.verdict)
            judged[mine], open_[mine] = part.verdict.judged, found.own > 0
            parent[mine], left[mine] = found.parent, found.left
        walks = (rule == STANDARD) | match
        return ByRule(walks, ahead, match, judged, parent, left, open_)


def left_out(parts: Sequence[RequestStep], told: Bools) -> list[str]:
    """The rules of steps that are not checked."""
    return sorted({part.rule for part, yes in zip(parts, told.tolist(), strict=True) if not yes})
