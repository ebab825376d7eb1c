"""What each operation should give: plain transformers, and the head of the audit, over a request's text."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from specscope.analyze.audit.model.head import KV, Head
from specscope.analyze.locate.model.reference import TAPS, AttentionTaps, ModelReference
from specscope.analyze.locate.model.taps import IN, Taps, hooked

FIRST = "layers.0"  # the checkpoint's own name of a head's first layer is "midlayer"


class TapsOfLayer:
    """Puts what a layer tells under the layer's name."""

    def __init__(self, taps: Taps, layer: str, wanted: Collection[str]) -> None:
        self._taps, self._layer, self._wanted = taps, layer, wanted

    def put(self, name: str, rows: Tensor) -> None:
        """As Taps.put, where it is wanted."""
        if (full := f"{self._layer}.{name}") in self._wanted:
            self._taps.put(full, rows)


@torch.inference_mode()
def over_text(reference: ModelReference, tokens: Sequence[int], wanted: Collection[str]) -> dict[str, Tensor]:
    """Each wanted operation of a model along a text: [tokens, width] by name, "lm_head" [tokens, V] always."""
    taps, handles, tapped = Taps(), [], []
    rows = len(tokens)
    for index, layer in enumerate(reference.layers):
        own: Any = TapsOfLayer(taps, f"layers.{index}", wanted)
        handles += hooked(layer, own.put, lambda: rows)
        handles.append(layer.register_forward_hook(_leaves(taps, f"layers.{index}")))
        attention = next((m for m in layer.modules() if hasattr(m, "layer_idx") and m is not layer), None)
        if attention is not None:
            setattr(attention, TAPS, AttentionTaps(own))
            tapped.append(attention)
    model = reference.causal.model
    base = getattr(model, model.base_model_prefix)
    handles.append(model.get_input_embeddings().register_forward_hook(_leaves(taps, "embedding")))
    handles.append(base.register_forward_hook(lambda module, given, out: taps.put("norm", out[0][0])))
    try:
        out = model(input_ids=torch.tensor([list(tokens)], device=reference.causal.device), use_cache=False)
        taps.put("lm_head", out.logits[0])
    finally:
        for handle in handles:
            handle.remove()
        for attention in tapped:
            delattr(attention, TAPS)
    return taps.take()


def _leaves(taps: Taps, name: str) -> Any:  # noqa: ANN401
    return lambda module, given, out: taps.put(name, (out[0] if isinstance(out, tuple) else out)[0])


class NamedHead(Head):
    """The audit's head, which tells what each of its operations gives."""

    taps: Taps | None = None

    def _linear(self, name: str, x: Tensor) -> Tensor:
        out = super()._linear(name, x)
        self._put(name + IN, x)
        self._put(name, out)
        return out

    def _norm(self, name: str, x: Tensor) -> Tensor:
        out = super()._norm(name, x)
        self._put(name + IN, x)
        self._put(name, out)
        return out

    def _layer(self, name: str, residual: Tensor, query: Tensor, seen: Tensor, kv: KV) -> Tensor:
        rows = len(query)
        for what, x in (("query", query), ("key", kv[0][-rows:]), ("value", kv[1][-rows:])):
            self._put(f"{name}.self_attn.{what}", x)
        out = super()._layer(name, residual, query, seen, kv)
        self._put(name, out)
        return out

    def _put(self, name: str, rows: Tensor) -> None:
        if self.taps is not None:
            plain = name.replace("midlayer", FIRST)
            self.taps.put(plain, rows)
            if plain.endswith("o_proj" + IN):
                self.taps.put(plain.replace("o_proj" + IN, "attention"), rows)


@dataclass
class HeadText:
    """A head along a request's text: what its operations give by pair, and what later passes need."""

    head: NamedHead
    named: dict[str, Tensor]  # [pairs, width]; "lm_head" [pairs, V]
    hidden: Tensor  # [pairs, width], which the next pass is fed
    kv: list[KV]
    embedding: Tensor = field(repr=False)

    @staticmethod
    @torch.inference_mode()
    def of(head: NamedHead, tokens: Sequence[int], features: Tensor) -> HeadText:
        """features [pairs, F]: the target's, as vLLM's target gave them; pair t has the token at t + 1."""
        head.taps = taps = Taps()
        pairs = min(len(features), len(tokens) - 1)
        ids, slots = torch.tensor(tokens[1 : pairs + 1]), torch.arange(pairs)
        taps.put("features", features[:pairs])
        prepared = head.prepare(ids, head.combine(features[:pairs].float()))
        hidden, kv = head.run(prepared, slots, slots[None] <= slots[:, None], head.nothing())
        taps.put("embedding", head.embedding[ids])
        taps.put("lm_head", head.logits(hidden))
        head.taps = None
        return HeadText(head, taps.take(), hidden, kv, head.embedding)

    @torch.inference_mode()
    def branch(self, pair: int, tokens: Sequence[int]) -> list[dict[str, Tensor]]:
        """The later passes behind a pair, each fed what the one before it gave: of each, what its operations give.

        Keys and values are those of the whole context: [context, width].
        """
        head, hidden, made = self.head, self.hidden[pair : pair + 1], []
        kv = [tuple(x[: pair + 1] for x in layer) for layer in self.kv]
        for number, token in enumerate(tokens, 1):
            head.taps = taps = Taps()
            back = head.fed_back(hidden)
            taps.put("state", back)
            taps.put("embedding", head.embedding[[token]])
            position = torch.tensor([pair + number])
            seen = torch.ones(1, pair + number + 1, dtype=torch.bool)
            hidden, kv = head.run(head.prepare(torch.tensor([token]), back), position, seen, kv)  # type: ignore[assignment, arg-type]
            taps.put("lm_head", head.logits(hidden))
            head.taps = None
            named = taps.take()
            for index, (keys, values, _) in enumerate(kv):
                named[f"layers.{index}.keys"], named[f"layers.{index}.values"] = keys.flatten(1), values.flatten(1)
            made.append(named)
        return made
