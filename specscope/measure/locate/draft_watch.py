"""A draft model's passes beside plain transformers, by the same machinery as the target's.

What a pass is over, committed tokens or nodes of a tree, is known only when it runs: so the engine is driven twice,
once to see what the drafter feeds, and once to compare it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import patch

import torch
from torch import Tensor

from specscope.analyze.audit.contexts import AuditedStep, Contexts
from specscope.analyze.findings import Reference as Where
from specscope.analyze.locate.located import FedRow, Held, Stage
from specscope.analyze.locate.model.reference import Inside, ModelReference
from specscope.analyze.locate.operations import operation
from specscope.measure.locate.both import COMPILED, Both, PassCompared
from specscope.measure.locate.choices import Choices
from specscope.measure.locate.drive import Drive
from specscope.measure.locate.inside import BothSides, first_wrong
from specscope.measure.locate.layer_taps import code_of
from specscope.measure.locate.target import AMPLIFIED, FirstDifference, PartRows, TargetWatch
from specscope.model.batch import Segment
from specscope.speculate.drafters.draft_model import DraftModel
from specscope.speculate.drafters.model_drafter import Drafting
from specscope.speculate.drafters.tree_builder import Level, TreeBuilder
from specscope.trace.record.records import RequestStep
from specscope.trace.record.tree import ROOT, DraftTree


@dataclass(frozen=True)
class FedPass:
    """One pass of a draft model for one request. Its part has the rows, or as its tree all nodes that were fed."""

    part: RequestStep
    nodes: tuple[int, ...] = ()  # of the part's tree, those of this pass; none: committed tokens


class _Passes:
    """Follows the draft model's passes for one request."""

    def __init__(self, drafter: DraftModel, request: str) -> None:
        self.drafter, self.request = drafter, request
        self.drafting: Drafting | None = None  # of the request, while its tree's nodes are fed
        self.before = self.fed = 0  # rows of other requests before its own; its own rows

    @contextmanager
    def on(self) -> Iterator[None]:
        """Follow meanwhile."""
        drafter, runner = self.drafter, self.drafter.runner
        with ExitStack() as stack:
            for owner, name, wrapped in (
                (drafter, "feed_context", self._feeding(drafter.feed_context, grows=False)),
                (drafter, "feed_frontier", self._feeding(drafter.feed_frontier, grows=True)),
                (drafter, "propose", self._proposing(drafter.propose)),
                (runner, "forward", self._forward(runner.forward)),
            ):
                stack.enter_context(patch.object(owner, name, wrapped))
            yield

    def _feeding(self, feed: Any, *, grows: bool) -> Any:  # noqa: ANN401
        def feeding(drafting: Sequence[Drafting]) -> Level:
            mine = next((g for g in drafting if g.context.request == self.request), None)
            self.drafting = mine if grows else None
            try:
                level: Level = feed(drafting)
            finally:
                self.drafting = None
            if mine is not None:
                self.judge(level, mine, sum(len(g.builder.frontier) for g in drafting[: drafting.index(mine)]))
            return level

        return feeding

    def _proposing(self, propose: Any) -> Any:  # noqa: ANN401
        def proposing(contexts: Any) -> Any:  # noqa: ANN401
            self.begin_draft()
            drafts = propose(contexts)
            self.end_draft()
            return drafts

        return proposing

    def _forward(self, forward: Any) -> Any:  # noqa: ANN401
        def forwarding(segments: Sequence[Segment]) -> list[Tensor]:
            state = self.drafter.states.get(self.request)
            tables = [segment.table for segment in segments]
            index = next((i for i, table in enumerate(tables) if state is not None and table is state.table), None)
            if index is None:
                return forward(segments)  # type: ignore[no-any-return]
            self.before, self.fed = sum(len(s.tokens) for s in segments[:index]), len(segments[index].tokens)
            return self.run(forward, segments, segments[index])

        return forwarding

    def run(self, forward: Any, segments: Sequence[Segment], mine: Segment) -> list[Tensor]:  # noqa: ANN401
        """A pass with rows of the request."""
        return forward(segments)  # type: ignore[no-any-return]

    def judge(self, level: Level, drafting: Drafting, first: int) -> None:
        """The logits of a pass, of which the request's begin at row `first`."""

    def begin_draft(self) -> None:
        """A draft begins."""

    def end_draft(self) -> None:
        """The draft is done."""


class DraftPlan(_Passes):
    """What the draft model feeds in a first drive, and with it the contexts of the reference."""

    def __init__(self, drive: Drive, drafter: DraftModel, contexts: Contexts) -> None:
        super().__init__(drafter, contexts.request)
        self.drive = drive
        self.passes: list[FedPass] = []
        whole = contexts
        self.contexts = Contexts(whole.request, whole.params, whole.text, whole.prompt_len, shaped=whole.shaped)
        self._branches: dict[tuple[int, int], int] = {}

    def begin_draft(self) -> None:
        """Branches of another draft are others."""
        self._branches = {}

    def run(self, forward: Any, segments: Sequence[Segment], mine: Segment) -> list[Tensor]:  # noqa: ANN401
        """Note what is fed."""
        name, g = self.request, self.drafting
        if g is None:
            end = mine.length
            tree, context = DraftTree.empty(), end - len(mine.tokens)
            nodes: tuple[int, ...] = ()
            part = RequestStep(name, self._index(), context, len(mine.tokens), self.drafter.name, tree, None, 0)
            rows = {ROOT: end - 1}
        else:
            fed, place = g.builder.fed, {node: i for i, node in enumerate(g.builder.fed)} | {ROOT: ROOT}
            token = [g.builder.token[node] for node in fed]
            tree = DraftTree.build(token, [place[g.builder.parent[node]] for node in fed])
            nodes = tuple(range(len(fed) - len(mine.tokens), len(fed)))
            part = RequestStep(name, self._index(), g.base, 0, self.drafter.name, tree, None, 0)
            rows = {ROOT: g.base - 1}
            for node, parent in enumerate(tree.parent.tolist()):
                rows[node] = self.contexts._after(rows[parent], token[node], self._branches)
        self.contexts.steps.append(AuditedStep(part, Where(name, part.index, self.drive.engine.steps), rows))
        self.passes.append(FedPass(part, nodes))
        return forward(segments)  # type: ignore[no-any-return]

    def _index(self) -> int:
        record = self.drive.history.steps[self.drive.engine.steps]
        return next((part.index for part in record.requests if part.request == self.request), 0)


@dataclass
class _DraftDrive:
    """What a TargetWatch asks of a drive, for a draft model."""

    drafter: DraftModel
    engine: Any
    fed: tuple[RequestStep, ...] = ()  # while a pass with rows of the request runs

    def table_of(self, request: str) -> list[int]:
        """The KV blocks of a request, in order."""
        return self.drafter.states[request].table.blocks


class _Borders(TargetWatch):
    """Compares the borders of the draft model's layers in the pass that runs."""

    def __init__(self, drive: _DraftDrive, reference: ModelReference, plan: DraftPlan) -> None:
        super().__init__(cast("Drive", drive), reference, {plan.request: plan.contexts})
        self.rows: PartRows | None = None

    def _parts(self) -> list[PartRows]:
        return [] if self.rows is None else [self.rows]


@dataclass
class DraftWatch(_Passes):
    """Compares a draft model's passes for one request with the reference."""

    drive: Drive
    drafter: DraftModel
    reference: ModelReference
    plan: DraftPlan
    passes: list[PassCompared] = field(default_factory=list)  # of the step that runs
    compared: int = 0  # passes in all
    choices: Choices = field(default_factory=Choices)

    def __post_init__(self) -> None:
        super().__init__(self.drafter, self.plan.request)
        steps = self.drive.engine
        engine = SimpleNamespace(runner=self.drafter.runner, steps=steps.steps)
        self._adapter = _DraftDrive(self.drafter, engine)
        self._borders = _Borders(self._adapter, self.reference, self.plan)
        self._left = iter(self.plan.passes)
        self._now: FedPass | None = None

    @property
    def wrong(self) -> PassCompared | None:
        """The pass that differs first."""
        return next((each for each in self.passes if each.wrong is not None), None)

    def begin(self) -> None:
        """A step begins."""
        if self.wrong is None:
            self.passes = []
            self._adapter.engine.steps = self.drive.engine.steps

    @contextmanager
    def on(self) -> Iterator[None]:
        """TargetWatch meanwhile."""
        try:
            with super().on():
                yield
        finally:
            self._borders.close()

    def begin_draft(self) -> None:
        """A draft begins."""
        self.choices = Choices()

    def end_draft(self) -> None:
        """The tokens that were chosen."""
        if self.wrong is None and self.passes:
            self.passes[-1].compare(self.choices.compared(code_of(TreeBuilder._top)), {})

    def run(self, forward: Any, segments: Sequence[Segment], mine: Segment) -> list[Tensor]:  # noqa: ANN401
        """Compare the pass."""
        self._now = next(self._left, None)
        if self._now is None or self.wrong is not None:
            return forward(segments)  # type: ignore[no-any-return]
        borders, part = self._borders, self._now.part
        borders.rows = self._rows(self._now)
        self._adapter.fed = (part,)
        try:
            logits: list[Tensor] = forward(segments)
        finally:
            self._adapter.fed = ()
        self.compared += 1
        rows = borders.rows.rows
        if borders.difference is None:
            self.passes.append(PassCompared(rows, [_held(item) for _, held in borders.passed for item in held]))
        else:
            self.passes.append(self._answer(borders.difference, rows))
        return logits

    def judge(self, level: Level, drafting: Drafting, first: int) -> None:
        """The logits as the tree's tokens are chosen of them."""
        if self.wrong is not None or self._now is None or not self.passes:
            return
        assert self._borders.rows is not None
        step = next(step for step in self.plan.contexts.steps if step.part == self._now.part)
        known = self._borders.borders[self.request].logits
        nodes = self._now.nodes or (ROOT,)
        right = torch.stack([known[step.rows[node]] for node in nodes])
        ours = level.full(slice(first, first + len(nodes)))
        if ours.shape[1] > right.shape[1]:  # padded to the target's vocabulary
            right = torch.nn.functional.pad(right, (0, ours.shape[1] - right.shape[1]), value=-torch.inf)
        both = Both(
            "vocabulary",
            ours,
            right[:, : ours.shape[1]],
            self._borders.rows.rows[-len(nodes) :],
            code=code_of(Level.full),
        )
        if not self.passes[-1].compare([both], {"vocabulary": self._borders.allowed["norm"]}):
            self.choices.see(drafting, right, one_pass=False)

    def _rows(self, fed: FedPass) -> PartRows:
        """Where the pass's rows lie in the batch and in the reference."""
        part, borders = fed.part, self._borders.borders[self.request]
        step = next(step for step in self.plan.contexts.steps if step.part == part)
        if fed.nodes:
            depth = part.tree.depth
            contexts = [step.rows[node] for node in fed.nodes]
            rows = [
                FedRow(part.context_len - 1 + int(depth[node]), int(part.tree.token[node]), node) for node in fed.nodes
            ]
        else:
            contexts = list(range(part.context_len, part.context_len + part.prefill_tokens))
            rows = [FedRow(position, self.plan.contexts.text[position]) for position in contexts]
        given = torch.arange(self.before, self.before + len(rows))
        reference = torch.tensor([borders.index(row) for row in contexts])
        count = len(part.tree) if fed.nodes else len(rows)
        return PartRows(part, step.where, given, reference, contexts, tuple(rows), count)

    def _answer(self, difference: FirstDifference, rows: tuple[FedRow, ...]) -> PassCompared:
        """The first operation that differs, within its layer where it is one of a layer."""
        held, step, inside = list(difference.before), None, None
        contexts = self.plan.contexts
        if difference.call is not None:
            inside = self.reference.inside(contexts, difference.call.layer, self._borders.borders[self.request])
            last = max((item.error for item in held[-1:]), default=0.0)
            within, step = first_wrong(difference, inside, contexts, max(difference.held.allowed, AMPLIFIED * last))
            held += within
        if step is not None and inside is not None:
            return PassCompared(rows, [_held(item) for item in held], _both(step, held[-1], inside, difference))
        inner, call = difference.inner, difference.call
        again = inner is not None and not inner.same
        differs = again and call is not None and call.fused is not None and call.fused.compiled is not None
        held.append(difference.held)
        both = Both(
            difference.name,
            difference.ours,
            difference.right,
            difference.at.rows,
            certain=difference.call is None or differs,
            looks=COMPILED if differs else "",
        )
        return PassCompared(rows, [_held(item) for item in held], both)


def _held(item: Held) -> Held:
    """As one of the drafter's."""
    return replace(item, operation=operation(Stage.DRAFTER, item.operation.name, item.operation.code))


def _both(step: BothSides, held: Held, inside: Inside, difference: FirstDifference) -> Both:
    """An operation inside a layer, of both sides."""
    name, ours, right = held.operation.name, step.ours, step.right
    keys = tuple(FedRow(position, -1) for position in step.keys[:-1])
    size = 0
    if keys and difference.call is not None:
        ours, right = (x.unflatten(1, (step.heads, -1))[..., :-1] for x in (ours, right))
        size = difference.call.cache.layers[difference.call.layer].key_size
    plain = step.name.removesuffix(" read").removesuffix("s") if step.name.endswith(" read") else step.name
    return Both(name, ours, right, step.rows, step.heads, keys=keys, size=size, others=inside.taps.get(plain))
