"""Faults in which rows of the batch are whose, and in what happens to logits on their way."""

from __future__ import annotations

from specscope.analyze.diagnose.causes import Cause
from specscope.speculate.drafters.tree_builder import Level
from tests.faults.fault import Fault, in_phase, replaced


def logits_swapped(engine, now):
    """At every third step the first two requests that draft get each other's logits."""
    pair = _drafting(now)[:2]
    if len(pair) == 2 and engine.steps % 3 == 0 and len({len(turn.logits) for turn in pair}) == 1:
        one, other = pair
        one.logits, other.logits = other.logits, one.logits


def drafts_swapped(engine, now):
    """The first two requests that draft get each other's trees."""
    pair = _drafting(now)[:2]
    if len(pair) == 2 and len({len(turn.draft.tree) for turn in pair}) == 1:
        one, other = pair
        one.draft, other.draft = other.draft, one.draft


def _drafting(now):
    return [turn for turn in now.turns if len(turn.draft.tree)]


def target_scaled(engine, now):
    """The target's logits times a factor."""
    for turn in now.turns:
        turn.logits = turn.logits * 0.9


@replaced(Level, "__init__")
def drafter_scaled(make, self, logits, *more, **named):
    """The drafter's logits times a factor."""
    make(self, logits * 1.6, *more, **named)


swapped, scaled = (in_phase("verify", change, before=True) for change in (logits_swapped, target_scaled))
FAULTS = [
    Fault("logits swapped", Cause.ROWS_SWAPPED, swapped, "model chain", rare=10),
    Fault("logits swapped, sampled", Cause.ROWS_SWAPPED, swapped, "early tree warm", rare=20),
    Fault("drafts swapped", Cause.ROWS_SWAPPED, in_phase("draft", drafts_swapped), "model chain", rare=10),
    Fault("target's logits scaled", Cause.LOGITS_SCALED, scaled, "model chain warm"),
    Fault("drafter's logits scaled", Cause.LOGITS_SCALED, drafter_scaled, "eagle chain warm"),
]
