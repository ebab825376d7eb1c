"""All that can be run on a capture, and the diagnosis that follows from it."""

from __future__ import annotations

from collections.abc import Sequence

from specscope.analyze.audit.audit import Audit, audit
from specscope.analyze.audit.options import Options, Progress
from specscope.analyze.compare.collect import from_history
from specscope.analyze.compare.comparison import compare
from specscope.analyze.diagnose.case import Case
from specscope.analyze.diagnose.diagnosis import Diagnosis, Suspect
from specscope.analyze.diagnose.hypotheses import diagnose
from specscope.analyze.findings import Result
from specscope.analyze.verify.trial import judge
from specscope.errors import UserError
from specscope.trace.history import History

SAMPLE = 1000  # steps that are audited, where nothing else is asked for


def examine(
    history: History,
    source: str,
    options: Options | None = None,
    *,
    good: History | None = None,
    why_no_models: str = "",
    warnings: Sequence[str] = (),
    progress: Progress = lambda *_: None,
) -> Diagnosis:
    """Verify, audit where models are at hand, ask the models again, compare with a good run, and rank the causes."""
    trial = judge(history, source=source, warnings=warnings)
    audited: Audit | None = None
    left_out = [why_no_models] if why_no_models else []
    again: list[Suspect] = []
    if options is not None:
        try:
            audited = audit(history, source, options, progress)
        except UserError as error:
            left_out.append(f"audit: {error}")
        else:
            again = rerun(history, audited, options, progress)
    beside = None if good is None else compare(from_history(good, "good"), from_history(history, source))
    return diagnose(history, verify=trial, audit=audited, compare=beside, again=again, left_out=left_out)


def rerun(history: History, audited: Audit, options: Options, progress: Progress) -> list[Suspect]:
    """The models again under named mistakes, where the audit found that they disagree."""
    from specscope.analyze.diagnose.rerun.draws import shared_noise

    case = Case.of(history)
    failed = {one.check.name.split()[0] for one in audited.findings if one.check.result is Result.FAILED}
    if not failed & {"target", "drafter", "final"}:
        progress("the final draws again", 0, 1)
        return shared_noise(case, options)
    from specscope.analyze.diagnose.rerun.ask import drafter_mistakes, target_mistakes

    found = list[Suspect]()
    if failed & {"target", "final"}:
        progress("the target under named mistakes", 0, 1)
        found += target_mistakes(case, options, audited)
    if "drafter" in failed and options.draft is not None:
        progress("the drafter under named mistakes", 0, 1)
        found += drafter_mistakes(case, options, audited)
    return found
