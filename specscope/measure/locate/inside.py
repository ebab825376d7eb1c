"""The first operation inside a layer whose inputs agree and whose output does not."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from specscope.analyze.audit.contexts import Contexts
from specscope.analyze.locate.located import FedRow, Held
from specscope.analyze.locate.model.reference import Inside, path_of
from specscope.analyze.locate.model.taps import relative
from specscope.measure.locate.layer_taps import code_of
from specscope.measure.locate.target import FirstDifference, hold


@dataclass(frozen=True)
class BothSides:
    """One operation of both sides."""

    name: str  # within the layer
    ours: Tensor  # [rows, width]
    right: Tensor
    rows: tuple[FedRow, ...]
    heads: int = 1
    errors: Tensor | None = None  # [rows, parts], where it is not the relative error
    keys: tuple[int, ...] = ()  # of attention scores [rows, heads * keys]: the position of each key

    @property
    def off(self) -> Tensor:
        """[rows, parts] how far ours is off."""
        return relative(self.ours, self.right, self.heads) if self.errors is None else self.errors


def operations(difference: FirstDifference, inside: Inside, contexts: Contexts) -> Iterator[BothSides]:
    """The operations of the layer, both sides, in the order of the reference's computing."""
    inner, call, at = difference.inner, difference.call, difference.at
    assert inner is not None
    assert call is not None
    ours = {name: call.batch.as_given(rows)[at.given] for name, rows in inner.taps.items()}
    heads = {"self_attn.query": inside.heads, "self_attn.attention": inside.heads}
    heads["self_attn.o_proj:in"] = inside.heads
    heads |= dict.fromkeys(("self_attn.key", "self_attn.value"), inside.kv_heads)
    for name, every in inside.taps.items():
        if name == "self_attn.attention":
            yield from _cache(difference, inside, contexts)
        if name in ours and ours[name].shape[1] == every.shape[1]:
            yield BothSides(name, ours[name], every[at.reference], at.rows, heads.get(name, 1))


def first_wrong(
    difference: FirstDifference, inside: Inside, contexts: Contexts, allowed: float
) -> tuple[list[Held], BothSides | None]:
    """What was compared inside the layer, up to the first operation that differs; and that operation."""
    assert difference.call is not None
    held, layer, code = list[Held](), difference.call.layer, codes(difference)
    for step in operations(difference, inside, contexts):
        item = hold(f"layers.{layer}.{step.name}", step.off, allowed, code=code.get(step.name, ""))
        held.append(item)
        if item.differs:
            return held, step
    return held, None


def codes(difference: FirstDifference) -> dict[str, str]:
    """Where each operation of the layer is computed."""
    assert difference.inner is not None
    assert difference.call is not None
    module, code = difference.call.module, dict(difference.inner.code)
    if module is None:
        return code
    for name, child in module.named_modules():
        if name:
            code.setdefault(name, code_of(child))
            parent = module.get_submodule(name.rpartition(".")[0]) if "." in name else module
            code.setdefault(f"{name}:in", code_of(parent))
    if (
        attention := next((child for _, child in module.named_modules() if hasattr(child, "layer_idx")), None)
    ) is not None:
        for name in ("self_attn.query", "self_attn.key", "self_attn.value"):
            code.setdefault(name, code_of(attention))
    return code


def _cache(difference: FirstDifference, inside: Inside, contexts: Contexts) -> Iterator[BothSides]:
    """Keys and values as read from the cache, then how much each row attends to each of them."""
    at, places = difference.at, _places(difference, contexts)
    known = [index for index, row in enumerate(places) if row is not None and _has(inside, row)]
    reference = torch.tensor([inside.borders.index(row) for index in known if (row := places[index]) is not None])
    rows = tuple(_fed_row(index, at.part.position, contexts, places[index]) for index in known)
    for name, ours in (("key", difference.keys), ("value", difference.values)):
        if ours is not None and known:
            right = inside.taps[f"self_attn.{name}"][reference]
            yield BothSides(f"self_attn.{name}s read", ours[known], right, rows, inside.kv_heads)
    if difference.weights is not None:
        yield from _scores(difference, inside, contexts, places)


def _scores(
    difference: FirstDifference, inside: Inside, contexts: Contexts, places: list[int | None]
) -> Iterator[BothSides]:
    """The attention weights of each row by position: what lies elsewhere than on its own path is the last column."""
    weights, at = difference.weights, difference.at
    assert weights is not None
    slot_of = {row: slot for slot, row in enumerate(places) if row is not None}
    width = max(row.position for row in at.rows) + 2
    ours = torch.zeros(len(at.rows), inside.heads, width)
    right = torch.zeros_like(ours)
    for index, row in enumerate(at.contexts):
        theirs = inside.weights_of(contexts, row)
        if theirs is None:
            return
        slots = [slot_of[step] for step in path_of(contexts, row) if step in slot_of]
        right[index, :, : theirs.shape[1]] = theirs
        if len(slots) == theirs.shape[1]:
            ours[index, :, : len(slots)] = weights[index][:, slots]
        ours[index, :, -1] = weights[index].sum(-1) - ours[index].sum(-1)
    ours = _to_the_same_sum(ours, right)
    errors = (ours - right).abs().sum(-1)
    keys = (*range(width - 1), -1)
    yield BothSides("self_attn.scores", ours.flatten(1), right.flatten(1), at.rows, inside.heads, errors, keys)


def _to_the_same_sum(ours: Tensor, right: Tensor) -> Tensor:
    """Weights [rows, heads, keys] of heads that give a constant share of what they should, brought to the right sum.

    Such a head's output is scaled, or nothing: that is no matter of its scores.
    """
    share = ours.sum(-1) / right.sum(-1).clamp(min=1e-12)
    mean = share.mean(0)
    constant = (share - mean).abs().amax(0) <= 1e-3 * mean.abs().clamp(min=1e-6)
    scaled = torch.where(mean.abs() > 1e-6, 1 / mean.clamp(min=1e-6), torch.zeros_like(mean))[None, :, None] * ours
    whole = torch.where(mean[None, :, None].abs() > 1e-6, scaled, right)
    return torch.where(constant[None, :, None], whole, ours)


def _places(difference: FirstDifference, contexts: Contexts) -> list[int | None]:
    """The row of the contexts that each slot of the request ought to hold; None where that is not known."""
    part = difference.at.part
    step = next((step for step in contexts.steps if step.part == part), None)
    text = part.context_len + part.prefill_tokens + (part.verdict is not None)
    nodes = [None if step is None else step.rows.get(node) for node in range(len(part.tree))]
    return [*range(text), *nodes]


def _has(inside: Inside, row: int) -> bool:
    return inside.borders.index(row) < len(next(iter(inside.taps.values())))


def _fed_row(slot: int, root: int, contexts: Contexts, row: int | None) -> FedRow:
    token = contexts.text[row] if row is not None and row < len(contexts.text) else -1
    return FedRow(slot, token, slot - root - 1 if slot > root else None)
