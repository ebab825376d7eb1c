"""Every cause asked about a run, and the suspects ranked."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from specscope.analyze.audit.audit import Audit
from specscope.analyze.compare.result import Comparison
from specscope.analyze.diagnose import (
    bookkeeping,
    coins,
    drafter_kv,
    drafts,
    features,
    healthy,
    lookup,
    sampler,
    trials,
)
from specscope.analyze.diagnose.against import differing, from_comparison, inexplicable, weighed
from specscope.analyze.diagnose.audited import conditions, from_audit
from specscope.analyze.diagnose.case import Case
from specscope.analyze.diagnose.causes import Cause
from specscope.analyze.diagnose.diagnosis import CONDITION, Diagnosis, Suspect
from specscope.analyze.findings import Result
from specscope.analyze.verify.trial import Trial
from specscope.trace.history import History

OF_THE_DRAFTER = (Cause.DRAFTER_KV_FULL, Cause.DRAFTER_KV_PREEMPTION, Cause.DRAFTER_ROTARY, Cause.VOCABULARY_MAP)
OF_THE_TARGET = (Cause.KV_DECAY, Cause.KV_NOT_MOVED)
Hypothesis = Callable[[Case], Suspect | None]

HYPOTHESES: tuple[Hypothesis, ...] = (
    trials.q_at_trial,
    trials.trial_order,
    trials.against_coin,
    trials.final_p,
    trials.other_requests_text,
    sampler.ratio_by_p,
    sampler.later_siblings,
    sampler.final_from_p,
    sampler.noise_shared,
    coins.coins_shared,
    coins.wrong_key,
    drafts.draft_position,
    lookup.shifted_lookup,
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
    features.features_missing,
    features.features_stale,
    drafter_kv.drafter_kv_full,
    drafter_kv.drafter_kv_preemption,
    drafter_kv.drafter_rotary,
    healthy.weak_drafter,
    healthy.hard_text,
    healthy.tree_too_small,
)


def diagnose(
    history: History,
    *,
    verify: Trial | None = None,
    audit: Audit | None = None,
    compare: Comparison | None = None,
    again: Sequence[Suspect] = (),
    left_out: Sequence[str] = (),
) -> Diagnosis:
    """Rank the causes of what is wrong in a run.

    `compare`: a good run (its side A) beside this one; `again`: what models say that were run under named mistakes.
    """
    case = Case.of(history, () if verify is None else verify.checks)
    found = [one for ask in HYPOTHESES if (one := ask(case)) is not None] if case.steps else []
    if audit is not None:
        found += from_audit(case, audit)
    if compare is not None:
        found += from_comparison(compare)
    found += again
    if compare is not None:
        found = weighed(found, compare)
    suspects = settled(ranked(found), case, audit)
    unexplained = () if any(one.cause.is_fault for one in suspects) else _unexplained(case, audit, compare)
    looked_at = ["capture"] + ["verify"] * (verify is not None) + ["audit"] * (audit is not None)
    looked_at += ["compare"] * (compare is not None)
    beside = () if compare is None else tuple(differing(compare))
    return Diagnosis(tuple(suspects), unexplained, tuple(looked_at), tuple(left_out), len(case.steps), beside)


def settled(suspects: Sequence[Suspect], case: Case, audit: Audit | None) -> list[Suspect]:
    """Without what the models or verify speak against.

    Acceptance alone is weak evidence: where the models agree with all that was recorded of the drafter, how
    acceptance depends on what came before is the text's doing.
    """
    if any(one.cause.is_fault and one.score >= CONDITION for one in suspects):
        suspects = [one for one in suspects if one.cause.is_fault]
    if audit is None:
        return list(suspects)
    kept = []
    drafter_agrees = _agrees(audit, "drafter")
    target_agrees = _agrees(audit, "target")
    for one in suspects:
        by_acceptance = one.score < CONDITION
        if by_acceptance and drafter_agrees and one.cause in OF_THE_DRAFTER:
            continue
        if by_acceptance and target_agrees and one.cause in OF_THE_TARGET:
            continue
        kept.append(one)
    return kept


def _agrees(audit: Audit, what: str) -> bool:
    """Whether all that was compared of the target or the drafter is the model's."""
    found = [one.check for one in audit.findings if one.check.name.startswith(what) and one.check.tested]
    return bool(found) and all(check.result is Result.PASSED for check in found)


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


def _unexplained(case: Case, audit: Audit | None, compare: Comparison | None) -> tuple[str, ...]:
    """What verify, audit and compare found wrong where no cause fits."""
    said = [f"verify, {check.name}: {check.detail or check.about}" for check in case.failed()]
    if audit is not None:
        said += [f"audit: {line}" for line in conditions(audit)]
    if compare is not None:
        said += [f"compare: {line}" for line in inexplicable(compare)]
    return tuple(said)
