"""What a model says at the parents of some steps: rows of logits to hold against what was recorded there."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import Tensor

from specscope.analyze.audit.audit import Audit, step_numbers
from specscope.analyze.audit.contexts import Contexts, Judged, contexts_of
from specscope.analyze.audit.model.causal import Causal
from specscope.analyze.diagnose.case import Case, Step

Key = tuple[str, int]  # a request, its step


@dataclass(frozen=True)
class Asked:
    """A step with the model's logits behind the root and each node that has children or ends the accepted path."""

    step: Step
    judged: Judged
    contexts: Contexts
    logits: dict[int, Tensor]  # [V] by node


def differing(audit: Audit, names: Sequence[str], most: int) -> list[Key]:
    """Some steps at which one of these quantities differs, spread over the run."""
    found: dict[Key, None] = {}
    for name in names:
        finding = audit.finding(name)
        if finding is not None:
            pairs = zip(finding.items, finding.differs, strict=True)
            found.update({(one.request, one.index): None for one, wrong in pairs if wrong})
    keys = list(found)
    return keys[:: max(1, len(keys) // most)][:most]


def together(case: Case, keys: Iterable[Key]) -> list[Step]:
    """All requests' steps of the engine steps in which these were."""
    wanted = set(keys)
    numbers = {step.visit.record.step for step in case.steps if (step.request, step.part.index) in wanted}
    return [step for step in case.steps if step.visit.record.step in numbers]


def ask(model: Causal, case: Case, steps: Sequence[Step]) -> list[Asked]:
    """The model's rows at these steps, request by request."""
    own: dict[str, dict[int, Step]] = defaultdict(dict)
    for step in steps:
        own[step.request][step.part.index] = step
    found = []
    for name, by_index in own.items():
        request = case.history.requests[name]
        places = [place for place, part in enumerate(request.steps) if part.index in by_index]
        contexts = contexts_of(request, places, step_numbers(case.history, name))
        if contexts is None:
            continue
        rows: dict[int, Tensor] = {}
        for (numbers, logits), _ in model.rows(contexts):
            rows.update(zip(numbers, logits.cpu(), strict=True))
        for judged in contexts.steps:
            logits_of = {node: rows[row] for node, row in judged.rows.items() if row in rows}
            found.append(Asked(by_index[judged.part.index], judged, contexts, logits_of))
    return found
