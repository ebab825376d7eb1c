"""The target's reference: plain transformers over the contexts of a request, with every operation by name.

The model's own eager attention, in float32, with a DynamicCache and masks as `audit` has them. Nothing of the engine.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from specscope.analyze.audit.contexts import Contexts
from specscope.analyze.audit.model.causal import PIECE, Causal
from specscope.analyze.audit.options import ModelSource
from specscope.analyze.locate.model.taps import Taps, hooked, relative
from specscope.errors import UserError

NAME = "specscope_reference"  # of its attention, in transformers' register
TAPS = "specscope_taps"  # the attribute of an attention module that is tapped
MARGIN = 16.0  # an engine's order of summation differs from the reference's by more than two of the reference's do
FLOOR = 3e-5  # relative error that float32 always explains
TRIED = 128  # rows of the text that two orders of summation are tried on


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **named: Any,  # noqa: ANN401
) -> tuple[Tensor, Tensor | None]:
    """The model's own eager attention; where the module is tapped, what goes into it and what comes out.

    query [1, H, N, D], key and value [1, Hkv, K, D] with all that the cache holds; returns [1, N, H, E].
    """
    eager = sys.modules[type(module).__module__].eager_attention_forward
    out, weights = eager(module, query, key, value, attention_mask, **named)
    tapped: AttentionTaps | None = getattr(module, TAPS, None)
    if tapped is not None:
        rows = query.shape[2]
        for name, x in (("query", query), ("key", key[:, :, -rows:]), ("value", value[:, :, -rows:])):
            tapped.taps.put(f"self_attn.{name}", x[0].transpose(0, 1))
        tapped.weights.append(None if weights is None else weights[0].float().cpu())
        tapped.taps.put("self_attn.attention", out[0])
        tapped.heads, tapped.kv_heads = query.shape[1], key.shape[1]
    return out, weights


@dataclass
class AttentionTaps:
    """What is told of one attention module."""

    taps: Taps
    weights: list[Tensor | None] = field(default_factory=list)  # [H, N, K] of each pass
    heads: int = 0
    kv_heads: int = 0


@dataclass(frozen=True)
class Borders:
    """What enters and leaves each decoder layer: [rows, width] by "embedding", "layers.3", "norm".

    Rows are those of `Contexts`: first its text's, as far as it was needed, then its branches'.
    """

    taps: dict[str, Tensor]
    logits: dict[int, Tensor]  # by row, where asked for
    text: int  # rows of the text that were fed
    whole: int  # tokens of the text: the first branch's row

    def index(self, row: int) -> int:
        """Where a row of the contexts lies in the tensors."""
        return row if row < self.whole else self.text + row - self.whole


@dataclass(frozen=True)
class Inside:
    """What the operations of one decoder layer give, by the names of its modules, for the rows of `Borders`."""

    taps: dict[str, Tensor]  # in the order of computing
    weights: list[Tensor | None]  # of attention, [H, N, K] of each pass
    heads: int
    kv_heads: int
    borders: Borders

    def weights_of(self, contexts: Contexts, row: int) -> Tensor | None:
        """[H, position + 1] the attention weights of one row over the tokens of its own context, by position."""
        start, passes = 0, list(_passes(contexts))
        for (first, count), weights in zip(passes, self.weights, strict=False):
            if weights is not None and first <= row < first + count:
                path = path_of(contexts, row)
                keys = [r if r < len(contexts.text) else len(contexts.text) + r - first for r in path]
                return weights[:, row - first][:, keys]
            start += count
        return None


class ModelReference:
    """A target as transformers runs it."""

    def __init__(self, source: ModelSource, device: str = "cpu") -> None:
        """Loads it in float32. Raises UserError."""
        from transformers.masking_utils import AttentionMaskInterface, eager_mask
        from transformers.modeling_utils import AttentionInterface

        AttentionInterface.register(NAME, _attention)
        AttentionMaskInterface.register(NAME, eager_mask)
        self.causal = Causal(source, "float32", device)
        self.causal.model.set_attn_implementation(NAME)
        self.layers = decoder_layers(self.causal.model)

    def borders(self, contexts: Contexts) -> Borders:
        """What enters and leaves each layer, at every row of the contexts."""
        taps, rows, logits = Taps(), [0], dict[int, Tensor]()

        def enter(layer: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> None:
            hidden: Tensor = given[0] if given else named["hidden_states"]
            rows[0] = hidden.shape[1]
            taps.put("embedding", hidden[0])

        def leave(name: str) -> Any:  # noqa: ANN401
            return lambda layer, given, out: taps.put(name, (out[0] if isinstance(out, tuple) else out)[0])

        handles = [self.layers[0].register_forward_pre_hook(enter, with_kwargs=True)]
        handles += [layer.register_forward_hook(leave(f"layers.{i}")) for i, layer in enumerate(self.layers)]
        base = getattr(self.causal.model, self.causal.model.base_model_prefix)
        handles.append(base.register_forward_hook(lambda module, given, out: taps.put("norm", out[0][0])))
        try:
            for (here, values), _ in self.causal.rows(contexts):
                logits.update(zip(here, values.cpu(), strict=True))
        finally:
            for handle in handles:
                handle.remove()
        return Borders(
            taps.take(),
            logits,
            sum(n for first, n in _passes(contexts) if first < len(contexts.text)),
            len(contexts.text),
        )

    def inside(self, contexts: Contexts, layer: int, borders: Borders) -> Inside:
        """The operations of one layer, at every row of the contexts."""
        taps, rows, module = Taps(), [0], self.layers[layer]
        attention = next((m for m in module.modules() if hasattr(m, "layer_idx") and m is not module), None)
        tapped = AttentionTaps(taps)

        def enter(layer: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> None:
            rows[0] = (given[0] if given else named["hidden_states"]).shape[1]

        handles = [module.register_forward_pre_hook(enter, with_kwargs=True)]
        handles += hooked(module, taps.put, lambda: rows[0])
        try:
            if attention is not None:
                setattr(attention, TAPS, tapped)
            for _ in self.causal.rows(contexts):
                pass
        finally:
            if attention is not None:
                delattr(attention, TAPS)
            for handle in handles:
                handle.remove()
        return Inside(taps.take(), tapped.weights, tapped.heads, tapped.kv_heads, borders)

    @torch.inference_mode()
    def allowed(self, tokens: list[int]) -> dict[str, float]:
        """The relative error at each border that rounding explains: two orders of summation, times a margin.

        The text at once, and in pieces of a few rows: products of other shapes are summed in another order.
        """
        tokens = tokens[:TRIED]
        whole, cut = (self._states(tokens, piece) for piece in (len(tokens), 7))
        return {name: max(FLOOR, MARGIN * float(relative(cut[name], whole[name]).max())) for name in whole}

    def _states(self, tokens: list[int], piece: int) -> dict[str, Tensor]:
        """Borders of a text that is fed `piece` tokens at a time."""
        from transformers import DynamicCache

        from specscope.analyze.audit.model.causal import cached

        arguments, parts = cached(self.causal.model, DynamicCache()), []
        for start in range(0, len(tokens), piece):
            ids = torch.tensor([tokens[start : start + piece]], device=self.causal.device)
            out = self.causal.model(input_ids=ids, output_hidden_states=True, **arguments)
            parts.append([state[0].float().cpu() for state in out.hidden_states])
        states = [torch.cat(each) for each in zip(*parts, strict=True)]
        count = len(self.layers)
        # What transformers gives last is behind the final norm: the last layer's own output is not among them
        names = ["embedding", *(f"layers.{i}" for i in range(count - 1)), "norm"]
        named = dict(zip(names, states, strict=True))
        return {**named, f"layers.{count - 1}": named["norm"]}


def _passes(contexts: Contexts) -> Iterator[tuple[int, int]]:
    """(first row, rows) of each pass that Causal.rows makes."""
    asked = contexts.asked()
    end = max((row for row in asked if row < len(contexts.text)), default=-1) + 1
    end = len(contexts.text) if contexts.token else end
    for start in range(0, end, PIECE):
        yield start, min(PIECE, end - start)
    for rows in contexts.branches(PIECE):
        yield rows.start, len(rows)


def path_of(contexts: Contexts, row: int) -> list[int]:
    """The rows of a row's context, itself the last, by position."""
    path: list[int] = []
    while row >= len(contexts.text):
        path.append(row)
        row = contexts.parent[row - len(contexts.text)]
    return [*range(row + 1), *reversed(path)]


def decoder_layers(model: Any) -> nn.ModuleList:  # noqa: ANN401
    """The list of a model's decoder layers. Raises UserError."""
    wanted = int(model.config.get_text_config().num_hidden_layers)
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == wanted:
            return module
    raise UserError(f"{type(model).__name__} has no list of {wanted} decoder layers")
