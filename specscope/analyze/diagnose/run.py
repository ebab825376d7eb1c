"""All that can be run on a capture, and the diagnosis that follows from it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from specscope.analyze.audit.audit import Audit, audit
from specscope.analyze.audit.options import Options, Progress
from specscope.analyze.audit.tally import CONTEXT
from specscope.analyze.diagnose import healthy
from specscope.analyze.diagnose.audited import from_audit
from specscope.analyze.diagnose.causes import DRAFTER, OF_OPERATIONS, OF_STAGES
from specscope.analyze.diagnose.diagnosis import (
    Diagnosis,
    Failure,
    JudgedCase,
    Suspect,
    conditions,
    failures_of,
    settled,
    unexplained,
)
from specscope.analyze.diagnose.names import named, shifted_lookup
from specscope.analyze.findings import CheckResult
from specscope.analyze.locate.located import Location, Proof
from specscope.analyze.verify.trial import Case, Trial, judge, of_own_rules
from specscope.errors import UserError, first_line
from specscope.trace.history.history import History
from specscope.trace.history.wording import plural

DECISIONS = ("outcomes", "greedy acceptance")  # the checks of verify that fail where another p decided
Lines = tuple[str, ...]
Locate = Callable[[JudgedCase, bool], Location]  # the last: nothing is wrong, a little is walked


def examine(
    history: History,
    source: str = "",
    options: Options | None = None,
    *,
    left_out: Sequence[str] = (),
    declined: Sequence[str] = (),
    warnings: Sequence[str] = (),
    progress: Progress = lambda *_: None,
    known: bool = True,
    locate: Locate | None = None,
    audited: Audit | None = None,
) -> Diagnosis:
    """Verify, audit where models are at hand, rerun the models, and rank the causes. `declined`: what the user told it
    to leave out; `known`: whether causes are named; `audited`: what audit gave, where it ran already.
    """
    progress("verify", 0, 1)
    case = Case(history, judge(history, source=source, warnings=warnings))
    problems, notes, again = list(left_out), list(of_own_rules(case.evidence)), list[Suspect]()
    session: JudgedCase | None = None
    if options is not None:
        try:
            audited = audit(history, source, options, progress)
            session = JudgedCase(case, audited, options)
        except UserError as error:
            problems.append(f"audit: {error}")
        else:
            problems += [f"audit: {sentence}" for sentence in audited.unjudged]
            notes += [audited.unseen] if audited.unseen else []
            again = rerun(session, progress, problems) if known else []
    failures = failures_of(case, audited)
    wrong = bool(failures or again)
    location = None if locate is None or session is None else _walked(locate, session, problems, notes, wrong=wrong)
    faults = settled([*_from_evidence(case, audited, problems), *again], failures) if known else []
    found = location or Location(source, ())
    sure = found.located or any(fault.proof is not Proof.SUM for fault in faults)
    wrongs, agrees = _without_cause(faults, failures, found)
    stages = {stage for fault in faults if len(fault.cause.places) == 1 for stage in fault.cause.places}
    healthy_here = [line for line in agrees if found.rerun.get(line) in stages]  # of an engine that ran again
    notes += [f"this build does not show what was recorded: {line}" for line in healthy_here]
    versions = {} if history.run is None else history.run.versions
    builds = ", ".join(f"{name} {version}" for name, version in versions.items())
    compared = [] if audited is None else [one for one in audited.findings if one.tested and one.name != CONTEXT[0]]
    looks = {"verify": True, "audit": bool(compared), "locate": location is not None}
    return Diagnosis(
        suspects=tuple(faults),
        unexplained=wrongs,
        looked_at=("capture", *(name for name, looked in looks.items() if looked)),
        left_out=(*problems, *(f"locate: {line}" for line in found.left_out)),
        steps=len(case.steps),
        remarks=tuple(healthy.remarks(case)) if known and case.steps and not sure else (),
        declined=tuple(declined),
        located=found.located,
        ruled_out=tuple(line for line in agrees if line not in healthy_here),
        when=conditions(case, failures),
        would_see=tuple(_small(case.trial)),
        builds=f"recorded by {builds or 'an unnamed build'}",
        notes=tuple(notes),
        stages={"verify": case.trial, "audit": audited, "locate": location},
    )


def _walked(
    locate: Locate, session: JudgedCase, problems: list[str], notes: list[str], *, wrong: bool
) -> Location | None:
    """What the walk found. Where nothing is wrong nobody asked for it: where it cannot run the exit code stays."""
    try:
        location = locate(session, not wrong)
    except UserError as error:
        (problems if wrong else notes).append(f"locate: {error}")
        return None
    notes += location.notes
    if wrong:
        return location
    notes += [f"a few steps were not run again: {line}" for line in location.left_out]
    return replace(location, left_out=()) if location.walks else None


def _without_cause(faults: Sequence[Suspect], failures: Sequence[Failure], found: Location) -> tuple[Lines, Lines]:
    """What is wrong and follows from nothing that is named or located, and what agrees."""
    places = [item.operation for item in found.located]
    follows = {name for at in places for name in (*OF_STAGES[at.stage], *OF_OPERATIONS.get(at.name, ()))}
    wrongs, agrees = unexplained(faults, [one for one in failures if one.check.name not in follows]), found.ruled_out
    if failures and not wrongs:
        return (), (*agrees, *found.unexplained)  # figures of another build, for one
    return tuple(dict.fromkeys((*wrongs, *found.unexplained))), agrees


def _small(trial: Trial) -> Iterator[str]:
    """Of the checks of chance or draws that passed, and may be off by a little: what they would have seen."""
    for check in trial.checks:
        if check.result is CheckResult.PASSED and check.least_bias is not None and check.unit != "coin":
            yield f"{check.name}: {check.note}, over {plural(check.tested, check.unit)}"


def _from_evidence(case: Case, audited: Audit | None, problems: list[str]) -> Iterator[Suspect]:
    """What explains the failed checks, and what else points to a cause."""
    run = case.history.run
    for check in case.trial.failed if case.steps else ():
        yield from named(case, check)
    if run is not None and not run.tells_tokens:
        problems.append(f"{run.privacy.lack}: drafts were not compared with the text")
    elif case.steps:
        yield from shifted_lookup(case)
    if audited is not None:
        yield from from_audit(case, audited)


def rerun(session: JudgedCase, progress: Progress, problems: list[str]) -> list[Suspect]:
    """The models again under named mistakes, where the audit found that they disagree. Each is loaded once."""
    from specscope.analyze.diagnose.rerun.search import mistakes, other_decisions, shared_noise

    failed = {one.name for one in session.audited.findings if one.result is CheckResult.FAILED}
    drafter, target = bool(failed & {*DRAFTER}), any(name.split()[0] in ("target", "final") for name in failed)
    decided, drafts = any(check.name in DECISIONS for check in session.case.trial.failed), session.options.draft
    asked: dict[str, tuple[bool, Callable[[], list[Suspect]]]] = {
        "the target under named mistakes": (target, lambda: mistakes(session, drafter=False)),
        "the drafter under named mistakes": (drafter and bool(drafts), lambda: mistakes(session, drafter=True)),
        "the decisions with other rows": (decided, lambda: other_decisions(session)),
        "the final draws again": (not target and not drafter, lambda: shared_noise(session)),
    }
    suspects: list[Suspect] = []
    for number, (what, (wanted, ask)) in enumerate(asked.items()):
        try:
            if wanted:
                progress(what, number, len(asked))
                suspects += ask()
        except (UserError, RuntimeError) as error:  # a model of another form, or no memory
            problems.append(f"{what}: {first_line(error)}")
    return suspects
