"""HeadRunner: an EAGLE head, its paged KV cache, and one pass over a ragged batch."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn

from specscope.model.attention import Variant
from specscope.model.batch import Batch, Segment
from specscope.model.fast.decoder import FusedLayer, Rotary
from specscope.model.fast.fast_paths import same_numbers
from specscope.model.fast.fuse import fuse_norms
from specscope.model.fast.linear import PackedLinear, compiled_rows, may_pack
from specscope.model.graphs import Graphs
from specscope.model.heads.head_loader import LoadedHead
from specscope.model.kv_cache import BLOCK_SIZE, BlockTable, KVCache, LayerShape
from specscope.model.loader import LoadedModel
from specscope.model.places import Backend

TRIAL_ROWS = 5


class HeadRunner:
    """Runs pairs of a token and a hidden state through a head."""

    def __init__(self, loaded: LoadedHead, target: LoadedModel, blocks: int, backend: Backend = Backend.TORCH) -> None:
        head = loaded.head
        weight = head.fc.weight
        attention = head.midlayer.self_attn
        self.loaded = loaded
        self.beside = partial(HeadRunner, loaded, target, backend=backend)  # with another cache, of so many blocks
        self.head = head
        self.aux_layers = head.config.aux_layers
        self.vocab_size = target.vocab_size
        self.d2t = head.target_tokens()
        shape = LayerShape(attention.kv_heads, attention.size, attention.size)
        layers = [head.midlayer, *head.layers.values()]
        self.cache = KVCache([shape] * len(layers), blocks, weight.dtype, weight.device, backend)
        pack = weight.device.type == "cpu" and may_pack(head)
        max_rows = compiled_rows(weight.dtype) if pack else 0
        self.compiles = max_rows > 0  # whether our own kernels for processors are used
        if self.compiles:
            fuse_norms(head)
        variants = [Variant(attention.size**-0.5, window, None, None) for window in head.config.windows]
        self.layer, *self.further = (
            FusedLayer(layer, shape, variant, None, pack=pack) for layer, variant in zip(layers, variants, strict=True)
        )
        is_eagle3 = head.config.version == 3
        self.lm_head: nn.Module = PackedLinear([head.lm_head], pack=pack) if is_eagle3 else loaded.lm_head
        self._fc: nn.Module = PackedLinear([head.fc], pack=pack) if is_eagle3 else nn.Identity()
        # No position lies beyond the cache, whatever context a config promises.
        positions = torch.arange(min(target.max_context, blocks * BLOCK_SIZE), device=weight.device)[None]
        # cos and sin of every position as the layer uses them, side by side: [positions, 2, 1, 2, size / 2]
        self._turns = torch.stack(Rotary()(*head.rotary(weight, positions)), dim=1)
        self.graphs = Graphs(self.cache, [weight.new_zeros(1, head.fc.out_features)])
        if self.compiles:
            self._compile(max_rows)

    def _compile(self, max_rows: int) -> None:
        """Compile the layers, where a pass over a few rows then comes out alike. Before the cache is used."""
        rows = min(TRIAL_ROWS, len(self._turns), BLOCK_SIZE)
        segment = Segment(BlockTable([0]), [0] * rows, 0, np.arange(rows), np.tri(rows, dtype=np.bool_), range(rows))
        width, dtype = self.head.config.width, self.head.fc.weight.dtype
        hidden = torch.randn(rows, width, generator=torch.Generator().manual_seed(0)).to(dtype)
        _, plain = self.forward([segment], hidden)
        self.layer.compile(max_rows, norms=False)
        for layer in self.further:
            layer.compile(max_rows)
        _, got = self.forward([segment], hidden)
        if not same_numbers(plain, got):
            self.compiles = False
            for layer in (self.layer, *self.further):
                layer.compiled = None

    @torch.inference_mode()
    def combine(self, features: Tensor) -> Tensor:
        """The target's features [N, aux_layers * target width] as hidden states [N, width] for `forward`."""
        return self._fc(self.head.before_fc(features))  # type: ignore[no-any-return]

    @torch.inference_mode()
    def forward(self, segments: Sequence[Segment], hidden: Tensor) -> tuple[Tensor, Tensor]:
        """One pass. hidden [N, width]: combined features, or what an earlier pass returned.

        Returns the logits of the wanted rows, [R, draft vocabulary], and their hidden states [R, width], which are the
        features of the pairs that follow.
        """
        replayed = self.graphs.replay(segments, hidden)
        if replayed is None:
            return self.run_batch(Batch.build(segments, self._turns.device, self.cache.backend), hidden)
        logits, out = replayed.outputs
        return logits[replayed.wanted], out[replayed.wanted]

    @torch.inference_mode()
    def run_batch(self, batch: Batch, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """`forward` of a batch that is laid out."""
        head = self.head
        x, projected = head.prepare(self.loaded.embedding(batch.tokens[0]), hidden)
        cos, sin = self._turns[batch.positions[0]].unbind(1)
        x = self.layer.run(x, projected, (cos, sin), batch, self.cache)
        for layer in self.further:
            x = layer.run(x, None, (cos, sin), batch, self.cache)
        normed, out = head.leave(x[batch.wanted])
        return self.lm_head(normed), out
