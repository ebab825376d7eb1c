"""ModelRunner: a model, its paged KV cache, and one forward pass over a ragged batch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specscope.model.backend import Backend
from specscope.model.batch import Batch, Segment
from specscope.model.features import FeatureTaps, Tap
from specscope.model.kv_cache import KVCache
from specscope.model.loader import LoadedModel


class ModelRunner:
    """Runs segments through a model. The target and each drafter that is a model have one of their own."""

    def __init__(
        self,
        loaded: LoadedModel,
        blocks: int,
        taps: Sequence[Tap] = (),
        backend: Backend = Backend.TORCH,
        *,
        cache: KVCache | None = None,
    ) -> None:
        """`cache`: another runner's over the same model, to share; else one of `blocks` blocks is made."""
        self.loaded = loaded
        self.cache = cache or KVCache(loaded.layers, blocks, loaded.dtype, loaded.device, backend)
        self._taps = FeatureTaps(loaded.model, taps) if taps else None

    def forward(self, segments: Sequence[Segment]) -> list[Tensor]:
        """Write the KV of every fed token and return the wanted logits, [rows, vocabulary] for each segment.

        Each segment's table must have room for its length (KVCache.reserve). The dtype is the model's.
        """
        return self.forward_with_features(segments)[0]

    @torch.inference_mode()
    def forward_with_features(self, segments: Sequence[Segment]) -> tuple[list[Tensor], list[Tensor]]:
        """As `forward`; besides the logits the features of every fed row, [rows, taps * width] for each segment.

        No features where the runner has no taps.
        """
        batch = Batch.build(segments, self.loaded.device, self.cache.backend)
        logits = self.loaded.model(
            input_ids=batch.tokens,
            position_ids=batch.positions,
            use_cache=False,
            logits_to_keep=batch.wanted,
            batch=batch,
            cache=self.cache,
        ).logits[0]
        features = [] if self._taps is None else list(self._taps.take().split([len(s.tokens) for s in segments]))
        return list(logits.split(batch.wanted_per_segment)), features
