"""What `python -m benchmarks scale` runs: a few steps over made-up contexts, of this engine and transformers."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from specscope.analyze.audit.model.causal import cached
from specscope.engine.engine import Engine
from specscope.model.batch import Segment
from specscope.model.kv_cache import BlockTable, KVCache, LayerShape
from specscope.model.runner import ModelRunner
from specscope.trace.record.params import SamplingParams
from specscope.trace.record.tree import DraftTree

TURNS = 6  # of what contexts add to a step


class OwnDecoding:
    """This engine, greedy, without drafts. A call gives tokens/s."""

    def __init__(self, engine: Engine, lengths: Sequence[int], steps: int) -> None:
        self.engine, self.lengths, self.steps = engine, lengths, steps

    def __call__(self) -> float:
        """A step that does not count, in which the requests come in, and then some that do."""
        engine, params = self.engine, SamplingParams(max_tokens=self.steps + 2, ignore_eos=True)
        for length in self.lengths:
            request = engine.requests[engine.add([0] * (length + 1), params)]
            engine.runner.cache.reserve(request.table, length, 0)
            request.computed = length  # as if its KV were there: what is there is noise
        engine.step()
        start = time.perf_counter()
        for _ in range(self.steps):
            engine.step()
        seconds = time.perf_counter() - start
        engine.cancel_all()
        while engine.busy:
            engine.step()
        return self.steps * len(self.lengths) / seconds


class PaddedDecoding:
    """A transformers model with a DynamicCache, decoded as generate() does it: left-padded. A call gives tokens/s."""

    def __init__(self, model: Any, layers: Sequence[LayerShape], lengths: Sequence[int], steps: int) -> None:  # noqa: ANN401
        self.model, self.layers, self.lengths, self.steps = model, layers, lengths, steps

    @torch.inference_mode()
    def __call__(self) -> float:
        """As OwnDecoding."""
        device, longest = self.model.device, max(self.lengths)
        cache = self._cache(device)
        length = torch.tensor(self.lengths, device=device)[:, None]
        there = torch.arange(longest, device=device) >= longest - length
        tokens, seconds = torch.zeros_like(length), 0.0
        for step in range(self.steps + 1):
            start = time.perf_counter()
            mask = torch.cat([there, there.new_ones(len(there), step + 1)], dim=1).long()
            tokens = self._next(tokens, mask, length + step, cache)
            seconds += (time.perf_counter() - start) if step else 0.0
        return self.steps * len(self.lengths) / seconds

    def _next(self, tokens: Tensor, mask: Tensor, positions: Tensor, cache: Any) -> Tensor:  # noqa: ANN401
        out = self.model(input_ids=tokens, attention_mask=mask, position_ids=positions, **cached(self.model, cache))
        chosen: Tensor = out.logits[:, -1].argmax(-1, keepdim=True)
        chosen.tolist()  # generate() looks at it too
        return chosen

    def _cache(self, device: torch.device) -> Any:  # noqa: ANN401
        from transformers import DynamicCache

        cache, dtype = DynamicCache(config=self.model.config), self.model.dtype
        for layer, shape in enumerate(self.layers):
            sizes = [(len(self.lengths), shape.heads, max(self.lengths), n) for n in (shape.key_size, shape.value_size)]
            key, value = (torch.full(size, 0.1, dtype=dtype, device=device) for size in sizes)
            cache.update(key, value, layer)
        return cache


def fill(cache: KVCache) -> None:
    """Put numbers everywhere: pages that were never written are all one, and are not read from memory."""
    for store in (*cache.stores, *cache.rows):
        store.fill_(0.1)


def context_seconds(runner: ModelRunner, lengths: Sequence[int]) -> float:
    """What these contexts add to a step of decoding: attention, less what it takes where nothing lies before a row.

    A compiled layer does not tell its attention apart. The least of a few runs, with and without contexts in turn.
    """
    least = {True: math.inf, False: math.inf}
    for _ in range(TURNS):
        for whole in least:
            segments = []
            for length in lengths if whole else [0] * len(lengths):
                table = BlockTable()
                runner.cache.reserve(table, length + 1, 0)
                segments.append(Segment.of_tree(table, length, [0], DraftTree.empty(), logits=True))
            start = time.perf_counter()
            runner.forward(segments)
            least[whole] = min(least[whole], time.perf_counter() - start)
            for segment in segments:
                runner.cache.truncate(segment.table, 0)
    return max(least[True] - least[False], 0.0)
