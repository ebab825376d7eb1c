"""Explanations in which nothing is wrong: a weak drafter, hard text, a tree that is too small."""

from __future__ import annotations

from specscope.analyze.diagnose.case import Case
from specscope.analyze.diagnose.causes import Cause
from specscope.analyze.diagnose.diagnosis import REMARK, Suspect

WEAK = 0.5  # of the first drafted tokens accepted
HARD = 1.0  # nats: as unsure as between three tokens
EASY = 0.75  # conditional acceptance at the deepest level: one more would gain as much of a token


def weak_drafter(case: Case) -> Suspect | None:
    """Most first drafts are rejected, and nothing says why."""
    figures = case.history.acceptance
    if figures.drafts < 20 or not figures.conditional or figures.conditional[0] is None:
        return None
    first = figures.conditional[0]
    entropy = _entropy(case)
    if first >= WEAK or (entropy is not None and entropy > HARD):
        return None
    said = [f"the first drafted level is accepted in {first:.0%} of {figures.drafts:,} drafts"]
    if entropy is not None:
        said.append(f"the target itself is sure there: its entropy is {entropy:.2f} nats")
    return Suspect(Cause.WEAK_DRAFTER, REMARK * (1 - first), tuple(said))


def hard_text(case: Case) -> Suspect | None:
    """The target's own distribution is wide: no drafter could guess it."""
    entropy = _entropy(case)
    if entropy is None or entropy <= HARD:
        return None
    said = f"the entropy of the target's distribution is {entropy:.2f} nats on average where drafts are tried"
    return Suspect(Cause.HARD_TEXT, REMARK * min(entropy / 4, 1.0), (said,))


def tree_too_small(case: Case) -> Suspect | None:
    """The deepest level is accepted nearly as often as the first."""
    figures = case.history.acceptance
    deep = [(d, c) for d, c in enumerate(figures.conditional, 1) if c is not None and figures.tried_at[d - 1] >= 20]
    if not deep or deep[-1][1] < EASY:
        return None
    depth, rate = deep[-1]
    said = f"depth {depth}, the last, is accepted in {rate:.0%} of the drafts that reach it"
    return Suspect(Cause.TREE_TOO_SMALL, REMARK * rate / 2, (said,))


def _entropy(case: Case) -> float | None:
    """Mean entropy of p at the roots that were tried; None where the capture does not say."""
    values = []
    for step in case.drafting:
        place = step.top_of(-1)
        if place is not None and step.part.parents is not None:
            values.append(float(step.part.parents.entropy[place]))
    return sum(values) / len(values) if len(values) >= 20 else None
