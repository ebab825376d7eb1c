"""Our engine once more over the recorded steps, with target, sampling, verdict and drafter watched together."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack

from specscope.analyze.audit.model.form import RequestForms
from specscope.analyze.locate.located import Located, Location, Stage, Walk, operation
from specscope.analyze.locate.model.reference import ModelReference
from specscope.errors import UserError
from specscope.live.start import start_engine
from specscope.measure.locate.answer import HEAD, MODEL, located_in
from specscope.measure.locate.decisions import DecisionWatch
from specscope.measure.locate.drafter import drafter_watch
from specscope.measure.locate.drive import Drive, KVOverwritten, located_config
from specscope.measure.locate.question import Question, contexts_until
from specscope.measure.locate.watch import ModelWatch, target_watch
from specscope.plans.kinds import model_part, runs_head
from specscope.plans.plan import read_plan
from specscope.trace.history.wording import plural

NO_MODEL = "the drafter's model was not found"
DECIDED = {Stage.SAMPLING, Stage.VERDICT, Stage.DRAWS}


def walk(ask: Question, found: Location, stages: Iterable[Stage]) -> None:
    """Walk what is asked for, in one run of the engine. Raises UserError."""
    wanted, run, draft = {*stages}, ask.run, ask.session.options.draft
    if ask.little and run.drafter != "none" and read_plan(run.tree) is None:
        raise UserError("the capture names no tree that can be read")
    target, drafted = ask.watched(drafter=False), ask.watched(drafter=True)
    drafts = Stage.DRAFTER in wanted and bool(model_part(run.drafter))
    if drafts and draft is None:
        found.left_out += (f"drafter: {ask.session.options.why_no_draft or NO_MODEL}",)
    until = max(target.until if wanted - {Stage.DRAFTER} else 0, drafted.until if drafts and draft else 0)
    ask.progress("loading the reference", 0, 0)
    reference = ModelReference(ask.session.options.target, ask.session.options.device)
    watches: list[ModelWatch] = []
    with ExitStack() as stack:
        engine = start_engine(located_config(ask.history, ask.session.options), lambda what: ask.progress(what, 0, 0))
        stack.callback(engine.close)
        drive = Drive(engine, ask.history, frozenset(target.contexts) if ask.little else None, target.first)
        if Stage.TARGET in wanted:
            drive.stamped = frozenset(target.contexts)
            watches.append(target_watch(drive, target, reference, stack))
        decisions = _decisions(ask, drive, until) if DECIDED & wanted else None
        if drafts and draft is not None:
            try:
                watches.append(drafter_watch(drive, drafted, reference, draft, stack))
            except UserError as error:  # the target is walked all the same
                found.left_out += (f"drafter: {error}",)
        for number, _ in enumerate(drive.steps(until)):
            ask.progress("walking the run", number + 1, until + 1)
    if decisions is not None:
        ask.driven.extend(item for item in decisions.located() if item.operation.stage in wanted)
        found.ruled_out += tuple(decisions.ruled_out())
        found.notes += tuple(decisions.notes())
        found.walks += tuple(filter(None, [decisions.walk()]))
    if Stage.DRAFTER in wanted and ask.session.options.own:
        _of_own(ask, found, drive)
    for watch in watches:
        _of_watch(ask, found, watch, len(reference.layers))


def _of_own(ask: Question, found: Location, drive: Drive) -> None:
    """Whether a drafter of somebody's own, asked again, drafts the recorded trees."""
    name, steps, other = ask.run.drafter, plural(drive.proposed, "step"), drive.otherwise
    if not other:
        found.ruled_out += (f"the drafter: {name}, asked again, drafts the recorded tree in {steps}",)
    elif not ask.little:  # where it may not have seen what it depends on
        differs = f"drafts another tree than the recorded one in {len(other):,} of {steps}, first in {other[0]}"
        found.unexplained += (f"the drafter: {name}, asked again, {differs}",)


def _decisions(ask: Question, drive: Drive, until: int) -> DecisionWatch:
    """Watches sampling and verdicts of every request whose text is known."""
    history = ask.history
    names = dict.fromkeys(part.request for record in history.steps[: until + 1] for part in record.requests)
    wanted = [name for name in names if drive.only is None or name in drive.only]
    contexts = {name: known for name in wanted if (known := contexts_until(history, name, until)) is not None}
    limited = any(each.params.limited for each in contexts.values())
    vocab = drive.engine.runner.loaded.vocab_size
    forms = RequestForms(ask.session.options.target, vocab, ask.run.eos_tokens) if limited else None
    return DecisionWatch(drive, ask.session.case, contexts, forms)


def _of_watch(ask: Question, found: Location, watch: ModelWatch, layers: int) -> None:
    """What a model's passes come to."""
    is_target = watch.stage is Stage.TARGET
    head = not is_target and runs_head(ask.run.drafter)
    if head and any(item.operation.stage is Stage.TARGET for item in found.located):
        found.ruled_out += ("the drafter was not walked: it is fed the target's features, and they differ",)
        return
    compared = watch.wrong or next(reversed(watch.last.values()), None)
    if compared is not None:
        walked = (compared.stage, compared.where, compared.rows, tuple(compared.held))
        found.walks += (Walk(*walked, "specscope, in float32", HEAD if head else MODEL),)
    overwritten = watch.drive.overwritten if is_target else []
    if watch.wrong is not None:
        text = watch.plan.contexts[watch.wrong.where.request].text
        found.located += (located_in(watch.wrong, text, ask.history, overwritten),)
        return
    found.located += tuple(_overwritten(each) for each in overwritten[:1])
    steps = watch.plan.until + 1 - watch.plan.first
    of_what = f"{plural(steps, 'engine step')} of {plural(len(watch.plan.contexts), 'request')}"
    if is_target:
        found.ruled_out += (
            f"the target: {watch.rows:,} rows at the borders of {plural(layers, 'layer')} agree over {of_what}, "
            f"within {watch.largest:.0%} of what rounding explains",
        )
    elif watch.passes:
        found.ruled_out += (
            f"the drafter: {plural(watch.passes, 'pass', 'passes')} over {of_what} agree, from their inputs to the "
            "chosen tokens",
        )
    if is_target and (differs := ask.differing(drafter=False)):
        found.unexplained += (
            f"the target's recorded figures differ from the model's in {plural(len(differs), 'request')}, but the "
            "engine, run again, agrees with the model: the recording came from another build, other weights, or the "
            "error is after the logits",
        )


def _overwritten(found: KVOverwritten) -> Located:
    """KV that changed while no step of its request ran, and that no row has read yet."""
    places, first, request = plural(len(found.positions), "position"), found.positions[0], found.before.request
    return Located(
        operation(Stage.TARGET, f"layers.{found.layer}.self_attn.keys read"),
        f"the KV of {places} of {request}, the first {first}, has changed {found.when}",
        smallest=f"{request}, position {first}",
        where=found.before,
        explained=len(found.positions),
        differing=len(found.positions),
        unit="position",
    )
