"""From failed checks to causes: every failed check is explained or reported as unexplained, and faults are ranked.

verify and audit measure; nothing is measured again here. Evidence counts where a check failed that follows from it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from specscope.analyze.audit.audit import Audit
from specscope.analyze.diagnose import healthy
from specscope.analyze.diagnose.audited import from_audit
from specscope.analyze.diagnose.causes import Cause
from specscope.analyze.diagnose.diagnosis import CHANCE, Diagnosis, Proof, Suspect, explains
from specscope.analyze.diagnose.drafted import shifted_lookup
from specscope.analyze.diagnose.failures import Failure, conditions, failures_of
from specscope.analyze.diagnose.names import named
from specscope.analyze.findings import CheckResult
from specscope.analyze.locate.located import Location
from specscope.analyze.verify.case import Case
from specscope.analyze.verify.trial import Trial, judge
from specscope.trace.history.history import History
from specscope.trace.history.wording import plural

WHOLE = 0.995  # of a failed check: so much explained counts as all of it


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
    case = Case(history, verify or judge(history, source=""))
    problems = list(left_out)
    suspects = [*_asked(case, audit, problems), *again] if known else []
    failures = failures_of(case, audit)
    faults, remarks = settled(suspects, failures), list[Suspect]()
    found = location or Location("", ())
    located = found.located
    if known and case.steps and not located and not any(fault.proof is not Proof.SUM for fault in faults):
        remarks = healthy.remarks(case)
    left = [failure for failure in failures if not explains(located, failure.check.name)]
    unexplained = _unexplained(faults, left)
    agrees = list(found.ruled_out)
    # Figures of another build, for one: unless a fault explains them
    (unexplained if unexplained or not failures else agrees).extend(found.unexplained)
    problems += (f"locate: {line}" for line in found.left_out)
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
        for suspect in named(case, check):
            explained = check.failed if suspect.explained is None else suspect.explained
            share = min(explained / check.failed, 1.0) if check.failed else 1.0
            explains = {**suspect.explains, check.name: share}
            suspects.append(replace(suspect, explained=explained, of=check.failed, explains=explains))
    run = case.history.run
    if run is not None and not run.tells_tokens:
        problems.append(f"{run.privacy.lack}: drafts were not held against the text")
    elif case.steps:
        suspects += shifted_lookup(case)
    return suspects if audit is None else [*suspects, *from_audit(case, audit)]


def settled(suspects: Iterable[Suspect], failures: Sequence[Failure]) -> list[Suspect]:
    """The faults, in the one order of causes: from which a check fails, or under which a rerun gave what was recorded.

    Causes that chance explains are left out, and those that explain nothing which a better one does not.
    """
    known = [suspect for suspect in merged(suspects) if suspect.chance is None or suspect.chance <= CHANCE]
    faults = [fault for fault in known if fault.rerun or explained_share(fault, failures) > 0]
    return _without_followers(sorted(faults, key=lambda fault: rank(fault, failures)), failures)


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
