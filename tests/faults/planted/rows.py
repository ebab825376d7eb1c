"""Faults in which rows of the batch are whose, and in what happens to logits on their way."""

from __future__ import annotations

from specscope.analyze.diagnose.causes import Cause
from specscope.engine.phases import Phases
from specscope.speculate.drafters.level import Level
from tests.faults.fault import Fault


def logits_swapped(patch, engine):
    """At every third step the first two requests that draft get each other's logits."""
    verify = Phases.verify

    def swapped(self, now):
        pairs = _drafting(now)[:2]
        if len(pairs) == 2 and engine.steps % 3 == 0 and len({len(now.logits[i]) for i in pairs}) == 1:
            one, other = pairs
            now.logits[one], now.logits[other] = now.logits[other], now.logits[one]
        verify(self, now)

    patch.setattr(Phases, "verify", swapped)


def drafts_swapped(patch, engine):
    """The first two requests that draft get each other's trees."""
    draft = Phases.draft

    def swapped(self, now):
        draft(self, now)
        pairs = _drafting(now)[:2]
        if len(pairs) == 2 and len({len(now.drafts[i].tree) for i in pairs}) == 1:
            one, other = pairs
            now.drafts[one], now.drafts[other] = now.drafts[other], now.drafts[one]

    patch.setattr(Phases, "draft", swapped)


def _drafting(now):
    return [i for i, draft in enumerate(now.drafts) if len(draft.tree)]


def target_scaled(factor):
    """The target's logits times a factor."""

    def install(patch, engine):
        verify = Phases.verify

        def scaled(self, now):
            now.logits = [logits * factor for logits in now.logits]
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
