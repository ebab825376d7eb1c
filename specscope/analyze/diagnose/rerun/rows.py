"""What a model says at the parents of some steps: rows of logits to hold against what was recorded there."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from torch import Tensor

from specscope.analyze.audit.audit import Audit, step_numbers
from specscope.analyze.audit.contexts import AuditedStep, Contexts, contexts_of
from specscope.analyze.audit.model.causal import Causal
from specscope.analyze.audit.model.head import Head
from specscope.analyze.diagnose.case import Case, Step

Key = tuple[str, int]  # a request, its step


@dataclass(frozen=True)
class Asked:
    """A step with the model's logits behind the root and each node that has children or ends the accepted path."""

    step: Step
    judged: AuditedStep
    contexts: Contexts
    logits: dict[int, Tensor]  # [V] by node


Rows = Callable[[Case, Sequence[Step]], list[Asked]]


def differing(audit: Audit, names: Sequence[str], most: int) -> list[Key]:
    """Some steps at which one of these quantities differs, spread over the run."""
    found: dict[Key, None] = {}
    for name in names:
        finding = audit.finding(name)
        if finding is not None:
            pairs = zip(finding.items, finding.differs, strict=True)
            found.update({(item.request, item.index): None for item, wrong in pairs if wrong})
    keys = list(found)
    return keys[:: max(1, len(keys) // most)][:most]


def together(case: Case, keys: Iterable[Key]) -> list[Step]:
    """All requests' steps of the engine steps in which these were."""
    wanted = set(keys)
    numbers = {step.visit.record.step for step in case.steps if (step.request, step.part.index) in wanted}
    return [step for step in case.steps if step.visit.record.step in numbers]


def around(case: Case, keys: Iterable[Key]) -> list[Step]:
    """The same, and each request's step before."""
    wanted = set(keys)
    beside = together(case, wanted)
    before = [step.last for step in beside if step.last is not None and (step.request, step.part.index) in wanted]
    places = {(step.request, step.part.index): step for step in (*beside, *before)}
    return list(places.values())


def of_model(model: Causal) -> Rows:
    """The rows of a causal language model."""

    def rows(case: Case, steps: Sequence[Step]) -> list[Asked]:
        asked = []
        for by_index, contexts in _contexts(case, steps):
            at: dict[int, Tensor] = {}
            for (numbers, logits), _ in model.rows(contexts):
                at.update(zip(numbers, logits.cpu(), strict=True))
            for judged in contexts.steps:
                logits_of = {node: at[row] for node, row in judged.rows.items() if row in at}
                asked.append(Asked(by_index[judged.part.index], judged, contexts, logits_of))
        return asked

    return rows


def of_head(head: Head, target: Causal) -> Rows:
    """Those of an EAGLE head over the target's true features."""

    def rows(case: Case, steps: Sequence[Step]) -> list[Asked]:
        asked = []
        for by_index, contexts in _contexts(case, steps):
            _, features = target.alone(contexts.text, head.layers)
            assert features is not None
            wanted = [
                (judged, node)
                for judged in contexts.steps
                for node in sorted(judged.rows)
                if judged.part.tree.children(node)
            ]
            at: dict[tuple[int, int], Tensor] = {}
            for some, logits in head.rows(contexts, features.cpu(), wanted):
                at.update({(id(judged), node): row for (judged, node), row in zip(some, logits, strict=True)})
            for judged in contexts.steps:
                logits_of = {node: at[id(judged), node] for node in judged.rows if (id(judged), node) in at}
                asked.append(Asked(by_index[judged.part.index], judged, contexts, logits_of))
        return asked

    return rows


def _contexts(case: Case, steps: Sequence[Step]) -> Iterable[tuple[dict[int, Step], Contexts]]:
    """Request by request: its steps by their own numbers, and what a model must be fed for them."""
    own: dict[str, dict[int, Step]] = defaultdict(dict)
    for step in steps:
        own[step.request][step.part.index] = step
    for name, by_index in own.items():
        request = case.history.requests[name]
        places = [place for place, part in enumerate(request.steps) if part.index in by_index]
        contexts = contexts_of(request, places, step_numbers(case.history, name), case.history.run)
        if contexts is not None and contexts.steps:
            yield by_index, contexts
