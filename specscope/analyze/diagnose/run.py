"""All that can be run on a capture, and the diagnosis that follows from it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from specscope.analyze.audit.audit import Audit, audit
from specscope.analyze.audit.options import Options, Progress
from specscope.analyze.diagnose.by_check import diagnose
from specscope.analyze.diagnose.causes import DRAFTER
from specscope.analyze.diagnose.diagnosis import Diagnosis, Suspect
from specscope.analyze.findings import CheckResult
from specscope.analyze.locate.located import Location
from specscope.analyze.verify.case import Case
from specscope.analyze.verify.trial import Trial, judge
from specscope.errors import UserError, first_line
from specscope.trace.history.history import History

DECISIONS = ("outcomes", "greedy acceptance")  # the checks of verify that fail where another p decided
Locate = Callable[[History, Trial, Audit, bool], Location]  # the last: nothing is wrong, a little is walked


def examine(
    history: History,
    source: str,
    options: Options | None = None,
    *,
    left_out: Sequence[str] = (),
    declined: Sequence[str] = (),
    warnings: Sequence[str] = (),
    progress: Progress = lambda *_: None,
    known: bool = True,
    locate: Locate | None = None,
) -> Diagnosis:
    """Verify, audit where models are at hand, rerun the models, and rank the causes.

    `left_out`: what was asked for and cannot be judged; `declined`: what the user told it to leave out; `known`:
    whether causes are named; `locate`: finds the place of what audit or verify find wrong, and walks a few steps where
    they find nothing.
    """
    progress("verify", 0, 1)
    trial = judge(history, source=source, warnings=warnings)
    audited: Audit | None = None
    problems = list(left_out)
    again: list[Suspect] = []
    if options is not None:
        try:
            audited = audit(history, source, options, progress)
        except UserError as error:
            problems.append(f"audit: {error}")
        else:
            problems += [f"audit: {sentence}" for sentence in audited.unjudged]
            again = rerun(history, trial, audited, options, progress, problems) if known else []
    location, notes = None, list[str]()
    if locate is not None and audited is not None:
        wrong = bool(trial.failed or again) or any(one.result is CheckResult.FAILED for one in audited.findings)
        try:
            location = locate(history, trial, audited, not wrong)
        except UserError as error:
            (problems if wrong else notes).append(f"locate: {error}")
        else:
            notes += list(location.notes)
            if not wrong:  # nobody asked for this walk: where it cannot run the exit code stays
                notes += [f"a few steps were not run again: {line}" for line in location.left_out]
                location = replace(location, left_out=()) if location.walks else None
        notes += _unseen(history, audited)
    return diagnose(
        history,
        verify=trial,
        audit=audited,
        again=again,
        left_out=problems,
        declined=declined,
        location=location,
        known=known,
        notes=notes,
    )


def _unseen(history: History, audited: Audit) -> Iterator[str]:
    """What could not be seen at the run's dtype."""
    dtype = "" if history.run is None else history.run.dtype
    if dtype not in ("", "float32") and audited.slack:
        yield (
            f"in {dtype} rounding may move a p of 0.5 by {audited.slack / 4:.2g}: smaller errors of the recorded p "
            "were not seen; to see them, record with --dtype float32"
        )


def rerun(
    history: History, trial: Trial, audited: Audit, options: Options, progress: Progress, problems: list[str]
) -> list[Suspect]:
    """The models again under named mistakes, where the audit found that they disagree. Each is loaded once."""
    from specscope.analyze.audit.model.rows import Models
    from specscope.analyze.diagnose.rerun.draws import shared_noise
    from specscope.analyze.diagnose.rerun.search import drafter_mistakes, other_decisions, target_mistakes

    case, models = Case(history, trial), Models(options)
    failed = {finding.name for finding in audited.findings if finding.result is CheckResult.FAILED}
    drafter = failed & {*DRAFTER}
    target = {name for name in failed if name.split()[0] in ("target", "final")}
    asked: list[tuple[str, Callable[[], list[Suspect]]]] = []
    if target:
        asked.append(("the target under named mistakes", lambda: target_mistakes(case, models, audited)))
    if drafter and options.draft is not None:
        asked.append(("the drafter under named mistakes", lambda: drafter_mistakes(case, models, audited)))
    if any(case.checks[name].failed for name in DECISIONS if name in case.checks):
        asked.append(("the decisions by other rows", lambda: other_decisions(case, models, audited)))
    if not target and not drafter:
        asked.append(("the final draws again", lambda: shared_noise(case, models)))
    suspects: list[Suspect] = []
    for number, (what, ask) in enumerate(asked):
        progress(what, number, len(asked))
        try:
            suspects += ask()
        except (UserError, RuntimeError) as error:  # a model of another form, or no memory
            problems.append(f"{what}: {first_line(error)}")
    return suspects
