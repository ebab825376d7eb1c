"""The target's walk: our engine over recorded steps beside plain transformers, to the first operation that differs.

Every row of the watched requests is compared at the border of every layer while the engine runs. Where a border
differs first, the layer is run again there and then with its operations tapped: the batch, the cache and whatever went
wrong are still as they were.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from specscope.analyze.audit.contexts import Contexts
from specscope.analyze.findings import Reference as Where
from specscope.analyze.locate.located import FedRow, Held, Stage
from specscope.analyze.locate.model.reference import Borders, ModelReference, decoder_layers
from specscope.analyze.locate.model.taps import relative
from specscope.analyze.locate.operations import operation
from specscope.measure.locate.drive import Drive
from specscope.measure.locate.layer_taps import LayerCall, LayerTaps, layer_again
from specscope.model.fast.decoder import FusedLayer
from specscope.model.kv_cache import BLOCK_SIZE
from specscope.trace.record.records import RequestStep
from specscope.trace.record.tree import ROOT

AMPLIFIED = 10.0  # by how much an operation may magnify what its input is off; 7 was seen in logits
MOST_AMPLIFIED = 30.0  # by how much rounding may grow beyond what is usual, over all layers
TARGET = Stage.TARGET


@dataclass(frozen=True)
class PartRows:
    """Rows of a step that are compared: where they lie in the batch and in the reference."""

    part: RequestStep
    where: Where
    given: Tensor  # int64 [R] rows among all that were fed, in the order of the requests
    reference: Tensor  # int64 [R] rows of the reference's tensors
    contexts: list[int]  # [R] rows of the contexts
    rows: tuple[FedRow, ...]
    fed: int  # rows that the part has in all


@dataclass
class FirstDifference:
    """Where the engine differs first. Filled by the watch."""

    at: PartRows
    name: str  # "embedding", "layers.3", "norm", "lm_head", "tokens", "positions"
    ours: Tensor
    right: Tensor
    held: Held
    before: list[Held]  # what agrees before it, in the same pass
    call: LayerCall | None = None  # of the layer behind whose border it is
    inner: LayerTaps | None = None  # that layer's operations
    slots: list[int] = field(default_factory=list)  # of the part's request, by position; then of its tree's nodes
    keys: Tensor | None = None  # [slots, Hkv * D] as read from the cache there and then
    values: Tensor | None = None
    weights: Tensor | None = None  # [R, H, slots] of attention


class TargetWatch:
    """Compares what the engine computes with the reference, while it computes it."""

    def __init__(self, drive: Drive, reference: ModelReference, watched: Mapping[str, Contexts]) -> None:
        self.drive, self.watched = drive, watched
        self.borders: dict[str, Borders] = {name: reference.borders(contexts) for name, contexts in watched.items()}
        longest = max(watched.values(), key=lambda contexts: len(contexts.text))
        self.allowed = reference.allowed(longest.text)
        self.difference: FirstDifference | None = None
        self.compared, self.largest = 0, 0.0  # rows at all borders; the largest error within what is allowed, over it
        self.passed: list[tuple[PartRows, list[Held]]] = []  # of the pass that runs: what agrees of each part
        self._handles = self._hook(drive.engine.runner.loaded.model)

    def close(self) -> None:
        """Take the hooks off."""
        for handle in self._handles:
            handle.remove()

    def _hook(self, model: Any) -> list[Any]:  # noqa: ANN401
        layers = decoder_layers(model)
        base = getattr(model, model.base_model_prefix)
        handles = [layers[0].register_forward_pre_hook(self._enter, with_kwargs=True)]
        handles += [layer.register_forward_hook(self._leave(i), with_kwargs=True) for i, layer in enumerate(layers)]
        handles.append(base.register_forward_hook(self._norm, with_kwargs=True))
        handles.append(model.register_forward_hook(self._logits, with_kwargs=True))
        return handles

    def _enter(self, layer: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        """Rows, tokens, positions and the embedding."""
        if not self.drive.fed or self.difference is not None:
            return
        batch, hidden = named["batch"], given[0] if given else named["hidden_states"]
        self.passed = [(rows, []) for rows in self._parts()]
        tokens, positions = batch.as_given(batch.tokens[0]).cpu(), batch.as_given(batch.positions[0]).cpu()
        for at, held in self.passed:
            for name, ours in (("tokens", tokens), ("positions", positions)):
                right = torch.tensor([getattr(row, name.removesuffix("s")) for row in at.rows])
                self._equal(at, held, name, ours[at.given], right)
        self._border("embedding", batch.as_given(hidden[0]))

    def _leave(self, index: int) -> Any:  # noqa: ANN401
        def leave(layer: nn.Module, given: tuple[Any, ...], named: dict[str, Any], out: Any) -> None:  # noqa: ANN401
            if not self.drive.fed or self.difference is not None:
                return
            made = (out[0] if isinstance(out, tuple) else out)[0]
            batch = named["batch"]
            if self._border(f"layers.{index}", batch.as_given(made)) and self.difference is not None:
                self._look_inside(self.difference, layer_call(index, layer, given, named, made))

        return leave

    def _look_inside(self, difference: FirstDifference, call: LayerCall) -> None:
        """The layer's operations, and what it read of the cache."""
        at = difference.at
        blocks, end = self.drive.table_of(at.part.request), at.part.context_len + at.fed
        slots = [blocks[place // BLOCK_SIZE] * BLOCK_SIZE + place % BLOCK_SIZE for place in range(end)]
        key, value = call.cache.key[call.layer][:, slots], call.cache.value[call.layer][:, slots]
        difference.keys, difference.values = (x.transpose(0, 1).flatten(1).float().cpu() for x in (key, value))
        difference.call, difference.slots, difference.inner = call, slots, layer_again(call)
        if difference.inner.weights is not None:
            difference.weights = call.batch.as_given(difference.inner.weights(slots))[at.given].cpu()

    def _norm(self, base: nn.Module, given: tuple[Any, ...], named: dict[str, Any], out: Any) -> None:  # noqa: ANN401
        if self.drive.fed and self.difference is None:
            self._border("norm", named["batch"].as_given(out[0][0]))

    def _logits(self, model: nn.Module, given: tuple[Any, ...], named: dict[str, Any], out: Any) -> None:  # noqa: ANN401
        if not self.drive.fed or self.difference is not None:
            return
        batch = named["batch"]
        wanted = batch.wanted if batch.order is None else batch.order[batch.wanted]  # as given
        place = {row: index for index, row in enumerate(wanted.tolist())}
        for at, held in self.passed:
            right = self.borders[at.part.request].logits
            some = [i for i, row in enumerate(at.contexts) if row in right and int(at.given[i]) in place]
            if some:
                ours = out.logits[0][[place[int(at.given[i])] for i in some]].float().cpu()
                self._compare(
                    _only(at, some), held, "lm_head", ours, torch.stack([right[at.contexts[i]] for i in some])
                )

    def _parts(self) -> list[PartRows]:
        """The rows of watched requests in the pass that begins."""
        parts, first = [], 0
        for part in self.drive.fed:
            feed = part.prefill_tokens + (part.verdict is not None)
            if part.request in self.watched and self.difference is None:
                rows = part_rows(part, self.watched[part.request], self.borders[part.request], first, self._where(part))
                parts += [rows] if rows.rows else []
            first += feed + len(part.tree)
        return parts

    def _where(self, part: RequestStep) -> Where:
        return Where(part.request, part.index, self.drive.engine.steps)

    def _border(self, name: str, every: Tensor) -> bool:
        """Compare all watched rows at one border; whether they differ."""
        if self.difference is not None:
            return False
        for at, held in self.passed:
            right = self.borders[at.part.request].taps[name][at.reference]
            if self._compare(at, held, name, every[at.given].float().cpu(), right):
                return True
        return False

    def _compare(self, at: PartRows, passed: list[Held], name: str, ours: Tensor, right: Tensor) -> bool:
        errors = relative(ours, right)
        usual = self.allowed.get(name, self.allowed["norm"])
        grown = AMPLIFIED * max((held.error for held in passed[-1:]), default=0.0)
        allowed = min(max(usual, grown), MOST_AMPLIFIED * usual)
        held = hold(name, errors, allowed)
        self.compared += held.rows
        if held.differs:
            self.difference = FirstDifference(at, name, ours, right, held, passed)
            return True
        self.largest = max(self.largest, held.error / allowed)
        passed.append(held)
        return False

    def _equal(self, at: PartRows, passed: list[Held], name: str, ours: Tensor, right: Tensor) -> None:
        held = hold(name, (ours != right).float()[:, None], 0.0)
        if not held.differs:
            passed.append(held)
        elif self.difference is None:
            self.difference = FirstDifference(at, name, ours.float()[:, None], right.float()[:, None], held, passed)


def layer_call(index: int, layer: nn.Module, given: tuple[Any, ...], named: dict[str, Any], out: Tensor) -> LayerCall:
    """A decoder layer's call as a hook sees it."""
    hidden = given[0] if given else named["hidden_states"]
    rest = {name: value for name, value in named.items() if name not in ("pages", "hidden_states")}
    fused = layer.forward if isinstance(layer.forward, FusedLayer) else None
    forward = type(layer).forward.__get__(layer) if fused is not None else layer.forward

    def run(cache: Any) -> Tensor:  # noqa: ANN401
        made = forward(hidden.clone(), *given[1:], pages=cache, **rest)
        result: Tensor = (made[0] if isinstance(made, tuple) else made)[0]
        return result

    rotation = named.get("position_embeddings")
    return LayerCall(index, hidden[0], out, named["batch"], named["pages"], run, fused, None, rotation, layer)


def part_rows(part: RequestStep, contexts: Contexts, borders: Borders, first: int, where: Where) -> PartRows:
    """The rows of a request's part whose right values are known."""
    feed = part.prefill_tokens + (part.verdict is not None)
    step = next((step for step in contexts.steps if step.part == part), None)
    triples: list[tuple[int, int, FedRow]] = []
    for place in range(feed):
        position = part.context_len + place
        if position < borders.text:
            triples.append((first + place, position, FedRow(position, contexts.text[position])))
    for node, row in () if step is None else step.rows.items():
        if node != ROOT:
            position = part.position + int(part.tree.depth[node])
            triples.append((first + feed + node, row, FedRow(position, int(part.tree.token[node]), node)))
    triples = [triple for triple in triples if borders.index(triple[1]) < len(borders.taps["embedding"])]
    return PartRows(
        part,
        where,
        torch.tensor([given for given, _, _ in triples], dtype=torch.long),
        torch.tensor([borders.index(row) for _, row, _ in triples], dtype=torch.long),
        [row for _, row, _ in triples],
        tuple(row for _, _, row in triples),
        feed + len(part.tree),
    )


def _only(at: PartRows, some: Sequence[int]) -> PartRows:
    rows = [at.contexts[i] for i in some]
    return PartRows(
        at.part, at.where, at.given[list(some)], at.reference[list(some)], rows, tuple(at.rows[i] for i in some), at.fed
    )


def hold(name: str, errors: Tensor, allowed: float, *, code: str = "", stage: Stage = TARGET) -> Held:
    """What was compared of one operation. errors [R, parts]."""
    wrong = (errors > allowed).any(1) if len(errors) else torch.zeros(0, dtype=torch.bool)
    largest = float(errors.max()) if errors.numel() else 0.0
    table = np.asarray(errors.numpy(), np.float32)
    return Held(operation(stage, name, code), allowed, largest, len(errors), int(wrong.sum()), table)
