"""Compiled layers that follow each other, in one call: thirty calls cost a small model a tenth of a step."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from specscope.model.batch import Batch
from specscope.model.decoder import FusedLayer
from specscope.model.kv_cache import KVCache

Rotation = tuple[Tensor, Tensor]  # cos and sin of the rows' positions


class LayerStack:
    """Layers that are computed when the first of them is called; each then gives out what is its own.

    The model's loop over its layers stays as it is, and hooks on them see what they would see. A layer that is handed
    another tensor than the one before it gave computes by itself; what a hook changes in place is not noticed.
    """

    def __init__(self, layers: Sequence[FusedLayer]) -> None:
        """Of compiled layers in their order, all with the same rotation and kinds of caches."""
        from specscope.kernels.cpu.layer import CompiledLayers  # numba is imported only where it runs

        self._layers = list(layers)
        self._kernel = CompiledLayers([layer.parts for layer in layers if layer.parts is not None])
        self._made: Sequence[Tensor] = ()  # [1, N, width] each: what the layers make in this pass
        self._sin: Tensor | None = None  # of this pass

    def after(self, layer: FusedLayer, x: Tensor, rotation: Rotation, batch: Batch, cache: KVCache) -> Tensor | None:
        """What a layer of the stack makes of x [1, N, width]; None where it must compute that by itself."""
        at = layer.index - self._layers[0].index
        if at == 0:
            self._made, self._sin = self._compute(x, rotation, batch, cache), rotation[1]
        made = self._made
        if not made or (at and (x is not made[at - 1] or rotation[1] is not self._sin)):
            return None
        if layer is self._layers[-1]:
            self._made = ()
        return made[at]

    def _compute(self, x: Tensor, rotation: Rotation, batch: Batch, cache: KVCache) -> Sequence[Tensor]:
        """Nothing where rows go through in several batches: layer by layer, the weights are read once for all."""
        first = self._layers[0]
        compiled = all(layer.compiled is not None for layer in self._layers)
        if not compiled or not first.is_compiled_for(x[0], batch, cache) or len(batch.slabs) > 1:
            return ()
        cos, sin = first.rotary.wide(*rotation)
        stores = [cache.parts[layer.index][0] for layer in self._layers]
        return self._kernel(x[0], None, cos, sin, batch.slabs, stores)[:, None].unbind()
