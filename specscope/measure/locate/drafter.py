"""The drafter's walk: a model that drafts beside its reference, pass by pass, over the recorded steps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import TYPE_CHECKING, Protocol

from specscope.analyze.audit.contexts import Contexts
from specscope.analyze.audit.model.head import Head
from specscope.analyze.findings import Reference as Where
from specscope.analyze.locate.located import Located, Stage, Walk
from specscope.analyze.locate.model.head_passes import HeadPasses
from specscope.analyze.locate.model.reference import ModelReference
from specscope.errors import UserError
from specscope.measure.locate.answer import located_in
from specscope.measure.locate.both import PassCompared
from specscope.measure.locate.draft_watch import DraftPlan, DraftWatch
from specscope.measure.locate.drive import Drive
from specscope.measure.locate.features import TrueFeatures
from specscope.measure.locate.head_watch import HeadWatch
from specscope.speculate.drafters.draft_model import DraftModel
from specscope.speculate.drafters.eagle import Eagle
from specscope.trace.record.records import StepRecord

if TYPE_CHECKING:
    from specscope.analyze.audit.options import ModelSource

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


class DrafterWalk:
    """Watches the drafter of a drive for the requests of `plans`."""

    def __init__(
        self,
        drive: Drive,
        plans: Mapping[str, Contexts],
        target: ModelReference,
        draft: ModelSource,
        planned: Sequence[DraftPlan] | None = None,
    ) -> None:
        """`planned`: what a draft model feeds, from a drive before. Raises UserError."""
        self.drive, self.plans, self.planned = drive, plans, list(planned or ())
        self.watches: dict[str, Watching] = {}
        self.located: Located | None = None
        self._last: dict[str, tuple[Walk, ...]] = {}  # by request, one a pass of the last step
        drafter = drive.engine.drafter
        if isinstance(drafter, Eagle):
            head = Head(draft, target.causal.model)
            for name, contexts in plans.items():
                features = TrueFeatures(drive, name, target, contexts.text, head.layers)
                self.watches[name] = HeadWatch(drafter, name, HeadPasses(head, contexts.text, features.along), features)
        elif not isinstance(drafter, DraftModel):
            raise UserError(f"the drafter {drafter.name} is no model")
        elif planned is None:
            self.planned = [DraftPlan(drive, drafter, contexts) for contexts in plans.values()]
        else:
            reference = ModelReference(draft)
            self.watches |= {
                plan.request: DraftWatch(drive, drafter, reference, plan) for plan in planned if plan.passes
            }

    @property
    def again(self) -> bool:
        """Whether this drive only showed what the drafter feeds."""
        return bool(self.planned) and not self.watches

    @property
    def passes(self) -> int:
        """That were compared."""
        return sum(watch.compared for watch in self.watches.values())

    @property
    def walks(self) -> tuple[Walk, ...]:
        """One a pass of the last step: up to the pass that differs."""
        return tuple(walk for each in self._last.values() for walk in each)

    @contextmanager
    def on(self) -> Iterator[None]:
        """Watch meanwhile."""
        with ExitStack() as stack:
            for watch in self.watches.values() or self.planned:
                stack.enter_context(watch.on())
            yield

    def begin(self) -> None:
        """A step begins."""
        for watch in self.watches.values():
            watch.begin()

    def end(self, record: StepRecord) -> None:
        """A step has run."""
        index = {part.request: part.index for part in record.requests}
        reference = HEAD if isinstance(self.drive.engine.drafter, Eagle) else MODEL
        for name, watch in self.watches.items() if self.located is None else ():
            where = Where(name, index.get(name, 0), record.step)
            if watch.passes:
                self._last[name] = _walks(watch.passes, where, reference)
            if watch.wrong is not None:
                self.located = located_in(watch.wrong, where, self.plans[name], self.drive.history.vocabulary)
                self._last = {name: self._last[name]}
                return


def _walks(passes: list[PassCompared], where: Where, reference: str) -> tuple[Walk, ...]:
    return tuple(
        Walk(Stage.DRAFTER, where, each.rows, tuple(each.held), "specscope, in float32", reference) for each in passes
    )
