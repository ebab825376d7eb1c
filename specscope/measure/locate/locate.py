"""`locate`: where a run breaks, stage by stage."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from specscope.analyze.audit.audit import Audit, audit, of_drafter, step_numbers
from specscope.analyze.audit.contexts import Contexts, contexts_of
from specscope.analyze.audit.model.form import RequestForms
from specscope.analyze.audit.options import ModelSource, Options, Progress
from specscope.analyze.diagnose.case import Case
from specscope.analyze.findings import CheckResult
from specscope.analyze.locate.located import Located, Location, Operation, Stage, Walk, ranked
from specscope.errors import UserError, first_line
from specscope.live.start import start_engine
from specscope.measure.locate.drive import Drive, MakeEngine, located_config
from specscope.plans.heads import runs_head
from specscope.trace.history.history import History, PlaceName
from specscope.trace.history.wording import plural
from specscope.trace.record.notes import model_part, text_part
from specscope.trace.record.records import RunInfo

REQUESTS = 4  # that are watched where the models disagree, and where nothing says where to look
ROWS = 3000  # that are compared at most, unless a place is named
LOOKUP = "drafter tree"  # the finding of audit on text lookup
OF_RULES = {"p": ("target p", "final p"), "q": ("draft p",)}  # what the sampling rules make
FAULTS = (UserError, RuntimeError, ValueError, LookupError, TypeError, ArithmeticError, AssertionError, AttributeError)


if TYPE_CHECKING:
    from specscope.measure.locate.decisions import DecisionWatch
    from specscope.analyze.diagnose.rerun.models import Models


@dataclass
class Findings:
    """What is found stage by stage."""

    located: list[Located] = field(default_factory=list)
    walks: list[Walk] = field(default_factory=list)
    ruled_out: list[str] = field(default_factory=list)
    unexplained: list[str] = field(default_factory=list)
    unplaced: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    driven: list[Located] = field(default_factory=list)  # of sampling and verdict, as the engine had them run again

    def merge(self) -> None:
        """Take what was driven where the evidence has no place of that stage and side."""
        known = {_side(item) for item in self.located}
        self.located += [item for item in self.driven if _side(item) not in known]


def _side(item: Located) -> tuple[Stage, str]:
    """The stage; of sampling whose p or q it is."""
    return item.operation.stage, item.operation.words.partition(":")[0] if item.operation.stage is Stage.SAMPLING else ""


@dataclass(frozen=True)
class Question:
    """What is located: a run, the models that judge, and where to look."""

    history: History
    options: Options
    audited: Audit
    place: PlaceName | None
    make: MakeEngine
    progress: Progress


def locate(
    history: History,
    source: str,
    options: Options,
    *,
    place: PlaceName | None = None,
    stages: Sequence[Stage] = tuple(Stage),
    progress: Progress = lambda *_: None,
    audited: Audit | None = None,
    make: MakeEngine | None = None,
) -> Location:
    """Walk both sides to the first operation that differs. Raises UserError where nothing can be looked at.

    `audited`: an audit of the same run, where there is one; `make`: what builds the engine.
    """
    began = time.perf_counter()
    run = history.run
    if run is None:
        raise UserError(f"{source} does not say what ran (its header is missing)")
    audited = audit(history, source, options, progress) if audited is None else audited
    build = make or (lambda config: start_engine(config, lambda what: progress(what, 0, 0)))
    ask, findings = Question(history, options, audited, place, build, progress), Findings()
    for stage, look in _looks(run).items():
        if stage in stages:
            progress(f"looking at the {stage.value}", 0, 0)
            try:
                look(ask, findings)
            except FAULTS as error:
                why = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {first_line(error)}"
                findings.left_out.append(f"{stage.value}: {why}")
    findings.merge()
    if tuple(stages) == tuple(Stage):
        findings.unplaced += _without_place(ask, findings)
    return Location(
        source,
        ranked(findings.located),
        tuple(findings.walks),
        tuple(findings.ruled_out),
        tuple(findings.unexplained),
        tuple(findings.unplaced),
        tuple(findings.left_out),
        time.perf_counter() - began,
    )


def _looks(run: RunInfo) -> dict[Stage, Callable[[Question, Findings], None]]:
    """What looks at each stage of a run: an engine that cannot be run again is judged by its evidence alone."""
    by_evidence = {Stage.SAMPLING: _sampling, Stage.VERDICT: _verdicts, Stage.DRAWS: _draws}
    if run.is_ours:
        return {Stage.TARGET: _target, Stage.DRAFTER: _drafter, **by_evidence}
    return {Stage.TARGET: _inside_vllm if run.backend == "vllm" else _elsewhere, **by_evidence}


def _target(ask: Question, findings: Findings) -> None:
    """The target's walk."""
    from specscope.analyze.locate.model.reference import ModelReference
    from specscope.measure.locate.answer import answer
    from specscope.measure.locate.target import TargetWatch

    history, progress = ask.history, ask.progress
    differs = _differing(ask.audited, drafter=False)
    names, until = _chosen(history, ask.place, differs)
    plans = {name: contexts for name in names if (contexts := _contexts(history, name, until)) is not None}
    if not plans:
        raise UserError("no request's whole text is in the capture: there is nothing to feed")
    progress("loading the reference", 0, 0)
    reference = ModelReference(ask.options.target, ask.options.device)
    engine = ask.make(located_config(history, _named(ask.options.target), _draft_named(ask)))
    drive = Drive(engine, history)
    watch, decisions = TargetWatch(drive, reference, plans), _decisions(ask, drive, until)
    try:
        for number, _ in enumerate(drive.steps(until), 1):
            progress("walking the target", number, until + 1)
    finally:
        watch.close()
        engine.close()
    findings.driven += decisions.located()
    findings.ruled_out += decisions.ruled_out()
    findings.notes += decisions.notes()
    findings.walks += filter(None, [decisions.walk()])
    if watch.difference is not None:
        located, walk = answer(watch, reference, history)
        findings.located.append(located)
        findings.walks.append(walk)
        return
    steps = plural(until + 1, "engine step")
    findings.ruled_out.append(
        f"the target: {watch.compared:,} rows at the borders of {plural(len(reference.layers), 'layer')} agree over "
        f"{steps} of {plural(len(plans), 'request')}, to {watch.largest:.0%} of what rounding explains"
    )
    if watch.passed:
        at, held = watch.passed[-1]
        findings.walks.append(Walk(Stage.TARGET, at.where, at.rows, tuple(held), "specscope", "plain transformers"))
    if differs:
        count = plural(len(differs), "request")
        findings.unexplained.append(
            f"the target's recorded figures differ from the model's in {count}, and the engine, run again, agrees with "
            "the model: what was recorded came from another build, other weights, or after the logits"
        )


def _decisions(ask: Question, drive: Drive, until: int) -> DecisionWatch:
    """Watches sampling and verdicts of every request whose text is known."""
    from specscope.measure.locate.decisions import DecisionWatch

    history = ask.history
    assert history.run is not None
    names = dict.fromkeys(part.request for record in history.steps[: until + 1] for part in record.requests)
    contexts = {name: known for name in names if (known := _contexts(history, name, until)) is not None}
    limited = any(each.params.limited for each in contexts.values())
    vocab = drive.engine.runner.loaded.vocab_size
    forms = RequestForms(ask.options.target, vocab, history.run.eos_tokens) if limited else None
    return DecisionWatch(drive, Case.of(history), contexts, forms)


def _without_place(ask: Question, findings: Findings) -> list[str]:
    """What audit and verify find wrong where nothing, or nothing of that side, is located."""
    located = {item.operation.stage for item in findings.located}
    lines = []
    for finding in ask.audited.findings:
        sides = {Stage.DRAFTER, Stage.DRAWS} if of_drafter(finding.check.name) else {Stage.TARGET}
        if finding.check.failed and not located & {*sides, Stage.TARGET, Stage.SAMPLING, Stage.VERDICT}:
            lines.append(f"audit: {finding.sentence}")
    if not located and not lines:
        failed = [check for check in Case.of(ask.history).checks.values() if check.result is CheckResult.FAILED]
        lines += [f"verify: {check.name}: {check.detail or check.about}" for check in failed]
    return lines


def _lookup(ask: Question, findings: Findings) -> None:
    """Text lookup as a drafter: audit searches the text again."""
    finding = ask.audited.finding(LOOKUP)
    if finding is None or not finding.check.tested:
        return
    check = finding.check
    if not check.failed:
        findings.ruled_out.append(f"the drafter: its tree is what the text gives in {plural(check.tested, 'step')}")
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
            f"the drafted tree is not what the text gives in {check.failed:,} of {plural(check.tested, 'step')}",
            finding.sentence if finding.condition is not None else "",
            check.detail,
            check.example,
            explained=check.failed,
            differing=check.failed,
            unit="step",
            certain=False,
        )
    )


def _drafter(ask: Question, findings: Findings) -> None:
    """The drafter's walk, where it is a model."""
    from specscope.measure.locate.drafter import DrafterModels, walk_drafter

    history, draft = ask.history, ask.options.draft
    assert history.run is not None
    if text_part(history.run.drafter):
        _lookup(ask, findings)
    if not model_part(history.run.drafter):
        return
    of_target = any(item.operation.stage is Stage.TARGET for item in findings.located)
    if of_target and runs_head(model_part(history.run.drafter)):
        findings.ruled_out.append("the drafter was not walked: it is fed the target's features, which differ")
        return
    if draft is None:
        raise UserError(ask.options.why_no_draft or "the drafter's model is not at hand")
    names, until = _chosen(history, ask.place, _differing(ask.audited, drafter=True))
    plans = {name: contexts for name in names if (contexts := _contexts(history, name, until)) is not None}
    if not plans:
        raise UserError("no request's whole text is in the capture: there is nothing to feed")
    models = DrafterModels(ask.options.target, draft, ask.make, _named(ask.options.target), _draft_named(ask))
    walked = walk_drafter(history, plans, until, models, ask.progress)
    findings.walks += walked.walks[-1:]
    if walked.located is not None:
        findings.located.append(walked.located)
    elif walked.passes:
        findings.ruled_out.append(
            f"the drafter: {plural(walked.passes, 'pass', 'passes')} over {plural(until + 1, 'engine step')} of "
            f"{plural(len(plans), 'request')} agree, from what they are fed to the tokens that are chosen"
        )


def _inside_vllm(ask: Question, findings: Findings) -> None:
    """Target and drafter inside vLLM, which runs again in its own Python."""
    from specscope.measure.locate.inside_vllm.again import Again
    from specscope.measure.locate.vllm import VllmCase, locate_vllm

    differs = {**_differing(ask.audited, drafter=False), **_differing(ask.audited, drafter=True)}
    names = (ask.place.request,) if ask.place is not None else tuple(sorted(differs, key=lambda name: differs[name]))
    vllm = VllmCase(ask.history, ask.options.target, ask.options.draft, names=names)
    found = locate_vllm(vllm, Again.found(), ask.progress)
    findings.located += found.located
    findings.walks += found.walks
    findings.ruled_out += found.ruled_out
    findings.left_out += found.left_out


def _elsewhere(ask: Question, findings: Findings) -> None:
    """An engine that specscope does not run again."""
    engine = "" if ask.history.run is None else ask.history.run.backend
    raise UserError(f"{engine} is not run again here: its evidence is searched alone")


def _evidence(ask: Question) -> tuple[Case, Models]:
    from specscope.analyze.diagnose.rerun.models import Models

    return Case.of(ask.history), Models(ask.options)


def _sampling(ask: Question, findings: Findings) -> None:
    """From logits to p and q."""
    from specscope.analyze.locate.model.rules import located_sampling

    case, models = _evidence(ask)
    sides = [("p", False)] + ([("q", True)] if ask.options.draft is not None else [])
    for name, drafter in sides:
        checks = [item.check for item in ask.audited.findings if item.check.name in OF_RULES[name]]
        located = located_sampling(case, ask.audited, models, drafter=drafter)
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

    case, models = _evidence(ask)
    located = located_verdicts(case, ask.audited, models)
    located = located or ([] if findings.located else located_formulas(case))
    findings.located += located
    outcomes = case.checks.get("outcomes")
    wrong = located or located_formulas(case)
    if not wrong and outcomes is not None and outcomes.tested and not outcomes.failed:
        findings.ruled_out.append(f"the verdict: {plural(outcomes.tested, 'outcome')} follow from p, q and coin")


def _draws(ask: Question, findings: Findings) -> None:
    """From coins to drafted tokens."""
    from specscope.analyze.locate.draws import located_draws

    case, _ = _evidence(ask)
    located = located_draws(case, ask.audited)
    findings.located += located
    interval = case.checks.get("draft coins in their intervals")
    if not located and interval is not None and interval.tested and not interval.failed:
        findings.ruled_out.append(
            f"the draws: {plural(interval.tested, 'draft coin')} lie in the interval of their token"
        )


def _differing(audited: Audit, *, drafter: bool) -> dict[str, int]:
    """By request, the first engine step in which target (or drafter) differs."""
    first: dict[str, int] = {}
    for finding in audited.findings:
        name = finding.check.name
        if name in ("context", "committed tokens") or of_drafter(name) != drafter:
            continue
        if finding.check.result is not CheckResult.FAILED or not (drafter or "raw" in name or "top" in name):
            continue
        for item, wrong in zip(finding.items, finding.differs, strict=True):
            if wrong:
                first[item.request] = min(first.get(item.request, item.step), item.step)
    return first


def _chosen(history: History, place: PlaceName | None, differs: dict[str, int]) -> tuple[list[str], int]:
    """The requests to watch, and the place in the history of the last step to run."""
    if place is not None:
        request = history.requests[place.request]
        index = len(request.steps) - 1
        if place.index is not None:
            index = next(i for i, part in enumerate(request.steps) if part.index == place.index)
        return [place.request], request.engine_steps[index]
    if differs:
        names = sorted(differs, key=lambda name: differs[name])[:REQUESTS]
        last = max(differs[name] for name in names)
        return names, max(i for i, record in enumerate(history.steps) if record.step <= last)
    names, rows, until = list[str](), 0, 0
    for number, record in enumerate(history.steps):
        until = number
        rows += sum(part.prefill_tokens + 1 + len(part.tree) for part in record.requests)
        names += [part.request for part in record.requests if part.request not in names and len(names) < REQUESTS]
        if rows > ROWS:
            break
    return names, until


def _contexts(history: History, name: str, until: int) -> Contexts | None:
    """A request's contexts in the steps up to a place of the history; its text no longer than these need."""
    request = history.requests[name]
    places = [
        i for i, step in enumerate(request.engine_steps) if step <= until and request.steps[i].verdict is not None
    ]
    whole = contexts_of(request, places, step_numbers(history, name), history.run)
    if whole is None or not whole.steps:
        return None
    last = max(step.part.position + len(step.part.verdict.path) + 1 for step in whole.steps if step.part.verdict)
    contexts = Contexts(name, whole.params, whole.text[: last + 1], whole.prompt_len, shaped=whole.shaped)
    for step in whole.steps:
        contexts.add(step.part, step.where, step.part.position)
    return contexts


def _named(source: ModelSource) -> str:
    """A model as --target takes it."""
    file = source.arguments.get("gguf_file")
    return source.path if file is None else f"{source.path}/{file}"


def _draft_named(ask: Question) -> str | None:
    draft = ask.options.draft
    if draft is None:
        return None
    layers = draft.arguments.get("num_hidden_layers")
    return _named(draft) if layers is None else f"self:{layers}"
