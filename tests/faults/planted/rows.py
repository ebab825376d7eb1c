"""Faults in which rows of the batch are whose, and in what happens to logits on their way."""

from __future__ import annotations

from specscope.analyze.diagnose.causes import Cause
from specscope.engine.phases import Phases
from specscope.speculate.drafters.tree_builder import Level
from tests.faults.fault import Fault


def logits_swapped(patch, engine):
    """At every third step the first two requests that draft get each other's logits."""
    verify = Phases.verify

    def swapped(self, now):
        pair = _drafting(now)[:2]
        if len(pair) == 2 and engine.steps % 3 == 0 and len({len(turn.logits) for turn in pair}) == 1:
            one, other = pair
            one.logits, other.logits = other.logits, one.logits
        verify(self, now)

    patch.setattr(Phases, "verify", swapped)


def drafts_swapped(patch, engine):
    """The first two requests that draft get each other's trees."""
    draft = Phases.draft

    def swapped(self, now):
        draft(self, now)
        pair = _drafting(now)[:2]
        if len(pair) == 2 and len({len(turn.draft.tree) for turn in pair}) == 1:
            one, other = pair
            one.draft, other.draft = other.draft, one.draft

    patch.setattr(Phases, "draft", swapped)


def _drafting(now):
    return [turn for turn in now.turns if len(turn.draft.tree)]


def target_scaled(factor):
    """The target's logits times a factor."""

    def install(patch, engine):
        verify = Phases.verify

        def scaled(self, now):
            for turn in now.turns:
                turn.logits = turn.logits * factor
            verify(self, now)

        patch.setattr(Phases, "verify", scaled)

    return install


def drafter_scaled(factor):
    """The drafter's logits times a factor."""

    def install(patch, engine):
        make = Level.__init__
        patch.setattr(
            Level, "__init__", lambda self, logits, *more, **named: make(self, logits * factor, *more, **named)
        )

    return install


FAULTS = [
    Fault(
        "logits swapped",
        Cause.ROWS_SWAPPED,
        logits_swapped,
        "model chain",
        "two requests get each other's logits",
        rare=10,
    ),
    Fault(
        "logits swapped, sampled", Cause.ROWS_SWAPPED, logits_swapped, "early tree warm", "the same, sampled", rare=20
    ),
    Fault(
        "drafts swapped",
        Cause.ROWS_SWAPPED,
        drafts_swapped,
        "model chain",
        "two requests get each other's drafts",
        rare=10,
    ),
    Fault("target's logits scaled", Cause.LOGITS_SCALED, target_scaled(0.9), "model chain warm", "times 0.9"),
    Fault("drafter's logits scaled", Cause.LOGITS_SCALED, drafter_scaled(1.6), "eagle chain warm", "times 1.6"),
]
