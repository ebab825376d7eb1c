"""The operations inside one decoder layer of our engine: the layer run again, over the same rows and the same cache.

What comes out is held against what the engine's layer gave, so that it is known whether the taps saw what went wrong.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from specscope.analyze.locate.model.reference import IN, Taps, hooked, relative
from specscope.model import attention
from specscope.model.attention import Variant
from specscope.model.batch import Batch
from specscope.model.fast import decoder
from specscope.model.fast.decoder import FusedLayer
from specscope.model.kv_cache import KVCache

SAME = 1e-4  # relative: a layer that was run again gives what it gave


@dataclass(frozen=True)
class LayerCall:
    """One call of a decoder layer. Filled by a hook."""

    layer: int
    hidden: Tensor  # [N, width] what entered
    out: Tensor  # [N, width]
    batch: Batch
    cache: KVCache
    run: Callable[[KVCache], Tensor] | None = None  # the module's own forward over the same rows, [N, width]
    fused: FusedLayer | None = None
    projected: Tensor | None = None  # of a head's first layer: what attention projects
    rotation: tuple[Tensor, Tensor] | None = None  # of a fused layer: cos and sin
    module: nn.Module | None = None  # whose children are tapped where it runs by itself


def layer_again(call: LayerCall) -> LayerTaps:
    """The layer once more, tapped: the way that gives what the engine's layer gave, else the first of the ways.

    A fused layer by its own steps, without the compiled kernels; else through the module's own forward.
    """
    runs = [] if call.fused is None else [_again(call, fused=True)]
    if (not runs or not runs[0].same) and call.module is not None:
        runs.append(_again(call, fused=False))
    return next((run for run in runs if run.same), runs[0])


@torch.inference_mode()
def _again(call: LayerCall, *, fused: bool) -> LayerTaps:
    made, rows = LayerTaps(call), len(call.hidden)
    with _kept(call), made.on():
        handles = [] if fused or call.module is None else hooked(call.module, made.put, lambda: rows)
        try:
            out = made.fused() if fused or call.run is None else call.run(call.cache)
        finally:
            for handle in handles:
                handle.remove()
    made.same = bool(relative(out.float(), call.out.float()).max() < SAME)
    made.taps = made.recorder.take()
    return made


@contextmanager
def _kept(call: LayerCall) -> Iterator[None]:
    """What the layer wrote into the cache stays as it was."""
    slots = call.batch.slots
    stores = (call.cache.key[call.layer], call.cache.value[call.layer])
    before = [store[:, slots].clone() for store in stores]
    try:
        yield
    finally:
        for store, rows in zip(stores, before, strict=True):
            store[:, slots] = rows


class LayerTaps:
    """What a layer's operations gave when it was run again, [N, width] by name, in the order of the batch's rows."""

    def __init__(self, call: LayerCall) -> None:
        self.call, self.recorder = call, Taps()
        self.taps: dict[str, Tensor] = {}
        self.same = False  # whether what came out is what the engine's layer gave
        self.heads, self.kv_heads = 0, call.cache.layers[call.layer].heads
        self.weights: Callable[[list[int]], Tensor] | None = None  # [N, H, K] of attention, over K slots

    def put(self, name: str, x: Tensor) -> None:
        """Keep what an operation gave."""
        self.recorder.put(name, x)

    @contextmanager
    def on(self) -> Iterator[None]:
        """Attention is tapped, wherever it is called from, and what is written into the cache."""
        store, shape = self.call.cache, self.call.cache.layers[self.call.layer]
        write, sizes = store.write_rows, [shape.heads * shape.key_size, shape.heads * shape.value_size]

        def written(layer: int, slots: Tensor, rows: Tensor) -> None:
            for name, part in zip(("key", "value"), rows.split(sizes, 1), strict=True):
                self.put(f"self_attn.{name}", part)
            write(layer, slots, rows)

        def tapped(function: Any) -> Any:  # noqa: ANN401
            def paged(query: Tensor, layer: int, cache: KVCache, batch: Batch, variant: Variant) -> Tensor:
                out: Tensor = function(query, layer, cache, batch, variant)
                self.heads = query.shape[1]
                self.put("self_attn.query", query)
                self.put("self_attn.attention", out)
                kept = query.clone()
                self.weights = lambda slots: _weights(function, kept, layer, cache, batch, variant, slots)
                return out

            return paged

        with (
            patch.object(store, "write_rows", written),
            patch.object(attention, "paged_attention", tapped(attention.paged_attention)),
            patch.object(decoder, "paged_attention", tapped(vars(decoder)["paged_attention"])),
        ):
            yield

    def fused(self) -> Tensor:
        """The fused layer's own steps, each with its output tapped."""
        call = self.call
        assert call.fused is not None
        assert call.rotation is not None
        layer = copy.copy(call.fused)
        layer.compiled, layer.stack = None, None
        layer.first_norm = self._tapped(layer.first_norm, "input_layernorm")
        layer.second_norm = self._tapped(layer.second_norm, "post_attention_layernorm", inputs=True)
        sizes = [heads * layer.size for heads in (layer.heads, layer.kv_heads, layer.kv_heads)]
        layer.qkv = self._tapped(layer.qkv, *(f"self_attn.{part}_proj" for part in "qkv"), sizes=sizes)
        layer.gate_up = self._tapped(layer.gate_up, "mlp.gate_proj", "mlp.up_proj")
        layer.act = self._tapped(layer.act, "mlp.act_fn")
        layer.out = self._tapped(layer.out, "self_attn.o_proj", inputs=True)
        layer.down = self._tapped(layer.down, "mlp.down_proj", inputs=True)
        if layer.head_norms is not None:
            query, key = layer.head_norms
            layer.head_norms = self._tapped(query, "self_attn.q_norm"), self._tapped(key, "self_attn.k_norm")
        projected = call.projected
        if projected is not None:
            self.put("self_attn.q_proj" + IN, projected)
        return layer.run(call.hidden.clone(), projected, call.rotation, call.batch, call.cache)

    def _tapped(self, function: Any, *names: str, sizes: Sequence[int] = (), inputs: bool = False) -> Any:  # noqa: ANN401
        """Its output is tapped, by parts where it makes several at once; without sizes they are alike."""

        def tapped(x: Tensor) -> Tensor:
            if inputs:
                self.put(names[0] + IN, x)
            out: Tensor = function(x)
            parts = out.split(list(sizes), dim=-1) if sizes else out.chunk(len(names), dim=-1)
            for name, part in zip(names, parts, strict=True):
                self.put(name, part)
            return out.clone()  # the layer goes on in place

        return tapped


def _weights(
    function: Any,  # noqa: ANN401
    query: Tensor,
    layer: int,
    cache: KVCache,
    batch: Batch,
    variant: Variant,
    slots: list[int],
) -> Tensor:
    """[N, H, K] how much each row attends to each of K slots, whatever computes it.

    Attention is linear in the values. So it is asked for the values 1 in one channel and 0 elsewhere, a slot a channel.
    """
    value, places = cache.value[layer], torch.tensor(slots)
    size, before = value.shape[2], value[:, places].clone()
    parts = []
    try:
        with torch.inference_mode():
            for start in range(0, len(slots), size):
                here = places[start : start + size]
                value[:, places] = 0
                value[:, here] = torch.eye(size, dtype=value.dtype)[: len(here)]
                parts.append(function(query, layer, cache, batch, variant)[..., : len(here)].float())
    finally:
        value[:, places] = before
    return torch.cat(parts, dim=-1)
