"""What a model says at the parents of some steps, beside what was recorded there; each model is loaded once."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from specscope.analyze.audit.audit import Audit
from specscope.analyze.audit.contexts import AuditedStep, Contexts, contexts_of
from specscope.analyze.audit.model.causal import Causal
from specscope.analyze.audit.model.head import Head
from specscope.analyze.audit.model.judge import AskedRows, by_ask, drafted_by_model
from specscope.analyze.audit.model.run import head_of
from specscope.analyze.audit.options import Options
from specscope.analyze.verify.trial import Case, Step
from specscope.plans.kinds import runs_head
from specscope.trace.record.tree import Floats, Ints

Key = tuple[str, int]  # a request, its step


class Models:
    """The models of one audit, in float32, each loaded once."""

    def __init__(self, options: Options) -> None:
        self.options = options

    @cached_property
    def target(self) -> Causal:
        return Causal(self.options.target, "float32")

    @cached_property
    def draft(self) -> Causal:
        """The drafter, where it is a causal language model."""
        assert self.options.draft is not None
        return Causal(self.options.draft, "float32")

    @cached_property
    def head(self) -> Head:
        """The drafter, where it is a head."""
        assert self.options.draft is not None
        return head_of(self.options.draft, self.target.model).to(torch.float32)

    def drafter(self, case: Case) -> Head | Causal | None:
        """The drafter of a run; None where it is no model."""
        run = case.history.run
        if self.options.draft is None or run is None:
            return None
        return self.head if runs_head(run.drafter) else self.draft


@dataclass(frozen=True)
class Asked:
    """A step with the model's logits after the root and each node that has children or ends the accepted path."""

    step: Step
    judged: AuditedStep
    contexts: Contexts
    logits: dict[int, Tensor]  # [V] by node


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


def around(case: Case, keys: Iterable[Key]) -> list[Step]:
    """The steps of all requests in the same engine steps as these, and the step before each of these."""
    wanted = set(keys)
    numbers = {step.visit.record.step for step in case.steps if step.key in wanted}
    beside = [step for step in case.steps if step.visit.record.step in numbers]
    before = [step.last for step in beside if step.last is not None and step.key in wanted]
    return list({step.key: step for step in (*beside, *before)}.values())


def rows_of(case: Case, models: Models, what: str, steps: Sequence[Step]) -> list[Asked]:
    """The rows of the target ("p", "raw p"), or of the drafter where that is a model; a head's over true features."""
    model = models.target if what.endswith("p") else models.drafter(case)
    by_request = defaultdict[str, dict[int, Step]](dict)
    if model is None:
        return []
    for step in steps:
        by_request[step.request][step.part.index] = step
    asked = []
    for name, by_index in by_request.items():
        parts = enumerate(case.history.requests[name].steps)
        contexts = contexts_of(case.history, name, [place for place, part in parts if part.index in by_index])
        if contexts is None or not contexts.steps:
            continue
        logits: dict[int, dict[int, Tensor]] = {step.part.index: {} for step in contexts.steps}
        for some, rows in _asked_rows(model, models.target, contexts):
            for (judged, node), row in zip(some, rows, strict=True):
                logits[judged.part.index][node] = row
        asked += [Asked(by_index[s.part.index], s, contexts, logits[s.part.index]) for s in contexts.steps]
    return asked


def _asked_rows(model: Head | Causal, target: Causal, contexts: Contexts) -> Iterator[AskedRows]:
    """What a model says wherever a step has children or ends; a head where it has children."""
    if isinstance(model, Causal):
        return by_ask((rows for rows, _ in model.rows(contexts)), contexts.asks())
    features = target.alone(contexts.text, model.layers)[1]
    assert features is not None
    every = (ask for asks in contexts.asks().values() for ask in asks)
    return model.rows(contexts, features, [(step, node) for step, node in every if step.part.tree.children(node)])


def recorded(step: Step, *, drafter: bool) -> list[tuple[int, Ints, Floats | None]]:
    """(parent, its likeliest tokens, their raw probabilities) of the target or the drafter, where they are recorded.

    Of a drafter that does not tell them, the likeliest tokens are those that it drafted because they are: with their
    probabilities, where these are recorded, else None.
    """
    parents, notes = step.part.parents, step.part.notes
    if parents is not None:
        tokens, probs = (parents.draft_top, parents.draft_top_p) if drafter else (parents.top, parents.top_p)
        if tokens.shape[1]:
            return [(int(node), tokens[index], probs[index]) for index, node in enumerate(parents.node.tolist())]
    if not drafter or step.is_sampled:
        return []
    by_parent = [(parent, drafted_by_model(step.part, parent)) for parent in sorted({*step.tree.parent.tolist()})]
    return [
        (parent, step.tree.token[nodes], None if notes is None else notes.prob[nodes])
        for parent, nodes in by_parent
        if nodes
    ]
