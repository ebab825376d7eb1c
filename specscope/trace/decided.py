"""How a node's outcome was decided, by the rule of verification."""

from __future__ import annotations

from specscope.trace.records import Outcome, Verdict
from specscope.trace.rules import MATCH

BELOW, DREW, DREW_ANOTHER, LESS, NOT_LESS = "↓", "=", "≠", "<", "≥"
DRAWN = (DREW, DREW_ANOTHER)
TOSSED = (LESS, NOT_LESS)


def coin_sign(verdict: Verdict, node: int) -> str:
    """How a tried node's coin stands to its accept_prob.

    `<` or `≥`; `=` or `≠` where the coin drew this token or another (match); `↓` where a node below was accepted, and
    with it this one (block, traversal).
    """
    if verdict.rule == MATCH:
        return DREW if verdict.outcome[node] == Outcome.ACCEPTED else DREW_ANOTHER
    if not verdict.judged[node]:
        return BELOW
    return LESS if verdict.coin[node] < verdict.accept_prob[node] else NOT_LESS
