"""The operations inside one decoder layer of our engine: the layer run again, over the same rows and the same cache.

As it ran: a fused layer by its own steps, which are those of the compiled one too. Else through the module's own
forward. What comes out is held against what the engine's layer gave, so that it is known whether the taps saw what
went wrong.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

import specscope
from specscope.analyze.locate.model.taps import IN, Taps, hooked, relative
from specscope.model import attention
from specscope.model.attention import Variant
from specscope.model.batch import Batch
from specscope.model.fast import decoder
from specscope.model.fast.decoder import FusedLayer
from specscope.model.kv_cache import KVCache

FUSED, PLAIN = "as it runs, without the compiled kernels", "through torch's operators"
SAME = 1e-4  # relative: a layer that was run again gives what it gave


@dataclass(frozen=True)
class LayerCall:
    """One call of a decoder layer. Filled by a hook."""

    layer: int
    hidden: Tensor  # [N, width] what entered
    out: Tensor  # [N, width]
    batch: Batch
    cache: KVCache
    run: Callable[[KVCache], Tensor]  # the module's own forward over the same rows, [N, width]
    fused: FusedLayer | None = None
    projected: Tensor | None = None  # of a head's first layer: what attention projects
    rotation: tuple[Tensor, Tensor] | None = None  # of a fused layer: cos and sin
    module: nn.Module | None = None  # whose children are tapped where it runs by itself


@dataclass(frozen=True)
class LayerTaps:
    """What a layer's operations gave, [N, width] by name, in the order of the batch's rows."""

    taps: dict[str, Tensor]
    how: str  # FUSED or PLAIN
    same: bool  # whether what came out is what the engine's layer gave
    code: dict[str, str]  # where each operation is computed
    heads: int = 0
    kv_heads: int = 0
    weights: Callable[[list[int]], Tensor] | None = None  # [N, H, K] of attention, over K slots


def layer_again(call: LayerCall) -> LayerTaps:
    """The layer once more, tapped: the way that gives what the engine's layer gave, else the first of the ways."""
    runs = []
    if call.fused is not None:
        runs.append(_again(call, FUSED))
    if not runs or not runs[0].same:
        runs.append(_again(call, PLAIN)) if call.module is not None else None
    return next((run for run in runs if run.same), runs[0])


@torch.inference_mode()
def _again(call: LayerCall, how: str) -> LayerTaps:
    recorder = _Recorder(call)
    with _kept(call), recorder.attention():
        if how == FUSED:
            out = recorder.fused()
        else:
            handles = [] if call.module is None else hooked(call.module, recorder.taps.put, lambda: len(call.hidden))
            try:
                out = call.run(recorder.written())
            finally:
                for handle in handles:
                    handle.remove()
        same = bool(relative(out.float(), call.out.float()).max() < SAME)
        return LayerTaps(
            recorder.taps.take(), how, same, recorder.code, recorder.heads, recorder.kv_heads, recorder.weights
        )


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


class _Recorder:
    """Taps of one run of one layer."""

    def __init__(self, call: LayerCall) -> None:
        self.call, self.taps = call, Taps()
        self.code: dict[str, str] = {}
        self.heads, self.kv_heads = 0, call.cache.layers[call.layer].heads
        self.weights: Callable[[list[int]], Tensor] | None = None

    def put(self, name: str, x: Tensor, made_by: object = None) -> None:
        self.taps.put(name, x)
        if made_by is not None:
            self.code.setdefault(name, code_of(made_by))

    def written(self) -> Any:  # noqa: ANN401
        """The cache, with what is written into it tapped."""
        return _TappedCache(self.call.cache, self)

    @contextmanager
    def attention(self) -> Iterator[None]:
        """paged_attention is tapped, wherever it is called from."""
        right = {module: vars(module)["paged_attention"] for module in (attention, decoder)}

        def tapped(function: Any) -> Any:  # noqa: ANN401
            def paged(query: Tensor, layer: int, cache: Any, batch: Batch, variant: Variant) -> Tensor:  # noqa: ANN401
                real = cache.real if isinstance(cache, _TappedCache) else cache
                out: Tensor = function(query, layer, real, batch, variant)
                self.heads = query.shape[1]
                self.put("self_attn.query", query)
                self.put("self_attn.attention", out, function)
                self.code["self_attn.scores"] = code_of(function)
                kept = query.clone()
                self.weights = lambda slots: _weights(function, kept, layer, real, batch, variant, slots)
                return out

            return paged

        with (
            patch.object(attention, "paged_attention", tapped(right[attention])),
            patch.object(decoder, "paged_attention", tapped(right[decoder])),
        ):
            yield

    def fused(self) -> Tensor:
        """The fused layer's own steps, each with its output tapped."""
        call = self.call
        assert call.fused is not None
        assert call.rotation is not None
        layer = copy.copy(call.fused)
        layer.compiled, layer.stack = None, None
        layer.first_norm = self._tapped("input_layernorm", layer.first_norm)
        layer.second_norm = self._tapped("post_attention_layernorm", layer.second_norm, inputs=True)
        layer.qkv = self._split(layer.qkv, layer)
        layer.gate_up = self._halves(layer.gate_up)
        layer.act = self._tapped("mlp.act_fn", layer.act)
        layer.out = self._tapped("self_attn.o_proj", layer.out)
        layer.down = self._tapped("mlp.down_proj", layer.down, inputs=True)
        if layer.head_norms is not None:
            names = ("self_attn.q_norm", "self_attn.k_norm")
            norms = [self._tapped(name, norm) for name, norm in zip(names, layer.head_norms, strict=True)]
            layer.head_norms = (norms[0], norms[1])
        self.code["post_attention_layernorm" + IN] = self.code["mlp.down_proj" + IN] = code_of(FusedLayer.run)
        for name in ("self_attn.query", "self_attn.key", "self_attn.value"):
            self.code[name] = code_of(FusedLayer._attend)
        projected = call.projected
        if projected is not None:
            self.put("self_attn.q_proj" + IN, projected)
        return layer.run(call.hidden.clone(), projected, call.rotation, call.batch, self.written())

    def _tapped(self, name: str, function: Any, *, inputs: bool = False) -> Any:  # noqa: ANN401
        def tapped(x: Tensor) -> Tensor:
            if inputs:
                self.put(name + IN, x)
            out: Tensor = function(x)
            self.put(name, out, function)
            return out.clone()  # the layer goes on in place

        return tapped

    def _split(self, function: Any, layer: FusedLayer) -> Any:  # noqa: ANN401
        sizes = [layer.heads * layer.size, layer.kv_heads * layer.size, layer.kv_heads * layer.size]

        def tapped(x: Tensor) -> Tensor:
            out: Tensor = function(x)
            for name, part in zip("qkv", out.split(sizes, dim=-1), strict=True):
                self.put(f"self_attn.{name}_proj", part, function)
            return out

        return tapped

    def _halves(self, function: Any) -> Any:  # noqa: ANN401
        def tapped(x: Tensor) -> Tensor:
            out: Tensor = function(x)
            for name, part in zip(("gate", "up"), out.chunk(2, dim=-1), strict=True):
                self.put(f"mlp.{name}_proj", part, function)
            return out

        return tapped


class _TappedCache:
    """A KV cache of which what is written is tapped."""

    def __init__(self, real: KVCache, recorder: _Recorder) -> None:
        self.real, self._recorder = real, recorder

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401
        return getattr(self.real, name)

    def write(self, layer: int, slots: Tensor, key: Tensor, value: Tensor) -> None:
        """As KVCache.write."""
        self._recorder.put("self_attn.key", key.transpose(0, 1))
        self._recorder.put("self_attn.value", value.transpose(0, 1))
        self.real.write(layer, slots, key, value)

    def write_rows(self, layer: int, slots: Tensor, rows: Tensor) -> None:
        """As KVCache.write_rows."""
        shape = self.real.layers[layer]
        keys = shape.heads * shape.key_size
        self._recorder.put("self_attn.key", rows[:, :keys])
        self._recorder.put("self_attn.value", rows[:, keys:])
        self.real.write_rows(layer, slots, rows)


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


def code_of(made_by: object) -> str:
    """Where something is computed: file, line and name of the function, of a module its forward."""
    function = made_by
    if isinstance(made_by, nn.Module):
        function = type(made_by).forward if "forward" not in vars(made_by) else made_by.forward
    function = inspect.unwrap(getattr(function, "__func__", function))  # type: ignore[arg-type]
    code = getattr(function, "__code__", None)
    if code is None:
        kind = type(function)
        return f"{kind.__module__}.{kind.__qualname__}"
    place, root = Path(code.co_filename), Path(specscope.__file__).parent.parent
    shown = place.relative_to(root) if place.is_relative_to(root) else Path(*place.parts[-4:])
    return f"{shown}:{code.co_firstlineno} {getattr(function, '__qualname__', '')}"
