"""Our engine once more over the recorded steps, with target, sampling, verdict and drafter watched together."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack

from specscope.analyze.audit.model.form import RequestForms
from specscope.analyze.findings import Reference as Where
from specscope.analyze.locate.located import Located, Stage, Walk
from specscope.analyze.locate.model.reference import ModelReference
from specscope.analyze.locate.operations import operation
from specscope.errors import UserError
from specscope.measure.locate.answer import answer
from specscope.measure.locate.decisions import DecisionWatch
from specscope.measure.locate.drafter import DrafterWalk
from specscope.measure.locate.drive import Drive, KVOverwritten, located_config
from specscope.measure.locate.layer_taps import code_of
from specscope.measure.locate.question import Findings, Question, WalkPlan, contexts_until
from specscope.measure.locate.target import TargetWatch
from specscope.model.kv_cache import KVCache
from specscope.plans.heads import runs_head
from specscope.plans.plan import read_plan
from specscope.trace.history.wording import plural
from specscope.trace.record.notes import model_part

DECIDED = {Stage.SAMPLING, Stage.VERDICT, Stage.DRAWS}


def walk(ask: Question, findings: Findings, stages: Iterable[Stage]) -> None:
    """Walk what is asked for, in one run of the engine. Raises UserError."""
    wanted, run = {*stages}, ask.history.run
    assert run is not None
    if ask.little and run.drafter != "none" and read_plan(run.tree) is None:
        raise UserError("the capture names no tree that can be read")
    target, drafted = ask.watched(drafter=False), ask.watched(drafter=True)
    drafts = Stage.DRAFTER in wanted and bool(model_part(run.drafter))
    if drafts and ask.options.draft is None:
        why = ask.options.why_no_draft or "the drafter's model is not at hand"
        findings.left_out.append(f"drafter: {why}")
        drafts = False
    until = max(target.until if wanted - {Stage.DRAFTER} else 0, drafted.until if drafts else 0)
    ask.progress("loading the reference", 0, 0)
    reference = ModelReference(ask.options.target, ask.options.device)
    with ExitStack() as stack:
        drive = _drive(ask, stack)
        drive.stamped = frozenset(target.plans) if Stage.TARGET in wanted else frozenset()
        watch = TargetWatch(drive, reference, target.plans) if Stage.TARGET in wanted else None
        decisions = _decisions(ask, drive, until) if DECIDED & wanted else None
        drafter = (
            DrafterWalk(drive, drafted.plans, reference, ask.options.draft) if drafts and ask.options.draft else None
        )
        if watch is not None:
            stack.callback(watch.close)
        drafting = stack.enter_context(ExitStack())
        if drafter is not None:
            drafting.enter_context(drafter.on())
        steps = drive.steps(until)
        for number in range(until + 1):
            if drafter is not None and number <= drafted.until:
                drafter.begin()
            else:
                drafting.close()
            record = next(steps)
            ask.progress("walking the run", number + 1, until + 1)
            if drafter is not None and number <= drafted.until:
                drafter.end(record)
    if decisions is not None:
        findings.driven += [item for item in decisions.located() if item.operation.stage in wanted]
        findings.ruled_out += decisions.ruled_out()
        findings.notes += decisions.notes()
        findings.walks += filter(None, [decisions.walk()])
    if watch is not None:
        _of_target(ask, findings, watch, reference, target)
    if drafter is not None:
        if drafter.again:
            drafter = _again(ask, drafter, drafted, reference)
        _of_drafter(ask, findings, drafter, drafted)


def _drive(ask: Question, stack: ExitStack) -> Drive:
    engine = ask.make(located_config(ask.history, ask.target_named, ask.draft_named))
    stack.callback(engine.close)
    only = frozenset(ask.watched(drafter=False).plans) if ask.little else None
    return Drive(engine, ask.history, only)


def _again(ask: Question, first: DrafterWalk, drafted: WalkPlan, reference: ModelReference) -> DrafterWalk:
    """A draft model's passes are known now: the engine runs once more, and they are compared."""
    assert ask.options.draft is not None
    with ExitStack() as stack:
        drive = _drive(ask, stack)
        drafter = DrafterWalk(drive, drafted.plans, reference, ask.options.draft, first.planned)
        stack.enter_context(drafter.on())
        steps = drive.steps(drafted.until)
        for number in range(drafted.until + 1):
            drafter.begin()
            drafter.end(next(steps))
            ask.progress("walking the drafter", number + 1, drafted.until + 1)
            if drafter.located is not None:
                break
    return drafter


def _decisions(ask: Question, drive: Drive, until: int) -> DecisionWatch:
    """Watches sampling and verdicts of every request whose text is known."""
    history = ask.history
    assert history.run is not None
    names = dict.fromkeys(part.request for record in history.steps[: until + 1] for part in record.requests)
    wanted = [name for name in names if drive.only is None or name in drive.only]
    contexts = {name: known for name in wanted if (known := contexts_until(history, name, until)) is not None}
    limited = any(each.params.limited for each in contexts.values())
    vocab = drive.engine.runner.loaded.vocab_size
    forms = RequestForms(ask.options.target, vocab, history.run.eos_tokens) if limited else None
    return DecisionWatch(drive, ask.case, contexts, forms)


def _of_target(
    ask: Question, findings: Findings, watch: TargetWatch, reference: ModelReference, watched: WalkPlan
) -> None:
    if watch.difference is not None:
        located, walk = answer(watch, reference, ask.history)
        findings.located.append(located)
        findings.walks.append(walk)
        return
    for each in watch.drive.overwritten[:1]:
        findings.located.append(_overwritten(each))
    steps = plural(watched.until + 1, "engine step")
    findings.ruled_out.append(
        f"the target: {watch.compared:,} rows at the borders of {plural(len(reference.layers), 'layer')} agree over "
        f"{steps} of {plural(len(watched.plans), 'request')}, to {watch.largest:.0%} of what rounding explains"
    )
    if watch.passed:
        at, held = watch.passed[-1]
        findings.walks.append(Walk(Stage.TARGET, at.where, at.rows, tuple(held), "specscope", "plain transformers"))
    if differs := ask.differing(drafter=False):
        count = plural(len(differs), "request")
        findings.unexplained.append(
            f"the target's recorded figures differ from the model's in {count}, and the engine, run again, agrees with "
            "the model: what was recorded came from another build, other weights, or after the logits"
        )


def _overwritten(found: KVOverwritten) -> Located:
    """KV that changed while no step of its request ran, and that no row has read yet."""
    places, first = plural(len(found.positions), "position"), found.positions[0]
    return Located(
        operation(Stage.TARGET, f"layers.{found.layer}.self_attn.keys read", code_of(KVCache.reserve)),
        f"the KV of {places} of {found.request}, the first {first}, has changed {found.when}",
        smallest=f"{found.request}, position {first}",
        where=Where(found.request, found.before, found.before),
        explained=len(found.positions),
        differing=len(found.positions),
        unit="position",
    )


def _of_drafter(ask: Question, findings: Findings, drafter: DrafterWalk, watched: WalkPlan) -> None:
    assert ask.history.run is not None
    of_target = any(item.operation.stage is Stage.TARGET for item in findings.located)
    if of_target and runs_head(model_part(ask.history.run.drafter)):
        findings.ruled_out.append("the drafter was not walked: it is fed the target's features, which differ")
        return
    findings.walks += drafter.walks[-1:]
    if drafter.located is not None:
        findings.located.append(drafter.located)
    elif drafter.passes:
        passes, steps = plural(drafter.passes, "pass", "passes"), plural(watched.until + 1, "engine step")
        findings.ruled_out.append(
            f"the drafter: {passes} over {steps} of {plural(len(watched.plans), 'request')} agree, from what they are "
            "fed to the tokens that are chosen"
        )
