"""vLLM's own forwards beside the references: the first operation that differs, of the target and of the drafter."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from specscope.analyze.audit.options import ModelSource
from specscope.analyze.locate.model.reference import ModelReference
from specscope.measure.locate.inside_vllm import compare
from specscope.measure.locate.inside_vllm.fed import Fed, FedText, fed_rows, joined
from specscope.measure.locate.inside_vllm.references import HeadText, NamedHead, over_text
from specscope.measure.locate.inside_vllm.sheet import ComparisonSheet
from specscope.measure.locate.inside_vllm.tapped import DRAFTER, TARGET, Tapped
from specscope.plans.heads import runs_head
from specscope.trace.history.history import History
from specscope.trace.record.notes import model_part
from specscope.trace.record.params import SamplingParams
from specscope.trace.record.records import RunInfo

HEAD_SLACK = 4.0  # each pass of a head is fed what the one before it rounded
Report = Callable[[str, int, int], None]


@dataclass
class Sheets:
    """What was compared of a run."""

    target: ComparisonSheet = field(default_factory=ComparisonSheet)
    drafter: ComparisonSheet = field(default_factory=ComparisonSheet)
    left_out: list[str] = field(default_factory=list)

    def of(self, who: str) -> ComparisonSheet:
        """A model's."""
        return self.target if who == TARGET else self.drafter


@dataclass
class WalkedModels:
    """The references of a run."""

    target: ModelReference
    head: NamedHead | None = None
    draft: ModelReference | None = None
    wanted: set[str] = field(default_factory=set)
    samples_drafts: bool = False  # of requests that are sampled

    @staticmethod
    def load(run: RunInfo, target: ModelSource, draft: ModelSource | None) -> WalkedModels:
        """Raises UserError."""
        sampled = run.speculation.get("draft_sample_method") == "probabilistic"
        models = WalkedModels(ModelReference(target), samples_drafts=sampled)
        if draft is not None and runs_head(model_part(run.drafter)):
            models.head = NamedHead(draft, models.target.causal.model)
        elif draft is not None:
            models.draft = ModelReference(draft)
        return models


def compare_all(tapped: Tapped, history: History, models: WalkedModels, report: Report) -> Sheets:
    """Every request that vLLM ran again."""
    sheets = Sheets()
    joined(tapped)
    models.wanted = {name for made in tapped.forwards for name in made.tensors}
    numbers = [record.step for record in history.steps]
    requests = list(history.requests.values())
    for done, request in enumerate(requests):
        report("comparing", done, len(requests))
        text = FedText.of(request, [numbers[place] for place in request.engine_steps])
        if text is not None and request.info is not None:
            _request(tapped, text, request.info.params, models, sheets)
    if tapped.is_full:
        sheets.left_out.append("The taps were full: what vLLM computed later was not compared.")
    unread = sorted({made.unread for made in tapped.forwards if made.unread})
    sheets.left_out += [f"The cache was not read: {why}." for why in unread]
    return sheets


def _request(tapped: Tapped, text: FedText, params: SamplingParams, models: WalkedModels, sheets: Sheets) -> None:
    fed = fed_rows(tapped, text, shift=0 if models.head is None else 1)
    right = over_text(models.target, text.tokens, models.wanted)
    allowed = max(models.target.allowed(text.tokens).values())
    sizes = tapped.sizes.get(TARGET, {})
    is_plain = params.temperature == 0 and _is_plain(params)
    keys, values = _cache_of(right)
    for own in (each for each in fed if each.forward.who == TARGET):
        rows = own.same.nonzero().flatten()
        cells = [*compare.inputs(tapped, own)]
        cells += compare.operations(own, right, own.positions[rows], allowed, sizes, rows)
        if len(rows):
            end = int(own.positions[rows[-1]]) + 1
            cells += compare.cache(own, _upto(keys, end), _upto(values, end), text.tokens, allowed)
        logit_rows, kept = compare.target_logit_rows(own)
        cells += compare.logits(own, logit_rows, right["lm_head"][own.positions[kept]], kept, None, allowed)
        if is_plain and len(kept):
            cells += compare.choices(own, text, logit_rows, kept)
        elif len(kept) and params.temperature > 0 and _is_plain(params):
            cells += compare.outside(own, text, right["lm_head"][own.positions[kept]], kept, params)
        cells += compare.parameters(own)
        sheets.target.add(own, iter(cells))
    drafted = [each for each in fed if each.forward.who == DRAFTER]
    is_greedy = params.temperature == 0 or not models.samples_drafts
    if drafted and models.head is not None:
        _head(tapped, text, fed, models.head, allowed * HEAD_SLACK, is_greedy, sheets)
    elif drafted and models.draft is not None:
        _draft_model(tapped, text, drafted, models, is_greedy, sheets)


def _is_plain(params: SamplingParams) -> bool:
    """Whether nothing but the logits decides."""
    return (
        params.repetition_penalty == 1
        and not params.presence_penalty
        and not params.frequency_penalty
        and not params.logit_bias
        and not params.min_tokens
        and params.structured_outputs is None
    )


def _cache_of(named: dict[str, Tensor]) -> tuple[dict[int, Tensor], dict[int, Tensor]]:
    """Keys and values along a text, by layer."""
    found = tuple(
        {int(name.split(".")[1]): rows for name, rows in named.items() if name.endswith(f"self_attn.{kind}")}
        for kind in ("key", "value")
    )
    return {k: x for k, x in found[0].items() if k in found[1]}, found[1]


def _upto(rows: dict[int, Tensor], end: int) -> dict[int, Tensor]:
    return {layer: x[:end] for layer, x in rows.items()}


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


def _head(
    tapped: Tapped, text: FedText, fed: list[Fed], head: NamedHead, allowed: float, is_greedy: bool, sheets: Sheets
) -> None:
    features = features_of(fed, head.layers)
    if features is None:
        return
    along = HeadText.of(head, text.tokens, features)
    keys, values = _cache_of(along.named)
    sizes, ids = tapped.sizes.get(DRAFTER, {}), head.tokens
    passes: dict[int, list[Fed]] = defaultdict(list)
    for own in fed:
        if own.forward.who == DRAFTER:
            passes[own.forward.step].append(own)
    for own_passes in passes.values():
        own_passes.sort(key=lambda own: own.forward.number)
        first = own_passes[0]
        if first.forward.number != 0:
            continue
        drafted = own_passes[-1].forward.tensors.get("drafted")
        pair = int(first.positions[first.last])
        rows = (first.positions < len(along.hidden)).nonzero().flatten()
        _with_features(first)
        cells = [*compare.inputs(tapped, first)]
        cells += compare.operations(first, along.named, first.positions[rows], allowed, sizes, rows)
        cells += compare.cache(first, _upto(keys, pair + 1), _upto(values, pair + 1), text.tokens[1:], allowed)
        batch, last = torch.tensor([first.batch]), torch.tensor([first.last])
        if pair < len(along.hidden) and first.ended:
            cells += compare.logits(first, batch, along.named["lm_head"][[pair]], last, ids, allowed)
        cells += compare.drafts(first, drafted, ids) if is_greedy else ()
        sheets.drafter.add(first, iter(cells))
        later = own_passes[1:]
        if not later or pair >= len(along.hidden):
            continue
        branch = along.branch(pair, [int(own.tokens[0]) for own in later])
        for own, named in zip(later, branch, strict=True):
            zero = torch.tensor([0])
            cells = [*compare.inputs(tapped, own), *compare.operations(own, named, zero, allowed, sizes)]
            own_keys = {layer: named[f"layers.{layer}.keys"] for layer in keys}
            own_values = {layer: named[f"layers.{layer}.values"] for layer in values}
            cells += compare.cache(own, own_keys, own_values, text.tokens[1:], allowed)
            cells += compare.logits(own, torch.tensor([own.batch]), named["lm_head"], zero, ids, allowed)
            cells += compare.drafts(own, drafted, ids) if is_greedy else ()
            sheets.drafter.add(own, iter(cells))


def _with_features(fed: Fed) -> None:
    """What the head combines, by one name whichever norm comes first."""
    tensors = fed.forward.tensors
    parts = [tensors[name] for name in sorted(tensors) if name.startswith("fc_norm.") and name.endswith(":in")]
    for rows in (tensors.get("input_norm:in"), torch.cat(parts, -1) if parts else None, tensors.get("fc:in")):
        if rows is not None and "features" not in tensors:
            tensors["features"] = rows


def _draft_model(
    tapped: Tapped, text: FedText, fed: list[Fed], models: WalkedModels, is_greedy: bool, sheets: Sheets
) -> None:
    reference = models.draft
    assert reference is not None
    allowed = max(reference.allowed(text.tokens).values())
    right = over_text(reference, text.tokens, models.wanted)
    keys, values = _cache_of(right)
    sizes = tapped.sizes.get(DRAFTER, {})
    drafted: dict[int, Tensor] = {
        own.forward.step: own.forward.tensors["drafted"] for own in fed if "drafted" in own.forward.tensors
    }
    paths: dict[int, list[int]] = {}  # of each step: the tokens of its chain's passes so far
    for own in fed:
        cells = [*compare.inputs(tapped, own)]
        step, batch = own.forward.step, torch.tensor([own.batch])
        if own.forward.number == 0:
            paths[step] = [*text.tokens[: int(own.positions[own.last]) + 1]]
            named, index, own_keys, own_values = right, own.positions, keys, values
        else:
            paths[step].append(int(own.tokens[0]))
            named = over_text(reference, paths[step], models.wanted)
            index, (own_keys, own_values) = own.positions, _cache_of(named)
        end = int(own.positions[own.last]) + 1
        cells += compare.operations(own, named, index, allowed, sizes)
        cells += compare.cache(own, _upto(own_keys, end), _upto(own_values, end), paths[step], allowed)
        if own.ended:
            last = torch.tensor([own.last])
            cells += compare.logits(own, batch, named["lm_head"][own.positions[last]], last, None, allowed)
            if is_greedy:
                cells += compare.drafts(own, drafted.get(step), None)
        sheets.drafter.add(own, iter(cells))
