"""Where in a paged cache each key and value lies: learned by writing numbers into a block of its own.

Every attention backend has a layout of its own; some interleave keys for their kernels. Each writes its cache through
`do_kv_cache_update`, so that is asked: a scratch block is written with numbered values, and read back as memory.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

BASE = 16  # of the digits that are written: each is exact in any dtype of a cache, float8 too


class KvReader:
    """Reads the cache of one attention layer. `why` says why it cannot."""

    def __init__(self, module: Any) -> None:
        """`module`: vLLM's Attention."""
        self._module = module
        self.why = ""
        cache = module.kv_cache
        update = getattr(module.impl, "do_kv_cache_update", None)
        if not isinstance(cache, Tensor) or cache.dim() < 2 or not cache.is_contiguous():
            self.why = "its cache is not a single tensor"
        elif update is None:
            self.why = f"{type(module.impl).__name__} does not write its cache in a separate call"
        else:
            self._learn(cache)

    def _learn(self, cache: Tensor) -> None:
        module = self._module
        heads, size = module.num_kv_heads, module.head_size
        value_size = getattr(module, "head_size_v", size)
        scratch = torch.zeros_like(cache[:1])
        self.block_size, left = divmod(scratch.numel(), heads * (size + value_size))
        if left:
            self.why = f"a block holds {scratch.numel()} numbers, not a whole number of rows"
            return
        rows = self.block_size
        keys = torch.arange(rows * heads * size).view(rows, heads, size)
        values = keys.numel() + torch.arange(rows * heads * value_size).view(rows, heads, value_size)
        slots = torch.arange(rows, device=cache.device)
        lying, weight = torch.zeros(scratch.numel(), dtype=torch.int64), 1
        is_plain = cache.is_floating_point() and cache.element_size() > 1
        dtype = cache.dtype if is_plain else torch.bfloat16  # a quantized cache is written from the model's keys
        while weight < scratch.numel():
            key, value = (((x // weight) % BASE).to(cache.device, dtype) for x in (keys, values))
            module.impl.do_kv_cache_update(module, key, value, scratch, slots)
            lying += scratch.flatten().float().round().long().cpu() * weight
            weight *= BASE
        places = torch.full((scratch.numel(),), -1)
        places[lying.clamp(0, scratch.numel() - 1)] = torch.arange(scratch.numel())
        if (places < 0).any():
            self.why = "its backend changes keys and values when it stores them"
            return
        self._keys, self._values = places[keys].to(cache.device), places[values].to(cache.device)

    def read(self, blocks: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """Keys and values [length, heads, size] of the first positions, through these blocks."""
        cache = self._module.kv_cache
        length = min(length, len(blocks) * self.block_size)
        used = blocks[: -(-length // self.block_size)].long().to(cache.device)
        memory = cache.view(cache.shape[0], -1)[used]
        keys, values = (memory[:, places].flatten(0, 1)[:length] for places in (self._keys, self._values))
        return keys, values
