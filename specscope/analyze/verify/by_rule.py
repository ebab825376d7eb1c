"""What the checks need to know of the rule of each step: ratios of paths, and whose coin decided."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from specscope.trace.ratios import ratios
from specscope.trace.records import RequestStep
from specscope.trace.rules import BLOCK, MATCH, STANDARD, TRAVERSAL
from specscope.trace.tree import Bools, Doubles


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
        judged, parent, left, open_ = [np.zeros(0, np.bool_)], [np.zeros(0)], [np.zeros(0)], [np.zeros(0, np.bool_)]
        for part, looks in zip(parts, ahead.tolist(), strict=True):
            verdict, n = part.verdict, len(part.tree)
            assert verdict is not None
            judged.append(verdict.judged)
            if looks:
                found = ratios(part.tree, verdict)
                parent.append(found.parent)
                left.append(found.left)
                open_.append(found.own > 0)
            else:
                parent.append(np.ones(n))
                left.append(np.ones(n))
                open_.append(verdict.outcome == 1)
        return ByRule(
            walks=(rule == STANDARD) | match,
            ahead=ahead,
            match=match,
            judged=np.concatenate(judged),
            parent=np.concatenate(parent),
            left=np.concatenate(left),
            open=np.concatenate(open_),
        )


def left_out(parts: Sequence[RequestStep], told: Bools) -> list[str]:
    """The rules of steps that are not checked."""
    return sorted({part.rule for part, yes in zip(parts, told.tolist(), strict=True) if not yes})
