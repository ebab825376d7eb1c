"""From failed checks to causes: every failed check is explained or reported as unexplained, and faults are ranked.

verify and audit measure; nothing is measured again here. A function of EXPLAINS says what the failures of a check have
in common. Evidence from the text or from acceptance counts for a fault only where a check failed that follows from it;
otherwise it is a remark.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from specscope.analyze.audit.audit import Audit
from specscope.analyze.diagnose import accounts, by_acceptance, by_text, drafted, healthy, randomness, verdicts
from specscope.analyze.diagnose.audited import from_audit
from specscope.analyze.diagnose.case import Case
from specscope.analyze.diagnose.causes import Cause
from specscope.analyze.diagnose.diagnosis import CHANCE, Diagnosis, Proof, Suspect
from specscope.analyze.diagnose.failures import Failure, conditions, failures_of
from specscope.analyze.diagnose.places import explains
from specscope.analyze.diagnose.together import LOGPROBS
from specscope.analyze.findings import CheckResult, Finding
from specscope.analyze.locate.located import Location
from specscope.analyze.verify.trial import Trial
from specscope.trace.history.history import History
from specscope.trace.history.wording import plural

OF_THE_DRAFTER = (Cause.DRAFTER_KV, Cause.POSITIONS, Cause.DRAFT_VOCABULARY)
OF_THE_TARGET = (Cause.TARGET_KV,)
WHOLE = 0.995  # of a failed check: so much explained counts as all of it

Explanation = Callable[[Case, Finding], list[Suspect]]
EXPLAINS: Mapping[str, Explanation] = {  # by check of verify
    "probabilities": verdicts.probabilities,
    "rule of verification": verdicts.other_rule,
    "accept probability": verdicts.ratio,
    "outcomes": verdicts.outcomes,
    "greedy acceptance": verdicts.greedy_acceptance,
    "paths": verdicts.paths,
    "trial order": verdicts.trial_order,
    "p at later trials": verdicts.later_p,
    "residual mass": verdicts.masses,
    "q at trials": verdicts.trial_q,
    "final tokens": verdicts.final_tokens,
    "share of the final token": verdicts.final_shares,
    "greedy tokens": verdicts.greedy_tokens,
    "top-k": verdicts.parameters,
    "min-p": verdicts.parameters,
    "top-p": verdicts.parameters,
    "temperature and penalties": verdicts.parameters,
    "draft's temperature": drafted.other_q,
    "drafted surprisal": drafted.other_draws,
    "draft vocabulary": drafted.outside_vocabulary,
    "drafts as planned": drafted.planned,
    "likeliest draft first": drafted.likeliest_first,
    "drafts in place": drafted.in_place,
    "placeholders": drafted.placeholders,
    "features fed": drafted.fed_features,
    LOGPROBS: verdicts.log_probabilities,
    "drafter's cache": drafted.drafters_cache,
    "tokens in the cache": accounts.token_lost,
    "positions": accounts.token_lost,
    "prompt fed": accounts.token_lost,
    "outputs": accounts.outputs,
    "ends": accounts.ends,
    "accepted KV moved": accounts.not_moved,
    "blocks written": accounts.blocks,
    "blocks kept": accounts.blocks,
    "coins": randomness.wrong_key,
    "draft coins": randomness.wrong_draft_key,
    "draft coins in their intervals": randomness.outside_intervals,
    "coins unequal": randomness.coins_unequal,
    "coins over steps": randomness.coins_shared,
    "coins of requests": randomness.coins_shared,
    "recovered draws": randomness.biased_draws,
    "coins and draws": randomness.coins_and_draws,
    "acceptance": randomness.accepted_otherwise,
    "order of siblings": drafted.sorted_siblings,
}
Hypothesis = Callable[[Case], Suspect | None]
BY_TEXT: tuple[Hypothesis, ...] = (  # questions that no single check asks
    by_text.shifted_lookup,
    by_text.other_requests_text,
    by_text.vocabulary_map,
    by_text.verdict_late,
)
BY_ACCEPTANCE: tuple[Hypothesis, ...] = (
    by_acceptance.drafter_kv_full,
    by_acceptance.drafter_kv_preemption,
    by_acceptance.drafter_rotary,
    by_acceptance.kv_decay,
)


def diagnose(
    history: History,
    *,
    verify: Trial | None = None,
    audit: Audit | None = None,
    again: Sequence[Suspect] = (),
    left_out: Sequence[str] = (),
    declined: Sequence[str] = (),
    location: Location | None = None,
    known: bool = True,
    notes: Sequence[str] = (),
) -> Diagnosis:
    """Name and rank the causes of what is wrong in a run.

    `again`: what the models say, run again under named mistakes; `location`: where what is wrong was located; `known`:
    whether causes are named; `notes`: of how far was looked.
    """
    case = Case.of(history, verify)
    problems = list(left_out)
    suspects = [*_asked(case, audit, problems), *again] if known else []
    failures = failures_of(case, audit)
    faults, remarks = settled(suspects, failures, audit)
    located = () if location is None else location.located
    if known and case.steps and not located and not any(fault.proof is not Proof.SUM for fault in faults):
        remarks += healthy.remarks(case)
    left = [failure for failure in failures if not explains(located, failure.check.name)]
    unexplained = _unexplained(faults, left)
    agrees = list(() if location is None else location.ruled_out)
    if location is not None:  # figures of another build, for one: unless a fault explains them
        (unexplained if unexplained or not failures else agrees).extend(location.unexplained)
    problems += () if location is None else (f"locate: {line}" for line in location.left_out)
    by_models = audit is not None and audit.judged
    looked_at = ["capture", "verify"] + ["audit"] * by_models + ["locate"] * (location is not None)
    return Diagnosis(
        suspects=tuple(faults),
        unexplained=tuple(dict.fromkeys(unexplained)),
        looked_at=tuple(looked_at),
        left_out=tuple(problems),
        steps=len(case.steps),
        remarks=tuple(remarks),
        declined=tuple(declined),
        located=located,
        ruled_out=tuple(agrees),
        when=conditions(case, failures),
        would_see=_would_see(case.trial),
        builds=_builds(history),
        notes=tuple(notes),
    )


def _would_see(trial: Trial) -> tuple[str, ...]:
    """What chance decides or draws can be off by a little and pass: how much each check of it would have seen."""
    return tuple(
        f"{check.name}: {check.note}, over {plural(check.tested, check.unit)}"
        for check in trial.checks
        if check.result is CheckResult.PASSED and check.least_bias is not None and check.unit != "coin"
    )


def _builds(history: History) -> str:
    """Which build recorded the run."""
    versions = {} if history.run is None else history.run.versions
    recorded = ", ".join(f"{name} {version}" for name, version in versions.items()) or "a build that it does not name"
    return f"recorded by {recorded}"


def _asked(case: Case, audit: Audit | None, problems: list[str]) -> list[Suspect]:
    """What explains the failed checks, and what else points to a cause."""
    suspects: list[Suspect] = []
    for check in case.trial.failed if case.steps else ():
        explain = EXPLAINS.get(check.name)
        if explain is not None:
            for suspect in explain(case, check):
                explained = check.failed if suspect.explained is None else suspect.explained
                share = min(explained / check.failed, 1.0) if check.failed else 1.0
                explains = {**suspect.explains, check.name: share}
                suspects.append(replace(suspect, explained=explained, of=check.failed, explains=explains))
    run, hypotheses = case.history.run, (*BY_TEXT, *BY_ACCEPTANCE)
    if run is not None and not run.tells_tokens:
        problems.append(f"{run.privacy.lack}: drafts were not held against the text")
        hypotheses = BY_ACCEPTANCE
    for ask in hypotheses if case.steps else ():
        found = ask(case)
        suspects += [] if found is None else [found]
    return suspects if audit is None else [*suspects, *from_audit(case, audit)]


def settled(
    suspects: Iterable[Suspect], failures: Sequence[Failure], audit: Audit | None
) -> tuple[list[Suspect], list[Suspect]]:
    """Faults, and remarks; each in the one order of causes.

    A cause is a fault where a check failed that follows from it, or where a rerun under it gave what was recorded.
    Causes that chance explains, or that the models contradict, are left out.
    """
    faults, remarks = [], []
    for suspect in merged(suspects):
        if suspect.chance is not None and suspect.chance > CHANCE:
            continue
        if suspect.rerun or explained_share(suspect, failures) > 0:
            faults.append(suspect)
        elif not _refuted(suspect, audit):
            remarks.append(suspect)
    ranked = sorted(faults, key=lambda fault: rank(fault, failures))
    return _without_followers(ranked, failures), remarks


def rank(suspect: Suspect, failures: Sequence[Failure]) -> tuple[int, float, int, int]:
    """The order of causes: rows before conditions before sums; then by what they explain of all that failed, less what
    they spoil, and by how many that are; then by the order of a step, in which causes.py lists them: what comes first
    explains what follows."""
    share = explained_share(suspect, failures) * suspect.net
    return suspect.proof, -round(share, 2), -suspect.of, list(Cause).index(suspect.cause)


def explained_share(suspect: Suspect, failures: Sequence[Failure]) -> float:
    """How much of all that failed, each check weighted by how many failed, follows from a cause: 0 to 1."""
    whole = sum(failure.weight for failure in failures)
    covered = sum(failure.weight * suspect.covers(failure.check.name) for failure in failures)
    return covered / whole if whole else 0.0


def _without_followers(ranked: Sequence[Suspect], failures: Sequence[Failure]) -> list[Suspect]:
    """Those that explain what no better one does: the others follow from them."""
    left = {failure.check.name: 1.0 for failure in failures}
    leading: list[Suspect] = []
    for suspect in ranked:
        new = [name for name, rest in left.items() if rest > 1 - WHOLE and suspect.covers(name) > 0]
        if new or not leading or not failures:
            leading.append(suspect)
        for name in new:
            left[name] = max(0.0, left[name] - suspect.covers(name))
    return leading


def _refuted(suspect: Suspect, audit: Audit | None) -> bool:
    """Whether the models agree with everything recorded of the part, drafter or target, that the cause is in."""
    if audit is None:
        return False
    return (suspect.cause in OF_THE_DRAFTER and _agrees(audit, "drafter")) or (
        suspect.cause in OF_THE_TARGET and _agrees(audit, "target")
    )


def _agrees(audit: Audit, what: str) -> bool:
    """Whether all that was compared of the target or the drafter is the model's."""
    checks = [finding for finding in audit.findings if finding.name.startswith(what)]
    checks = [check for check in checks if check.tested]
    return bool(checks) and all(check.result is CheckResult.PASSED for check in checks)


def merged(suspects: Iterable[Suspect]) -> list[Suspect]:
    """One suspect for each cause, its surest lines first; faults first, the best of them leading."""
    best: dict[Cause, Suspect] = {}
    for suspect in sorted(suspects, key=lambda suspect: (suspect.proof, -suspect.net)):
        first = best.get(suspect.cause)
        if first is None:
            best[suspect.cause] = suspect
            continue
        explains = dict(first.explains)
        for name, share in suspect.explains.items():
            explains[name] = min(1.0, explains[name] + share) if name in explains else share
        if first.rerun or suspect.rerun:  # the mistake itself gives what was recorded: it explains the whole check
            explains = {}
        best[suspect.cause] = replace(
            first,
            for_=tuple(dict.fromkeys((*first.for_, *suspect.for_))),
            against=tuple(dict.fromkeys((*first.against, *suspect.against))),
            example=first.example or suspect.example,
            explains=explains,
            chance=None if first.chance is None or suspect.chance is None else min(first.chance, suspect.chance),
            rerun=first.rerun or suspect.rerun,
        )
    return sorted(best.values(), key=lambda suspect: (not suspect.cause.is_fault, suspect.proof, -suspect.net))


def _unexplained(faults: Sequence[Suspect], failures: Sequence[Failure]) -> list[str]:
    """What failed and follows from no named fault; where a part of it does, how much is left."""
    lines = []
    for failure in failures:
        share = sum(fault.covers(failure.check.name) for fault in faults)
        if share <= 0:
            lines.append(failure.line)
        elif share < WHOLE and failure.check.failed:
            rest = failure.check.failed - round(share * failure.check.failed)
            if rest:
                counted = f"{rest:,} of {plural(failure.check.failed, failure.check.unit or 'place')}"
                lines.append(f"{failure.judge}, {failure.check.name}: {counted} that failed are not explained")
    return lines
