"""`locate`: where a run breaks, stage by stage."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from specscope.analyze.audit.audit import Audit, audit, of_drafter
from specscope.analyze.audit.options import Options, Progress
from specscope.analyze.findings import CheckResult
from specscope.analyze.locate.located import Located, Location, Operation, Stage, ranked
from specscope.analyze.verify.trial import Trial
from specscope.errors import UserError, first_line
from specscope.measure.locate.question import Findings, Question
from specscope.trace.history.history import History, PlaceName
from specscope.trace.history.wording import plural
from specscope.trace.record.notes import text_part
from specscope.trace.record.records import RunInfo

LOOKUP = "drafter tree"  # the finding of audit on text lookup
OF_RULES = {"p": ("target p", "final p"), "q": ("draft p",)}  # what the sampling rules make
FAULTS = (UserError, RuntimeError, ValueError)  # of loading and running models; anything else is a bug of ours


def locate(
    history: History,
    source: str,
    options: Options,
    *,
    place: PlaceName | None = None,
    stages: Sequence[Stage] = tuple(Stage),
    progress: Progress = lambda *_: None,
    audited: Audit | None = None,
    trial: Trial | None = None,
    little: bool = False,
) -> Location:
    """Walk both sides to the first operation that differs. Raises UserError where nothing can be looked at.

    `audited`, `trial`: what audit and verify gave of the same run, where that is known; `little`: nothing is known to
    be wrong, and a few steps of one request are walked.
    """
    began = time.perf_counter()
    run = history.run
    if run is None:
        raise UserError(f"{source} does not say what ran (its header is missing)")
    audited = audit(history, source, options, progress) if audited is None else audited
    ask, findings = Question(history, options, audited, place, progress, little, trial), Findings()
    for name, look in _looks(run, stages, little=little).items():
        progress(f"looking at the {name}", 0, 0)
        try:
            look(ask, findings)
        except FAULTS as error:
            why = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {first_line(error)}"
            findings.left_out.append(f"{name}: {why}")
    findings.merge()
    if little and findings.located:  # now something is known to be wrong
        return locate(history, source, options, progress=progress, audited=audited, trial=ask.case.trial)
    if tuple(stages) == tuple(Stage) and not little:
        findings.unplaced += _without_place(ask, findings)
    return Location(
        source,
        ranked(findings.located),
        tuple(findings.walks),
        tuple(findings.ruled_out),
        tuple(findings.unexplained),
        tuple(findings.unplaced),
        tuple(findings.left_out),
        tuple(findings.notes),
        time.perf_counter() - began,
    )


def _looks(run: RunInfo, stages: Sequence[Stage], *, little: bool) -> dict[str, Callable[[Question, Findings], None]]:
    """What looks at a run, by name: an engine that cannot be run again is judged by its evidence alone."""
    looks: dict[str, Callable[[Question, Findings], None]] = {}
    if run.is_ours:
        from specscope.measure.locate.walk import walk

        looks["walk"] = lambda ask, findings: walk(ask, findings, stages)
    elif Stage.TARGET in stages:
        looks["target"] = _inside_vllm if run.backend == "vllm" else _elsewhere
    by_evidence = {
        Stage.DRAFTER: _lookup,
        Stage.SAMPLING: _sampling,
        Stage.VERDICT: _verdicts,
        Stage.DRAWS: _draws,
    }
    return looks | {stage.value: look for stage, look in by_evidence.items() if stage in stages and not little}


def _without_place(ask: Question, findings: Findings) -> list[str]:
    """What audit and verify find wrong where nothing, or nothing of that side, is located."""
    located = {item.operation.stage for item in findings.located}
    lines = []
    for finding in ask.audited.findings:
        sides = {Stage.DRAFTER, Stage.DRAWS} if of_drafter(finding.name) else {Stage.TARGET}
        if finding.failed and not located & {*sides, Stage.TARGET, Stage.SAMPLING, Stage.VERDICT}:
            lines.append(f"audit: {finding.sentence}")
    if not located and not lines:
        failed = [check for check in ask.case.checks.values() if check.result is CheckResult.FAILED]
        lines += [f"verify: {check.name}: {check.detail or check.about}" for check in failed]
    return lines


def _lookup(ask: Question, findings: Findings) -> None:
    """Text lookup as a drafter: audit searches the text again."""
    finding = ask.audited.finding(LOOKUP)
    if finding is None or not finding.tested or (ask.history.run and not text_part(ask.history.run.drafter)):
        return
    if not finding.failed:
        findings.ruled_out.append(f"the drafter: its tree is what the text gives in {plural(finding.tested, 'step')}")
        return
    run = ask.history.run
    file = (
        "suffix_index.py Text"
        if run is not None and text_part(run.drafter) == "suffix"
        else "ngram_index.py NgramIndex"
    )
    findings.located.append(
        Located(
            Operation(Stage.DRAFTER, "lookup", "the lookup in the text", f"specscope/speculate/drafters/{file}"),
            f"the drafted tree is not what the text gives in {finding.failed:,} of {plural(finding.tested, 'step')}",
            finding.sentence if finding.condition is not None else "",
            finding.detail,
            finding.example,
            explained=finding.failed,
            differing=finding.failed,
            unit="step",
            certain=False,
        )
    )


def _inside_vllm(ask: Question, findings: Findings) -> None:
    """Target and drafter inside vLLM, which runs again in its own Python."""
    from specscope.measure.locate.inside_vllm.again import Again
    from specscope.measure.locate.vllm import locate_vllm

    differs = {**ask.differing(drafter=False), **ask.differing(drafter=True)}
    names = (ask.place.request,) if ask.place is not None else tuple(sorted(differs, key=lambda name: differs[name]))
    options = ask.options
    found = locate_vllm(ask.history, options.target, options.draft, Again.found(), names=names, progress=ask.progress)
    findings.located += found.located
    findings.walks += found.walks
    findings.ruled_out += found.ruled_out
    findings.left_out += found.left_out


def _elsewhere(ask: Question, findings: Findings) -> None:
    """An engine that specscope does not run again."""
    engine = "" if ask.history.run is None else ask.history.run.backend
    raise UserError(f"{engine} is not run again here: its evidence is searched alone")


def _sampling(ask: Question, findings: Findings) -> None:
    """From logits to p and q."""
    from specscope.analyze.locate.model.rules import search_sampling

    case, models = ask.case, ask.models
    sides = [("p", False)] + ([("q", True)] if ask.options.draft is not None else [])
    for name, drafter in sides:
        checks = [item for item in ask.audited.findings if item.name in OF_RULES[name]]
        sampled = search_sampling(case, ask.audited, models, drafter=drafter)
        located = [] if sampled is None else [sampled.located]
        findings.located += located
        tested = sum(check.tested for check in checks)
        if not located and tested and not any(check.failed for check in checks):
            findings.ruled_out.append(
                f"the sampling rules: {name} of {plural(tested, 'token')} is what they make of the logits"
            )


def _verdicts(ask: Question, findings: Findings) -> None:
    """From p, q and coins to what is accepted."""
    from specscope.analyze.locate.formulas import located_formulas
    from specscope.analyze.locate.model.verdicts import located_verdicts

    case, models = ask.case, ask.models
    by_formula = located_formulas(case)
    located = located_verdicts(case, ask.audited, models) or ([] if findings.located else by_formula)
    findings.located += located
    outcomes = case.checks.get("outcomes")
    if not (located or by_formula) and outcomes is not None and outcomes.tested and not outcomes.failed:
        findings.ruled_out.append(f"the verdict: {plural(outcomes.tested, 'outcome')} follow from p, q and coin")


def _draws(ask: Question, findings: Findings) -> None:
    """From coins to drafted tokens."""
    from specscope.analyze.locate.draws import located_draws

    case = ask.case
    located = located_draws(case, ask.audited)
    findings.located += located
    interval = case.checks.get("draft coins in their intervals")
    if not located and interval is not None and interval.tested and not interval.failed:
        findings.ruled_out.append(
            f"the draws: {plural(interval.tested, 'draft coin')} lie in the interval of their token"
        )
