"""The drafter's walk: a model that drafts beside its reference, pass by pass, over the recorded steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from specscope.analyze.audit.contexts import Contexts
from specscope.analyze.audit.model.head import Head
from specscope.analyze.findings import Reference as Where
from specscope.analyze.locate.located import Located, Stage, Walk
from specscope.analyze.locate.model.head_passes import HeadPasses
from specscope.analyze.locate.model.reference import ModelReference
from specscope.errors import UserError
from specscope.measure.locate.both import PassCompared
from specscope.measure.locate.draft_watch import DraftPlan, DraftWatch
from specscope.measure.locate.drafter_answer import located_in
from specscope.measure.locate.drive import Drive, MakeEngine, located_config
from specscope.measure.locate.features import TrueFeatures
from specscope.measure.locate.head_watch import HeadWatch
from specscope.speculate.drafters.draft_model import DraftModel
from specscope.speculate.drafters.eagle import Eagle
from specscope.trace.history.history import History

if TYPE_CHECKING:
    from specscope.analyze.audit.options import ModelSource, Progress

HEAD = "the head's published layout in plain torch, float32"
MODEL = "plain transformers, float32"


class Watching(Protocol):
    """Compares the drafter's passes for one request."""

    passes: list[PassCompared]  # of the step that runs
    compared: int  # passes in all

    @property
    def wrong(self) -> PassCompared | None:
        """The pass that differs first."""

    def begin(self) -> None:
        """A step begins."""

    def on(self) -> AbstractContextManager[None]:
        """TargetWatch meanwhile."""


@dataclass(frozen=True)
class DrafterModels:
    """Where the models are, and what builds the engine."""

    target: ModelSource
    draft: ModelSource
    make: MakeEngine
    target_name: str | None = None  # as --target and --draft-model take them
    draft_name: str | None = None


@dataclass(frozen=True)
class DrafterWalked:
    """What a walk over a drafter's passes came to."""

    walks: tuple[Walk, ...]  # one a pass of the last step: up to the pass that differs
    located: Located | None
    passes: int  # that were compared


def walk_drafter(
    history: History,
    plans: Mapping[str, Contexts],
    until: int,
    models: DrafterModels,
    progress: Progress = lambda *_: None,
) -> DrafterWalked:
    """Walk the drafter over the steps up to a place of the history, for the requests of `plans`. Raises UserError."""
    drive = _drive(history, models)
    try:
        drafter = drive.engine.drafter
        if isinstance(drafter, Eagle):
            watches = _of_head(drive, drafter, plans, models)
        elif isinstance(drafter, DraftModel):
            planned = _planned(drive, drafter, plans, until, progress)
            drive.engine.close()
            drive = _drive(history, models)
            watches = _of_model(drive, planned, models)
        else:
            raise UserError(f"the drafter {drive.engine.drafter.name} is no model")
        return _walked(drive, watches, plans, until, progress)
    finally:
        drive.engine.close()


def _drive(history: History, models: DrafterModels) -> Drive:
    return Drive(models.make(located_config(history, models.target_name, models.draft_name)), history)


def _of_head(
    drive: Drive, drafter: Eagle, plans: Mapping[str, Contexts], models: DrafterModels
) -> Mapping[str, Watching]:
    reference = ModelReference(models.target)
    head, watches = Head(models.draft, reference.causal.model), dict[str, HeadWatch]()
    for name, contexts in plans.items():
        features = TrueFeatures(drive, name, reference, contexts.text, head.layers)
        watches[name] = HeadWatch(drafter, name, HeadPasses(head, contexts.text, features.along), features)
    return watches


def _planned(
    drive: Drive, drafter: DraftModel, plans: Mapping[str, Contexts], until: int, progress: Progress
) -> list[DraftPlan]:
    """What a draft model feeds in each of its passes."""
    planned = [DraftPlan(drive, drafter, contexts) for contexts in plans.values()]
    with ExitStack() as stack:
        for plan in planned:
            stack.enter_context(plan.on())
        for number, _ in enumerate(drive.steps(until), 1):
            progress("running the drafter", number, until + 1)
    return planned


def _of_model(drive: Drive, planned: Sequence[DraftPlan], models: DrafterModels) -> Mapping[str, Watching]:
    reference, drafter = ModelReference(models.draft), drive.engine.drafter
    assert isinstance(drafter, DraftModel)
    return {plan.request: DraftWatch(drive, drafter, reference, plan) for plan in planned if plan.passes}


def _walked(
    drive: Drive, watches: Mapping[str, Watching], plans: Mapping[str, Contexts], until: int, progress: Progress
) -> DrafterWalked:
    history, last = drive.history, dict[str, tuple[Walk, ...]]()
    reference = HEAD if isinstance(drive.engine.drafter, Eagle) else MODEL
    steps = drive.steps(until)
    with ExitStack() as stack:
        for watch in watches.values():
            stack.enter_context(watch.on())
        for number in range(until + 1):
            for watch in watches.values():
                watch.begin()
            record = next(steps)
            progress("walking the drafter", number + 1, until + 1)
            index = {part.request: part.index for part in record.requests}
            for name, watch in watches.items():
                where = Where(name, index.get(name, 0), record.step)
                if watch.passes:
                    last[name] = _walks(watch.passes, where, reference)
                if watch.wrong is not None:
                    located = located_in(watch.wrong, where, plans[name], history.vocabulary)
                    return DrafterWalked(last[name], located, watch.compared)
    walks = tuple(walk for each in last.values() for walk in each)
    return DrafterWalked(walks, None, sum(watch.compared for watch in watches.values()))


def _walks(passes: list[PassCompared], where: Where, reference: str) -> tuple[Walk, ...]:
    return tuple(
        Walk(Stage.DRAFTER, where, each.rows, tuple(each.held), "specscope, in float32", reference) for each in passes
    )
