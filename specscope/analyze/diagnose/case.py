"""A capture laid out for diagnosis: each decode step with its text, its trials and the step before it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from specscope.analyze.evidence.columns import Columns
from specscope.analyze.evidence.visits import Visit, visits
from specscope.analyze.findings import Finding, Reference
from specscope.analyze.verify.trial import Trial, judge
from specscope.plans.plan import TreePlan, read_plan
from specscope.trace.history.history import History
from specscope.trace.record.params import SamplingParams
from specscope.trace.record.records import FinalKind, Outcome, Preceded, RequestStep, Verdict
from specscope.trace.record.tree import ROOT, DraftTree


@dataclass(frozen=True)
class Trials:
    """The children of one node that were tried, in the order of their trials."""

    parent: int
    nodes: tuple[int, ...]


@dataclass(frozen=True)
class Step:
    """A decode step of a request."""

    visit: Visit
    verdict: Verdict
    params: SamplingParams | None
    text: Sequence[int]  # prompt and output, to the end of the request
    after: int  # where in `text` the step's own tokens begin
    last: Step | None  # the request's decode step before it

    @property
    def part(self) -> RequestStep:
        """The record."""
        return self.visit.part

    @property
    def tree(self) -> DraftTree:
        """The tree."""
        return self.visit.part.tree

    @property
    def request(self) -> str:
        """The request's id."""
        return self.visit.request.id

    @property
    def key(self) -> tuple[str, int]:
        """The request's id and the step's number in it."""
        return self.request, self.part.index

    @property
    def is_sampled(self) -> bool:
        """Whether drafts were drawn from a recorded q."""
        return self.tree.is_sampled

    @cached_property
    def trials(self) -> tuple[Trials, ...]:
        """All trials, the root's first, then down the accepted path."""
        tried = np.flatnonzero(self.verdict.outcome != Outcome.UNTRIED)
        by_parent: dict[int, list[int]] = {}
        for node in tried.tolist():
            by_parent.setdefault(int(self.tree.parent[node]), []).append(node)
        return tuple(Trials(parent, tuple(nodes)) for parent, nodes in by_parent.items())

    @property
    def rejected_last(self) -> tuple[int, ...]:
        """The rejected children at whose place the final token was recovered; empty where it was not."""
        if self.verdict.kind is not FinalKind.RECOVERED or not self.trials:
            return ()
        last = self.trials[-1].nodes
        return last if all(self.verdict.outcome[node] == Outcome.REJECTED for node in last) else ()

    @property
    def preceded(self) -> Preceded | None:
        """What came before it; derived where the capture does not say."""
        return self.visit.preceded

    def reference(self, node: int | None = None) -> Reference:
        """Where to look."""
        return self.visit.reference(node)

    def token_after(self, depth: int) -> int | None:
        """The text's token at a depth below the root, the first at 1; None past its end."""
        place = self.after + depth - 1
        return self.text[place] if 0 <= place < len(self.text) else None


@dataclass(frozen=True)
class Case:
    """All that is known about a run. `visits` holds prefill chunks too."""

    history: History
    visits: tuple[Visit, ...]
    steps: tuple[Step, ...]  # decode steps whose outcome was judged and not forced, in the engine's order
    trial: Trial  # verify's

    @staticmethod
    def of(history: History, trial: Trial | None = None) -> Case:
        """Lay a run out. `trial`: verify's, where there is one already."""
        trial = trial or judge(history, source="")
        return Case(history, tuple(visits(history)), tuple(_steps(trial.evidence)), trial)

    @property
    def evidence(self) -> Columns:
        """The decode steps as arrays: what `Finding.wrong` numbers."""
        return self.trial.evidence

    @cached_property
    def checks(self) -> dict[str, Finding]:
        """The checks of verify, by name."""
        return {check.name: check for check in self.trial.checks}

    def step_at(self, step: int) -> Step | None:
        """The decode step of that number in the evidence; None where its outcome was forced."""
        where = self.evidence.at_step(step)
        return self.by_key.get((where.request, where.index))

    @cached_property
    def by_key(self) -> dict[tuple[str, int], Step]:
        """The steps, by `Step.key`."""
        return {step.key: step for step in self.steps}

    @property
    def drafting(self) -> list[Step]:
        """Steps with a draft."""
        return [step for step in self.steps if len(step.tree)]

    @property
    def plan(self) -> TreePlan | None:
        """The tree that the run was to draft; None where it is not known or read."""
        text = "" if self.history.run is None else self.history.run.tree
        return read_plan(text)

    @property
    def dtype(self) -> str:
        """The dtype that the run computed in; empty where it is not known."""
        return "" if self.history.run is None else self.history.run.dtype

    @property
    def is_model(self) -> bool:
        """Whether the drafter is a model."""
        return self.history.run is not None and bool(self.history.run.draft_model)


def _steps(c: Columns) -> Iterator[Step]:
    every = [c.texts.text[begin:end].tolist() for begin, end in zip(c.texts.begins, c.texts.ends, strict=True)]
    last: dict[str, Step] = {}
    for number, (visit, verdict) in enumerate(zip(c.visits, c.verdicts, strict=True)):
        request, info = c.texts.request[number], visit.request.info
        after, before = int(c.texts.behind[number] - c.texts.begins[request]), last.get(visit.request.id)
        step = Step(visit, verdict, None if info is None else info.params, every[request], after, before)
        last[visit.request.id] = step
        if not len(verdict.forced):
            yield step


def path_of_firsts(step: Step) -> list[int]:
    """The nodes that are first children all the way from the root: the chain that the drafter thinks likeliest."""
    path, node = [], ROOT
    while children := step.tree.children(node):
        node = children[0]
        path.append(node)
    return path
