"""vLLM's own forwards beside the references: the first operation that differs, of the target and of the drafter."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from specscope.analyze.audit.model.head import Head
from specscope.analyze.audit.options import ModelSource
from specscope.analyze.locate.located import Stage
from specscope.analyze.locate.model.head_passes import HeadPasses
from specscope.analyze.locate.model.reference import ModelPasses, ModelReference, ReferencePass
from specscope.measure.locate.inside_vllm import compare
from specscope.measure.locate.inside_vllm.fed import Fed, FedText, fed_rows
from specscope.measure.locate.inside_vllm.sheet import ComparisonSheet
from specscope.measure.locate.inside_vllm.tapped import DRAFTER, TARGET, Tapped
from specscope.plans.heads import runs_head
from specscope.trace.history.history import History
from specscope.trace.record.notes import model_part
from specscope.trace.record.params import SamplingParams
from specscope.trace.record.records import RunInfo
from specscope.trace.record.tree import ROOT

HEAD_SLACK = 4.0  # each pass of a head is fed what the one before it rounded
Report = Callable[[str, int, int], None]


@dataclass
class WalkedModels:
    """The references of a run."""

    target: ModelReference
    head: Head | None = None
    draft: ModelReference | None = None
    samples_drafts: bool = False  # of requests that are sampled

    @staticmethod
    def load(run: RunInfo, target: ModelSource, draft: ModelSource | None) -> WalkedModels:
        """Raises UserError."""
        sampled = run.speculation.get("draft_sample_method") == "probabilistic"
        models = WalkedModels(ModelReference(target), samples_drafts=sampled)
        if draft is not None and runs_head(model_part(run.drafter)):
            models.head = Head(draft, models.target.causal.model)
        elif draft is not None:
            models.draft = ModelReference(draft)
        return models


@dataclass
class ComparedForwards:
    """What was compared of a run."""

    tapped: Tapped
    models: WalkedModels
    target: ComparisonSheet = field(default_factory=lambda: ComparisonSheet(Stage.TARGET))
    drafter: ComparisonSheet = field(default_factory=lambda: ComparisonSheet(Stage.DRAFTER))
    left_out: list[str] = field(default_factory=list)

    @staticmethod
    def of(tapped: Tapped, history: History, models: WalkedModels, report: Report) -> ComparedForwards:
        """Every request that vLLM ran again."""
        made = ComparedForwards(tapped, models)
        numbers, requests = [record.step for record in history.steps], list(history.requests.values())
        for done, request in enumerate(requests):
            report("comparing", done, len(requests))
            text = FedText.of(request, [numbers[place] for place in request.engine_steps])
            if text is not None and request.info is not None:
                made._request(text, request.info.params)
        if tapped.is_full:
            made.left_out.append("The taps were full: what vLLM computed later was not compared.")
        unread = sorted({each.unread for each in tapped.forwards if each.unread})
        made.left_out += [f"The cache was not read: {why}." for why in unread]
        return made

    @cached_property
    def wanted(self) -> set[str]:
        """The operations that were tapped."""
        names = {name for made in self.tapped.forwards for name in made.tensors}
        return names | {name.rpartition(".")[0] for name in names if " read." in name}

    def _request(self, text: FedText, params: SamplingParams) -> None:
        tapped, models = self.tapped, self.models
        fed = fed_rows(tapped, text, shift=0 if models.head is None else 1)
        allowed = max(models.target.allowed(text.tokens).values())
        passes, sizes = ModelPasses(models.target, text.tokens, self.wanted), tapped.sizes.get(TARGET, {})
        for own in (each for each in fed if each.forward.who == TARGET):
            rows = own.same.nonzero().flatten()
            pairs, (logit_rows, kept) = [*compare.inputs(tapped, own)], compare.target_logit_rows(own)
            if len(rows):
                start = int(own.positions[0])
                right = _named(passes.feed(start, start + len(rows), wanted=kept.tolist()))
                pairs += compare.computed(own, right, rows, sizes)
                pairs += compare.logits(own, logit_rows, right.taps["lm_head"], kept, None)
                pairs += compare.choices(own, text, logit_rows, kept, params, right.taps["lm_head"])
            self.target.add(own, [*pairs, *compare.parameters(own)], allowed)
        if models.head is not None or models.draft is not None:
            self._drafted(text, fed, allowed, is_greedy=params.temperature == 0 or not models.samples_drafts)

    def _drafted(self, text: FedText, fed: list[Fed], allowed: float, *, is_greedy: bool) -> None:
        """The drafter's passes: the first of each step is over committed rows, each later one over one token more."""
        head, draft, ids, features = self.models.head, self.models.draft, None, None
        passes: ModelPasses | HeadPasses
        if head is not None:
            if (features := features_of(fed, head.layers)) is None:
                return
            passes, allowed, ids = HeadPasses(head, text.tokens, features), allowed * HEAD_SLACK, head.tokens
            end = min(len(features), len(text.tokens) - 1)
        else:
            assert draft is not None
            passes, allowed = ModelPasses(draft, text.tokens, self.wanted), max(draft.allowed(text.tokens).values())
            end = len(text.tokens)
        step, known = -1, False  # whether all that the step's first pass was fed is known
        for own in (each for each in fed if each.forward.who == DRAFTER):
            made, last = own.forward, int(own.positions[own.last])
            start, stop = int(own.positions[0]), min(last + 1, end)
            if made.number == 0:
                step, root, known = made.step, last, last < end
                _with_features(own)
            elif made.step != step or not known:
                continue
            pairs, node = [*compare.inputs(self.tapped, own)], made.number - 1
            grown = [node], own.tokens.tolist(), [node - 1 if node else ROOT]
            if made.number or start < stop:
                if made.number:
                    right = _named(passes.feed(root + 1, root + 1, *grown, [0]))
                else:
                    due = passes.feed(start, stop, wanted=[stop - start - 1])
                    right = _named(due, None if features is None else features[start:stop])
                sizes = self.tapped.sizes.get(DRAFTER, {})
                pairs += compare.computed(own, right, torch.arange(len(right.rows)), sizes)
                if own.ended and known:
                    at = torch.tensor([own.last])
                    pairs += compare.logits(own, torch.tensor([own.batch]), right.taps["lm_head"][-1:], at, ids)
            if is_greedy:
                pairs += compare.drafts(own, self.tapped.drafted.get(made.step), ids)
            self.drafter.add(own, pairs, allowed)


def _named(right: ReferencePass | None, features: Tensor | None = None) -> ReferencePass:
    """A reference's pass by vLLM's names of operations. `features`: what a head's first pass is fed."""
    assert right is not None
    named = {name.replace("midlayer", "layers.0"): x.flatten(1) for name, x in right.taps.items()}
    if features is not None:
        named["features"] = features
    for name, theirs in (("embedding", "embed_tokens"), ("state", "fed back"), ("lm_head", "d2t")):
        named |= {name: named[theirs]} if theirs in named else {}
    return replace(right, taps=named)


def features_of(fed: list[Fed], layers: tuple[Any, ...]) -> Tensor | None:
    """[L, F] the features that vLLM's target gave along a text: of a row's latest forward, as far as there are any."""
    rows: dict[int, Tensor] = {}
    for own in (each for each in fed if each.forward.who == TARGET):
        names = [
            "norm" if layer == "final" else "embedding" if not layer else f"layers.{layer - 1}" for layer in layers
        ]
        if any(name not in own.forward.tensors for name in names):
            return None
        joint = torch.cat([own.forward.tensors[name].float() for name in names], dim=-1)
        for row in own.same.nonzero().flatten().tolist():
            rows[int(own.positions[row])] = joint[int(own.rows[row])]
    along = list[Tensor]()
    while len(along) in rows:
        along.append(rows[len(along)])
    return torch.stack(along) if along else None


def _with_features(fed: Fed) -> None:
    """What the head combines, by one name whichever norm comes first."""
    tensors = fed.forward.tensors
    parts = [tensors[name] for name in sorted(tensors) if name.startswith("fc_norm.") and name.endswith(":in")]
    for rows in (tensors.get("input_norm:in"), torch.cat(parts, -1) if parts else None, tensors.get("fc:in")):
        if rows is not None and "features" not in tensors:
            tensors["features"] = rows
