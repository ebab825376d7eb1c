"""A capture laid out for diagnosis: each decode step with its text, its trials and the step before it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from specscope.analyze.findings import Check, Reference, Result
from specscope.analyze.walk import Visit, visits
from specscope.trace.history import History
from specscope.trace.params import SamplingParams
from specscope.trace.plan import StaticPlan, TreePlan, parse_plan
from specscope.trace.records import FinalKind, Outcome, Preceded, RequestStep, Verdict
from specscope.trace.rules import MATCH, STANDARD
from specscope.trace.tree import ROOT, DraftTree


@dataclass(frozen=True)
class Trials:
    """The children of one node that were tried, in the order in which they were."""

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
    def is_sampled(self) -> bool:
        """Whether drafts were drawn from a recorded q."""
        return self.tree.is_sampled

    @cached_property
    def trials(self) -> tuple[Trials, ...]:
        """Root first, then down the accepted path."""
        tried = np.flatnonzero(self.verdict.outcome != Outcome.UNTRIED)
        by_parent: dict[int, list[int]] = {}
        for node in tried.tolist():
            by_parent.setdefault(int(self.tree.parent[node]), []).append(node)
        return tuple(Trials(parent, tuple(nodes)) for parent, nodes in by_parent.items())

    @property
    def rejected_last(self) -> tuple[int, ...]:
        """The children that were all rejected, where the final token was drawn from what was left of p."""
        if self.verdict.kind is not FinalKind.RECOVERED or not self.trials:
            return ()
        last = self.trials[-1].nodes
        return last if all(self.verdict.outcome[node] == Outcome.REJECTED for node in last) else ()

    @property
    def preceded(self) -> Preceded | None:
        """What came before it; worked out where the capture does not say."""
        if self.part.preceded is not None:
            return self.part.preceded
        if self.visit.preempted:
            return Preceded.PREEMPTION
        if self.last is None:
            return Preceded.PREFILL
        if not len(self.last.tree):
            return Preceded.NO_DRAFT
        accepted = len(self.last.verdict.path)
        if not accepted:
            return Preceded.NOTHING
        return Preceded.FULL if self.last.verdict.kind is FinalKind.BONUS else Preceded.PARTIAL

    def reference(self, node: int | None = None) -> Reference:
        """Where to look."""
        return self.visit.reference(node)

    def token_after(self, depth: int) -> int | None:
        """The text's token at a depth below the root, the first at 1; None past its end."""
        at = self.after + depth - 1
        return self.text[at] if 0 <= at < len(self.text) else None

    def top_of(self, parent: int) -> int | None:
        """The place of a parent in the step's ParentNotes; None where it is not there."""
        notes = self.part.parents
        if notes is None:
            return None
        found = np.flatnonzero(notes.node == parent)
        return int(found[0]) if len(found) else None


@dataclass(frozen=True)
class Case:
    """All that is known of a run. `visits` holds prefill chunks too."""

    history: History
    visits: tuple[Visit, ...]
    steps: tuple[Step, ...]  # decode steps whose outcome was judged and not forced, in the engine's order
    checks: dict[str, Check] = field(default_factory=dict)  # of verify, by name

    @staticmethod
    def of(history: History, checks: Sequence[Check] = ()) -> Case:
        """Lay a run out."""
        every = tuple(visits(history))
        return Case(history, every, tuple(_steps(history, every)), {check.name: check for check in checks})

    @property
    def drafting(self) -> list[Step]:
        """Steps with a draft."""
        return [step for step in self.steps if len(step.tree)]

    @property
    def standard(self) -> list[Step]:
        """Those of them that the standard rule judged."""
        return [step for step in self.drafting if step.part.rule == STANDARD]

    @property
    def tossed(self) -> list[Step]:
        """Steps in which each node has a coin of its own, and the final token another."""
        return [step for step in self.steps if step.part.rule != MATCH]

    @property
    def plan(self) -> TreePlan | None:
        """The tree that the run was to draft; None where it is not known or read."""
        text = "" if self.history.run is None else self.history.run.tree
        try:
            return parse_plan(text) if text else None
        except ValueError:
            return None

    @property
    def is_model(self) -> bool:
        """Whether the drafter is a model."""
        return self.history.run is not None and bool(self.history.run.draft_model)

    @property
    def wants_samples(self) -> bool:
        """Whether the plan asks for sampled drafts of requests that are sampled."""
        return self.is_model and isinstance(self.plan, StaticPlan) and not self.plan.top

    def failed(self, *names: str) -> list[Check]:
        """Checks of verify that failed, of these or of all."""
        chosen = self.checks.values() if not names else [self.checks[name] for name in names if name in self.checks]
        return [check for check in chosen if check.result is Result.FAILED]


def _steps(history: History, every: Sequence[Visit]) -> Iterator[Step]:
    texts: dict[str, list[int]] = {}
    made: dict[str, int] = {}
    last: dict[str, Step] = {}
    for name, request in history.requests.items():
        prompt = [] if request.info is None else request.info.prompt_tokens.tolist()
        texts[name] = [*prompt, *(token for token, _ in request.output())]
        made[name] = len(prompt)
    for visit in every:
        name, verdict = visit.request.id, visit.part.verdict
        if verdict is None:
            continue
        info = visit.request.info
        params = None if info is None else info.params
        step = Step(visit, verdict, params, texts[name], made[name], last.get(name))
        last[name] = step
        made[name] += visit.part.emitted
        if not len(verdict.forced):
            yield step


def children_of(step: Step, parent: int) -> list[int]:
    """The nodes below a parent, in draw order."""
    return step.tree.children(parent)


def path_of_firsts(step: Step) -> list[int]:
    """The nodes from the root down that are first children: the chain that the drafter believes in most."""
    path, node = [], ROOT
    while children := step.tree.children(node):
        node = children[0]
        path.append(node)
    return path
