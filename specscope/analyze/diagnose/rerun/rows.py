"""What a model says at the parents of some steps: rows of logits to compare with what was recorded there."""

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
    """A step with the model's logits after the root and each node that has children or ends the accepted path."""

    step: Step
    judged: AuditedStep
    contexts: Contexts
    logits: dict[int, Tensor]  # [V] by node


Rows = Callable[[Case, Sequence[Step]], list[Asked]]


def differing(audit: Audit, names: Sequence[str], limit: int) -> list[Key]:
    """Some steps at which one of these quantities differs, spread over the run."""
    places: dict[Key, None] = {}
    for name in names:
        finding = audit.finding(name)
        if finding is not None:
            pairs = zip(finding.items, finding.differs, strict=True)
            places.update({(item.request, item.index): None for item, wrong in pairs if wrong})
    keys = list(places)
    return keys[:: max(1, len(keys) // limit)][:limit]


def together(case: Case, keys: Iterable[Key]) -> list[Step]:
    """The steps of all requests in the same engine steps as these."""
    wanted = set(keys)
    numbers = {step.visit.record.step for step in case.steps if step.key in wanted}
    return [step for step in case.steps if step.visit.record.step in numbers]


def around(case: Case, keys: Iterable[Key]) -> list[Step]:
    """The same, and the step before each of these."""
    wanted = set(keys)
    beside = together(case, wanted)
    before = [step.last for step in beside if step.last is not None and step.key in wanted]
    return list({step.key: step for step in (*beside, *before)}.values())


def of_model(model: Causal) -> Rows:
    """The rows of a causal language model."""

    def rows(case: Case, steps: Sequence[Step]) -> list[Asked]:
        asked = []
        for by_index, contexts in _contexts(case, steps):
            by_row: dict[int, Tensor] = {}
            for (numbers, logits), _ in model.rows(contexts):
                by_row.update(zip(numbers, logits.cpu(), strict=True))
            for judged in contexts.steps:
                logits_of = {node: by_row[row] for node, row in judged.rows.items() if row in by_row}
                asked.append(Asked(by_index[judged.part.index], judged, contexts, logits_of))
        return asked

    return rows


def of_head(head: Head, target: Causal) -> Rows:
    """The rows of an EAGLE head over the target's true features."""

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
            by_node: dict[tuple[int, int], Tensor] = {}
            for some, logits in head.rows(contexts, features.cpu(), wanted):
                by_node.update({(id(judged), node): row for (judged, node), row in zip(some, logits, strict=True)})
            for judged in contexts.steps:
                logits_of = {node: by_node[id(judged), node] for node in judged.rows if (id(judged), node) in by_node}
                asked.append(Asked(by_index[judged.part.index], judged, contexts, logits_of))
        return asked

    return rows


def _contexts(case: Case, steps: Sequence[Step]) -> Iterable[tuple[dict[int, Step], Contexts]]:
    """For each request its steps by their own numbers, and what a model must be fed for them."""
    by_request: dict[str, dict[int, Step]] = defaultdict(dict)
    for step in steps:
        by_request[step.request][step.part.index] = step
    for name, by_index in by_request.items():
        request = case.history.requests[name]
        places = [place for place, part in enumerate(request.steps) if part.index in by_index]
        contexts = contexts_of(request, places, step_numbers(case.history, name), case.history.run)
        if contexts is not None and contexts.steps:
            yield by_index, contexts
