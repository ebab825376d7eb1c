"""HeadRunner: an EAGLE head, its paged KV cache, and one pass over a ragged batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from specscope.model.attention import Variant
from specscope.model.batch import Batch, Segment
from specscope.model.fast.decoder import FusedLayer, Rotary, fuse_norms
from specscope.model.fast.linear import PackedLinear, compiled_rows, may_pack, same_numbers
from specscope.model.graphs import Graphs
from specscope.model.heads.head_loader import LoadedHead
from specscope.model.kv_cache import BLOCK_SIZE, BlockTable, KVCache, LayerShape
from specscope.model.loader import LoadedModel
from specscope.model.places import Backend

TRIAL_ROWS = 5


class LayersRunner:
    """The decoder layers of a head over a paged KV cache of their own, and its projections: as fast as runs here."""

    def __init__(
        self,
        loaded: LoadedHead,
        layers: Sequence[Any],
        shape: LayerShape,  # of each
        rotary: nn.Module,
        target: LoadedModel,
        blocks: int,
        backend: Backend,
    ) -> None:
        head, weight = loaded.head, loaded.head.fc.weight
        self.loaded, self.head, self.vocab_size = loaded, head, target.vocab_size
        kind: Any = type(self)
        self.beside = partial(kind, loaded, target, backend=backend)  # with another cache, of so many blocks
        self.d2t, self.aux_layers = head.target_tokens(), head.config.aux_layers
        self.cache = KVCache([shape] * len(layers), blocks, weight.dtype, weight.device, backend)
        pack = weight.device.type == "cpu" and may_pack(head)
        self._max_rows = compiled_rows(weight.dtype) if pack else 0  # of our own kernels for processors
        if self._max_rows:
            fuse_norms(head)
        variants = [Variant(shape.key_size**-0.5, window, None, None) for window in head.config.windows]
        of = zip(layers, variants, strict=True)
        self.layers = [FusedLayer(layer, shape, variant, None, pack=pack) for layer, variant in of]
        own = hasattr(head, "lm_head")
        self.lm_head: nn.Module = PackedLinear([head.lm_head], pack=pack) if own else loaded.lm_head
        self.fc = PackedLinear([head.fc], pack=pack)
        # No position lies beyond the cache, whatever context a config promises.
        positions = torch.arange(min(target.max_context, blocks * BLOCK_SIZE), device=weight.device)[None]
        # cos and sin of every position as the layers use them, side by side: [positions, 2, 1, 2, size / 2]
        self._turns = torch.stack(Rotary()(*rotary(weight, positions)), dim=1)

    def build(self, segments: Sequence[Segment]) -> Batch:
        """The batch of a pass."""
        return Batch.build(segments, self.cache.device, self.cache.backend)

    def rotation(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """cos and sin of its rows."""
        cos, sin = self._turns[batch.positions[0]].unbind(1)
        return cos, sin

    def compile(self, trial: Callable[[], Tensor], *, first_norm: bool = True) -> None:
        """Compile the layers, where a pass over a few rows, `trial`, then comes out alike. Before the cache is used.

        `first_norm`: whether the first layer begins with a norm.
        """
        if not self._max_rows:
            return
        plain = trial()
        for index, layer in enumerate(self.layers):
            layer.compile(self._max_rows, norms=first_norm or index > 0)
        if not same_numbers(plain, trial()):
            for layer in self.layers:
                layer.compiled = None


class HeadRunner(LayersRunner):
    """Runs pairs of a token and a hidden state through a head."""

    def __init__(self, loaded: LoadedHead, target: LoadedModel, blocks: int, backend: Backend = Backend.TORCH) -> None:
        head, weight, attention = loaded.head, loaded.head.fc.weight, loaded.head.midlayer.self_attn
        layers, shape = [head.midlayer, *head.layers.values()], LayerShape(attention.kv_heads, *[attention.size] * 2)
        super().__init__(loaded, layers, shape, head.rotary, target, blocks, backend)
        self.layer, *self.further = self.layers
        self.graphs = Graphs(self.cache, [weight.new_zeros(1, head.fc.out_features)])
        rows = min(TRIAL_ROWS, len(self._turns), BLOCK_SIZE)
        segment = Segment(BlockTable([0]), [0] * rows, 0, np.arange(rows), np.tri(rows, dtype=np.bool_), range(rows))
        hidden = torch.randn(rows, head.config.width, generator=torch.Generator().manual_seed(0)).to(weight)
        self.compile(lambda: self.forward([segment], hidden)[1], first_norm=False)

    @torch.inference_mode()
    def combine(self, features: Tensor) -> Tensor:
        """The target's features [N, aux_layers * target width] as hidden states [N, width] for `forward`."""
        return self.fc(self.head.before_fc(features)) if self.head.config.version == 3 else features

    @torch.inference_mode()
    def forward(self, segments: Sequence[Segment], hidden: Tensor) -> tuple[Tensor, Tensor]:
        """One pass. hidden [N, width]: combined features, or what an earlier pass returned.

        Returns the logits of the wanted rows, [R, draft vocabulary], and their hidden states [R, width], which are the
        features of the pairs that follow.
        """
        replayed = self.graphs.replay(segments, hidden)
        if replayed is None:
            return self.run_batch(self.build(segments), hidden)
        logits, out = replayed.outputs
        return logits[replayed.wanted], out[replayed.wanted]

    @torch.inference_mode()
    def run_batch(self, batch: Batch, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """`forward` of a batch that is laid out."""
        x, projected = self.head.prepare(self.loaded.embedding(batch.tokens[0]), hidden)
        rotation = self.rotation(batch)
        x = self.layer.run(x, projected, rotation, batch, self.cache)
        for layer in self.further:
            x = layer.run(x, None, rotation, batch, self.cache)
        normed, out = self.head.leave(x[batch.wanted])
        return self.lm_head(normed), out
