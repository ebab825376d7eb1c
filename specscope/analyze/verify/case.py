"""A capture laid out for diagnosis: each decode step with its text and the step before it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from specscope.analyze.evidence.columns import Columns
from specscope.analyze.evidence.visits import Visit
from specscope.analyze.findings import Finding, Reference
from specscope.analyze.verify.trial import Trial
from specscope.plans.plan import TreePlan, read_plan
from specscope.trace.history.history import History
from specscope.trace.record.params import SamplingParams
from specscope.trace.record.records import FinalKind, Outcome, RequestStep, Verdict
from specscope.trace.record.tree import DraftTree


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
    def tried_last(self) -> tuple[int, ...]:
        """The children of the last node at which any was tried, in the order of their trials."""
        tried = np.flatnonzero(self.verdict.outcome != Outcome.UNTRIED)
        parents = self.tree.parent[tried]
        return tuple(tried[parents == parents[-1]].tolist()) if len(tried) else ()

    @property
    def rejected_last(self) -> tuple[int, ...]:
        """The rejected children at whose place the final token was recovered; empty where it was not."""
        last = self.tried_last if self.verdict.kind is FinalKind.RECOVERED else ()
        return last if all(self.verdict.outcome[node] == Outcome.REJECTED for node in last) else ()

    def reference(self, node: int | None = None) -> Reference:
        """Where to look."""
        return self.visit.reference(node)

    def token_after(self, depth: int) -> int | None:
        """The text's token at a depth below the root, the first at 1; None past its end."""
        place = self.after + depth - 1
        return self.text[place] if 0 <= place < len(self.text) else None


@dataclass(frozen=True)
class Case:
    """All that is known about a run."""

    history: History
    trial: Trial  # verify's

    @property
    def evidence(self) -> Columns:
        """The decode steps as arrays: what `Finding.wrong` numbers."""
        return self.trial.evidence

    @property
    def visits(self) -> Sequence[Visit]:
        """Every step of every request, prefill chunks too: what `Finding.wrong` of request steps numbers."""
        return self.trial.evidence.every

    @cached_property
    def steps(self) -> tuple[Step, ...]:
        """Decode steps whose outcome was judged and not forced, in the engine's order."""
        c, texts, made = self.evidence, self.evidence.texts, list[Step]()
        whole = [texts.text[begin:end].tolist() for begin, end in zip(texts.begins, texts.ends, strict=True)]
        after = texts.behind - texts.begins[texts.request]
        for place, (visit, verdict) in enumerate(zip(c.visits, c.verdicts, strict=True)):
            last = made[c.before[place]] if c.before[place] >= 0 else None
            made.append(Step(visit, verdict, visit.params, whole[texts.request[place]], int(after[place]), last))
        return tuple(step for step in made if not len(step.verdict.forced))

    @cached_property
    def checks(self) -> dict[str, Finding]:
        """The checks of verify, by name."""
        return {check.name: check for check in self.trial.checks}

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
