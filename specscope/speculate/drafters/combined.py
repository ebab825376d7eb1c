"""suffix+eagle, ngram+eagle and the like: one tree a step from the request's text and from a model.

The text's continuations and the model's tree are merged by their paths. What the sources say of a candidate becomes the
chance that it is accepted, by what became of the request's earlier candidates (sizing/acceptance.py). The likeliest
paths are the tree. Where the text is so sure that the model would bring less than its passes cost, the model does not
run: its next pass is fed what it missed. Deterministic: q is a point mass, whatever a node's source.

Where a sampled request with a budget has no text to speak of, the model's draws alone are the tree: they are accepted
more often than as many of its likeliest tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from torch import Tensor

from specscope.speculate.drafters.base import NO_DRAFT, Context, Draft, Drafter
from specscope.speculate.drafters.candidates import Candidates
from specscope.speculate.drafters.model_drafter import ModelDrafter
from specscope.speculate.drafters.ngram import NgramDrafter
from specscope.speculate.drafters.suffix import SuffixDrafter
from specscope.speculate.sizing.acceptance import PRIOR, CandidateHistory, Doubles
from specscope.speculate.sizing.budget import Budget, share_out
from specscope.trace.plan import DynamicPlan
from specscope.trace.record.method import MODEL, MethodNotes
from specscope.trace.record.records import Phase, Verdict
from specscope.trace.record.tree import DraftTree

PASS = 0.1  # of a plain step: what a pass of the model is taken to cost
PASSES = 2  # of the model that bring that
GAIN = 0.8  # tokens that the model is expected to bring where the text's first token is wrong
DRAWS = 0.35  # a text whose first token comes less often leaves a sampled request to the model's draws
KEPT = 256  # requests that ended or lost their place, whose candidates are kept for when they come back


@dataclass
class _Request:
    """What the drafter keeps of a request."""

    acceptance: CandidateHistory = field(default_factory=CandidateHistory)
    candidates: Candidates | None = None  # of its last draft
    drafted: bool = False  # whether the model drafted in that step

    def before(self, context: Context) -> CandidateHistory:
        """What was counted before this step."""
        if len(context.tokens) == context.prompt_len:  # its first step, perhaps under a name that was another's
            self.acceptance = CandidateHistory()
        self.acceptance.cut(context.position)
        return self.acceptance


class CombinedDrafter:
    """Drafts from the text and with a model."""

    def __init__(self, text: SuffixDrafter | NgramDrafter, model: ModelDrafter, plan: DynamicPlan) -> None:
        """`plan`: the largest tree. The model's own plan should keep all candidates: they are ranked here."""
        self.name = f"{text.name}+{model.name}"
        self.text, self.model, self.plan = text, model, plan
        self.max_nodes = plan.nodes
        self.max_depth = max(text.max_depth, model.max_depth)
        self.aux_layers = model.aux_layers
        self.passes: tuple[Phase, ...] = ()
        self._requests: dict[str, _Request] = {}

    def most_nodes(self, context: Context) -> int:
        """The sum of both parts' nodes, within the plan and the request's own budget."""
        budget = context.budget
        limit = self.max_nodes if budget is None else min(budget.nodes, self.max_nodes)
        of_model = self.model.most_nodes(context) if budget is None or budget.depth else 0
        return min(self.text.most_nodes(context) + of_model, limit)

    def propose(self, contexts: Sequence[Context]) -> list[Draft]:
        """One tree for each request, from both sources."""
        self.passes = ()
        texts = self.text.propose(contexts)
        known = [self._request(c).before(c) for c in contexts]
        alone = [
            Candidates.merge(text, NO_DRAFT, before, _beforehand(context)) if len(text.tree) else None
            for context, text, before in zip(contexts, texts, known, strict=True)
        ]
        asked = [not self._is_enough(*pair) for pair in zip(contexts, alone, strict=True)]
        draws = [wanted and _draws(c, text) for c, text, wanted in zip(contexts, alone, asked, strict=True)]
        models = [NO_DRAFT] * len(contexts)
        if any(asked):
            model_contexts = [
                self._of_model(c, draws=d) for c, d, wanted in zip(contexts, draws, asked, strict=True) if wanted
            ]
            drafts = iter(self.model.propose(model_contexts))
            models = [next(drafts) if wanted else NO_DRAFT for wanted in asked]
            self.passes = self.model.passes
        merged = [
            Candidates.merge(text, model, before, _beforehand(context))
            if len(model.tree) and model.sure is None
            else of_text
            for context, text, model, before, of_text in zip(contexts, texts, models, known, alone, strict=True)
        ]
        chosen = self._share(contexts, [None if m.sure is not None else f for m, f in zip(models, merged, strict=True)])
        return [self._join(*parts) for parts in zip(contexts, texts, models, merged, chosen, strict=True)]

    def _share(self, contexts: Sequence[Context], merged: Sequence[Candidates | None]) -> list[list[int]]:
        """The nodes of each request that are verified, the best first: all budgets decide together."""
        chosen: list[list[int]] = [[] for _ in contexts]
        adaptive, budgets, chances = list[int](), list[Budget](), list[Doubles]()
        for i, (context, candidates) in enumerate(zip(contexts, merged, strict=True)):
            if candidates is None:
                continue
            if context.budget is None:
                chosen[i] = candidates.best(min(candidates.worthy(), self.max_nodes))
                continue
            chosen[i] = candidates.best(min(context.budget.nodes, self.max_nodes))
            adaptive.append(i)
            budgets.append(context.budget)
            chances.append(np.array([candidates.chance[node] for node in chosen[i]]))
        for i, count in zip(adaptive, share_out(budgets, chances), strict=True):
            del chosen[i][count:]
        return chosen

    def _request(self, context: Context) -> _Request:
        request = self._requests.get(context.request)
        if request is None:
            request = self._requests[context.request] = _Request()
        return request

    def _of_model(self, context: Context, *, draws: bool) -> Context:
        """The context for the model. Its rows cost nothing, as its nodes are ranked here; draws have their price."""
        if context.budget is None or draws:
            return context
        return replace(context, budget=context.budget.with_free_rows(self.model.plan.max_nodes))

    def _is_enough(self, context: Context, alone: Candidates | None) -> bool:
        """Whether the model's passes would cost more than they bring, the text being so sure or the budget so small."""
        budget = context.budget
        if budget is not None and not budget.depth:
            return True
        if alone is None:
            return False
        if budget is not None:
            return bool((1 - alone.first) * GAIN < budget.passes[:PASSES].sum())
        return (1 - alone.first) * GAIN < PASS * self.model.max_depth * (1 + alone.expected)

    def _join(
        self, context: Context, text: Draft, model: Draft, candidates: Candidates | None, chosen: Sequence[int]
    ) -> Draft:
        request = self._requests[context.request]
        request.drafted, request.candidates = len(model.tree) > 0, candidates
        if model.sure is not None:
            method = MethodNotes(source=np.full(len(model.tree), MODEL, np.int32)) if len(model.tree) else None
            return replace(model, method=method, outcomes=() if candidates is None else candidates.outcomes)
        if candidates is None:
            return NO_DRAFT
        if not (chosen or request.drafted):
            return Draft(DraftTree.empty(), outcomes=candidates.outcomes)
        draft, behind = candidates.draft(chosen, text, model)
        draft = replace(draft, pruned=text.pruned, outcomes=candidates.outcomes)
        if not chosen:
            draft = replace(draft, method=None)  # nothing of the text is verified
        if request.drafted:  # the model's tree is the one that is verified now
            state = self.model.states[context.request]
            state.fed = np.where(behind >= 0, state.fed[behind], -1).astype(np.int32)
        return draft

    def commit(self, context: Context, tree: DraftTree, verdict: Verdict) -> None:
        """The model keeps what it ran of the accepted path; each candidate is counted by whether its token came."""
        known = self._requests[context.request]
        if known.drafted and len(tree):
            self.model.commit(context, tree, verdict)
        if known.candidates is not None:
            known.candidates.came([*tree.token[verdict.path].tolist(), verdict.token])
            known.acceptance.learn(context.position, known.candidates.outcomes)

    def observe(self, request: str, start: int, features: Tensor, tokens: Sequence[int]) -> None:
        """Passed on to the model."""
        self.model.observe(request, start, features, tokens)

    def rewind(self, request: str, tokens: int) -> None:
        """Rewind both. What was learnt is cut when the request drafts again."""
        self.text.rewind(request, tokens)
        self.model.rewind(request, tokens)

    def release(self, request: str) -> None:
        """Both forget the request. What was learnt stays for a while: the request may have lost its place alone."""
        self.text.release(request)
        self.model.release(request)
        if known := self._requests.pop(request, None):
            self._requests[request] = known  # the last one now
        idle = [name for name in self._requests if name not in self.model.states]
        for name in idle[: len(idle) - KEPT]:
            del self._requests[name]

    def fork(self, other: CombinedDrafter, request: str, name: str, position: int) -> None:
        """Begin with what another drafter knew of a request before its root was at `position`, under a new name."""
        if known := other._requests.get(request):
            self._requests[name] = _Request(known.acceptance.before(position))


def _draws(context: Context, alone: Candidates | None) -> bool:
    """Whether the model draws its nodes. `alone`: the text's candidates."""
    return context.budget is not None and bool(context.budget.siblings) and (alone is None or alone.first < DRAWS)


def _beforehand(context: Context) -> Sequence[float]:
    """What is known of each kind of candidate before anything is known of the request."""
    return PRIOR if context.budget is None else context.budget.beforehand


def model_of(drafter: Drafter) -> ModelDrafter | None:
    """The model that drafts, alone or beside a text; None where there is none."""
    part = drafter.model if isinstance(drafter, CombinedDrafter) else drafter
    return part if isinstance(part, ModelDrafter) else None
