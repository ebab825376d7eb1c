"""Cheaper parts for a loaded model on the CPU, each proved equal to the one it replaces before it is put in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from specscope.model.attention import Variant
from specscope.model.batch import Batch, Segment
from specscope.model.fast.decoder import FusedLayer, FusedRMSNorm, Rotary, looks_alike
from specscope.model.fast.fast_paths import FUSE, disabled, same_numbers
from specscope.model.fast.linear import PackedLinear, compiled_rows, may_pack
from specscope.model.kv_cache import BlockTable, KVCache, LayerShape

Rotation = tuple[Tensor, Tensor]  # cos and sin of the rows' positions
ROWS = 5  # of a trial: enough for the path that more than a few rows take


@torch.no_grad()
def fuse(model: Any, layers: list[LayerShape]) -> None:  # noqa: ANN401
    """Replace what can be replaced in a model on the CPU that already attends through the paged cache.

    `layers`: what each of its layers keeps. What does not match is left alone.
    """
    weight = next(model.parameters())
    if weight.device.type != "cpu":
        return
    pack = may_pack(model)
    max_rows = compiled_rows(weight.dtype) if pack else 0
    if max_rows:
        fuse_norms(model)
    if FUSE not in disabled():
        _fuse_layers(model, layers, pack=pack, max_rows=max_rows)
    if pack:
        output = model.get_output_embeddings()
        pack_linear = lambda linear: PackedLinear([linear], pack=True, wide=linear is output)  # noqa: E731
        _swap(model, lambda module: pack_linear(module) if type(module) is nn.Linear else None)


def fuse_norms(model: nn.Module) -> None:
    """Put FusedRMSNorms in the place of a model's RMSNorms, unless the user switched that off."""

    def norm(module: Any) -> nn.Module | None:  # noqa: ANN401
        if type(module).__name__.endswith("RMSNorm") and hasattr(module, "variance_epsilon"):
            return FusedRMSNorm(module.weight, float(module.variance_epsilon))
        return None

    if FUSE not in disabled():
        _swap(model, norm)


def _swap(parent: nn.Module, make: Callable[[nn.Module], nn.Module | None]) -> None:
    """Put what `make` makes of a module in its place, where it is the same; fused layers are done already."""
    for name, child in list(parent.named_children()):
        new = make(child)
        if new is not None and _same(child, new):
            setattr(parent, name, new)
        elif not isinstance(child.forward, FusedLayer):
            _swap(child, make)


def _same(old: nn.Module, new: nn.Module) -> bool:
    """Whether both give the same on random input. What raises is not the same."""
    weight: Tensor = old.weight  # type: ignore[assignment]
    x = torch.randn(ROWS, weight.shape[-1], generator=torch.Generator().manual_seed(0)).to(weight.dtype)
    try:
        return same_numbers(old(x), new(x))
    except RuntimeError:
        return False


@dataclass
class _Call:
    """The inputs and the output of one call of a layer."""

    layer: nn.Module
    given: tuple[Any, ...]
    named: dict[str, Any]
    out: Any


def _fuse_layers(model: Any, layers: list[LayerShape], *, pack: bool, max_rows: int) -> None:  # noqa: ANN401
    """Let a FusedLayer stand for each layer that looks alike and gives the same in a trial.

    `max_rows`: how many go through one kernel at most.
    """
    variants: dict[int, Variant] = {}
    rotary = Rotary()
    runs: list[list[_Call]] = [[]]  # of calls, one behind the other, to layers that can be computed together
    for call in _trial(model, layers, variants):
        index = int(call.layer.self_attn.layer_idx)  # type: ignore[arg-type, union-attr]
        shape = layers[index]
        turned = call.named.get("position_embeddings")
        if len(call.given) != 1 or turned is None or {turned[0].shape[-1], shape.value_size} != {shape.key_size}:
            continue
        fused = FusedLayer(call.layer, shape, variants[index], rotary, pack=pack)
        if not _gives_the_same(fused, call):
            continue
        call.layer.forward = fused
        if max_rows:
            fused.compile(max_rows)
            if fused.compiled is not None and not _gives_the_same(fused, call):
                fused.compiled = None
        if fused.compiled is not None:
            before = runs[-1][-1] if runs[-1] else call
            same = turned[1] is before.named["position_embeddings"][1]  # rotation
            if before is not call and not (same and call.given[0] is before.out):
                runs.append([])
            runs[-1].append(call)
    for run in runs:
        _stack(run)


def _stack(run: list[_Call]) -> None:
    """Let layers be computed together, where that gives the same, bit for bit, as one after the other."""
    if len(run) < 2:
        return
    layers: list[FusedLayer] = [call.layer.forward for call in run]  # type: ignore[misc]
    stack = LayerStack(layers)
    alone = together = run[0].given[0]
    for layer, call in zip(layers, run, strict=True):
        rotation, batch, cache = (call.named[name] for name in ("position_embeddings", "batch", "pages"))
        alone = layer.run(alone[0], None, rotation, batch, cache)[None]
        together = stack.after(layer, together, rotation, batch, cache)
        if together is None or not torch.equal(alone, together):
            return
    for layer in layers:
        layer.stack = stack.after


def _gives_the_same(fused: FusedLayer, call: _Call) -> bool:
    """Whether a fused layer repeats a call with the same outcome. What raises does not."""
    try:
        return isinstance(call.out, Tensor) and same_numbers(call.out, fused(*call.given, **call.named))
    except RuntimeError:
        return False


def _trial(model: Any, layers: list[LayerShape], variants: dict[int, Variant]) -> list[_Call]:  # noqa: ANN401
    """Run a few tokens through the model; how each layer that looks alike was called. Fills `variants`.

    The tokens are far apart, up to the last position: a layer may treat distant ones in its own way.
    """
    calls: list[_Call] = []
    note = lambda layer, given, named, out: calls.append(_Call(layer, given, named, out))  # noqa: E731
    hooks = [m.register_forward_hook(note, with_kwargs=True) for m in model.modules() if looks_alike(m)]
    if not hooks:
        return []
    last = int(getattr(model.config.get_text_config(), "max_position_embeddings", None) or 2048) - 1
    segment = Segment(
        table=BlockTable([0]),
        tokens=[(7 * i + 3) % model.get_output_embeddings().weight.shape[0] for i in range(ROWS)],
        context=0,
        positions=np.linspace(0, last, ROWS).astype(np.int64),
        mask=np.tri(ROWS, dtype=np.bool_),
        wanted=[ROWS - 1],
    )
    weight = next(model.parameters())
    batch = Batch.build([segment], weight.device)
    cache = KVCache(layers, 1, weight.dtype, weight.device)
    named = {"batch": batch, "pages": cache, "variants": variants}
    model(input_ids=batch.tokens, position_ids=batch.positions, use_cache=False, **named)
    for hook in hooks:
        hook.remove()
    return calls


class LayerStack:
    """Layers that are computed when the first of them is called; each then gives out what is its own.

    Thirty calls cost a small model a tenth of a step.

    The model's loop over its layers stays as it is, and hooks on them see what they would see. A layer that is handed
    another tensor than the one before it gave computes by itself; what a hook changes in place is not noticed.
    """

    def __init__(self, layers: Sequence[FusedLayer]) -> None:
        """`layers`: compiled, in their order, all with the same rotation and kinds of caches."""
        from specscope.kernels.cpu.layer import CompiledLayers  # numba is imported only where it runs

        self._layers = list(layers)
        self._kernel = CompiledLayers([layer.parts for layer in layers if layer.parts is not None])
        self._made: Sequence[Tensor] = ()  # [1, N, width] each: what the layers make in this pass
        self._sin: Tensor | None = None  # of this pass

    def after(self, layer: FusedLayer, x: Tensor, rotation: Rotation, batch: Batch, cache: KVCache) -> Tensor | None:
        """What a layer of the stack makes of x [1, N, width]; None where it must compute that by itself."""
        index = layer.index - self._layers[0].index
        if index == 0:
            self._made, self._sin = self._compute(x, rotation, batch, cache), rotation[1]
        made = self._made
        if not made or (index and (x is not made[index - 1] or rotation[1] is not self._sin)):
            return None
        if layer is self._layers[-1]:
            self._made = ()
        return made[index]

    def _compute(self, x: Tensor, rotation: Rotation, batch: Batch, cache: KVCache) -> Sequence[Tensor]:
        """Nothing where rows go through in several batches: layer by layer, the weights are read once for all."""
        first = self._layers[0]
        compiled = all(layer.compiled is not None for layer in self._layers)
        if not compiled or not first.is_compiled_for(x[0], batch, cache) or len(batch.slabs) > 1:
            return ()
        cos, sin = (table.float() for table in first.tables(rotation))
        stores = [cache.parts[layer.index][0] for layer in self._layers]
        return self._kernel(x[0], None, cos, sin, batch.slabs, stores)[:, None].unbind()
