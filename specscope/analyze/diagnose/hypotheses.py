"""Every cause asked about a run, and the suspects ranked."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from specscope.analyze.diagnose import bookkeeping, coins, drafter_kv, drafts, healthy, sampler
from specscope.analyze.diagnose.case import Case
from specscope.analyze.diagnose.causes import Cause
from specscope.analyze.diagnose.diagnosis import Diagnosis, Suspect
from specscope.analyze.findings import Check
from specscope.trace.history import History

Hypothesis = Callable[[Case], Suspect | None]

HYPOTHESES: tuple[Hypothesis, ...] = (
    sampler.ratio_by_p,
    sampler.later_siblings,
    sampler.final_from_p,
    sampler.noise_shared,
    coins.coins_shared,
    coins.wrong_key,
    drafts.draft_position,
    drafts.placeholders,
    drafts.vocabulary_map,
    drafts.q_temperature,
    drafts.q_dropped,
    drafts.siblings_sorted,
    drafts.siblings_pruned,
    bookkeeping.counts_swapped,
    bookkeeping.verdict_late,
    bookkeeping.token_lost,
    bookkeeping.blocks_shared,
    bookkeeping.kv_decay,
    drafter_kv.drafter_kv_full,
    drafter_kv.drafter_kv_preemption,
    drafter_kv.drafter_rotary,
    healthy.weak_drafter,
    healthy.hard_text,
    healthy.tree_too_small,
)


def diagnose(history: History, *, checks: Iterable[Check] = ()) -> Diagnosis:
    """Rank the causes of what is wrong in a run. `checks`: what verify found."""
    case = Case.of(history, tuple(checks))
    found = [one for ask in HYPOTHESES if (one := ask(case)) is not None] if case.steps else []
    suspects = ranked(found)
    unexplained = () if any(one.cause.is_fault for one in suspects) else _unexplained(case)
    return Diagnosis(tuple(suspects), unexplained, ("capture",), (), len(case.steps))


def ranked(found: Iterable[Suspect]) -> list[Suspect]:
    """The best first; what was said of one cause by several is put together."""
    best: dict[Cause, Suspect] = {}
    for one in sorted(found, key=lambda suspect: -suspect.score):
        first = best.get(one.cause)
        if first is None:
            best[one.cause] = one
        else:
            lines = tuple(dict.fromkeys((*first.for_, *one.for_)))
            best[one.cause] = Suspect(first.cause, first.score, lines, first.against, first.example or one.example)
    return sorted(best.values(), key=lambda suspect: (not suspect.cause.is_fault, -suspect.score))


def _unexplained(case: Case) -> tuple[str, ...]:
    """What verify found wrong where no cause fits."""
    return tuple(f"verify, {check.name}: {check.detail or check.about}" for check in case.failed())
