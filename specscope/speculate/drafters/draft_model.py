"""A smaller causal LM as drafter, with a paged KV cache of its own."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

from specscope.model.batch import Segment
from specscope.model.kv_cache import BlockTable, KVCache
from specscope.model.runner import ModelRunner
from specscope.plans.plan import TreePlan
from specscope.speculate.drafters.base import Context
from specscope.speculate.drafters.model_drafter import PREFILL_CHUNK, Drafting, ModelDrafter, State
from specscope.speculate.drafters.tree_builder import Level
from specscope.trace.record.records import Verdict
from specscope.trace.record.tree import DraftTree


class DraftModel(ModelDrafter):
    """Drafts with any causal LM of the target's vocabulary.

    Committed tokens lie in its cache at their positions. The root is fed by `propose`, so that the cache then holds
    every committed token; the tree's nodes follow in the order in which they were fed.
    """

    name = "draft_model"

    def __init__(self, runner: ModelRunner, plan: TreePlan) -> None:
        super().__init__(plan, runner.cache, runner.loaded.max_context)
        self.runner: ModelRunner = runner

    def known(self, context: Context, state: State) -> int:
        """Every committed token, including the root."""
        return len(context.tokens)

    def feed_context(self, drafting: Sequence[Drafting]) -> Level:
        """Long stretches of committed tokens a chunk at a time, then the rest of every request, the root last."""
        for g in drafting:
            while g.base - g.state.computed > PREFILL_CHUNK:
                self.runner.forward([self.pending(g, PREFILL_CHUNK, logits=False)])
        segments = [self.pending(g, g.base - g.state.computed, logits=True) for g in drafting]
        return self._level(self.runner.forward(segments))

    def pending(self, g: Drafting, count: int, *, logits: bool) -> Segment:
        """The next `count` committed tokens of a request."""
        start = g.state.computed
        g.state.computed += count
        tokens = list(g.context.tokens[start : start + count])
        return Segment.of_tree(g.state.table, start, tokens, logits=logits)

    def afresh(
        self, tokens: Sequence[int], count: int, features: Sequence[Tensor], blocks: int
    ) -> tuple[KVCache, BlockTable, Sequence[int]]:
        """A prefill of the committed tokens, which lie at their positions."""
        runner = ModelRunner(self.runner.loaded, blocks, backend=self.cache.backend)
        table, held = BlockTable(), tokens[:count]
        runner.cache.reserve(table, count, 0)
        deque(runner.compute(table, held), maxlen=0)
        return runner.cache, table, held

    def feed_frontier(self, drafting: Sequence[Drafting]) -> Level:
        """Feed one row for each node of the frontiers."""
        return self._level(self.runner.forward([g.builder.segment(g.state.table, g.base) for g in drafting]))

    def _level(self, logits: list[Tensor]) -> Level:
        return Level(torch.cat(logits), self.runner.loaded.vocab_size)

    def commit(self, context: Context, tree: DraftTree, verdict: Verdict) -> None:
        """Move the accepted path's KV to its final slots, as far as the drafter has run it.

        The accepted leaf of a fully accepted path was never run; it is fed with the next root.
        """
        state = self.states[context.request]
        base = len(context.tokens)
        if state.computed != base:
            return  # nothing was drafted
        places = state.fed[verdict.path]
        count = int((places >= 0).cumprod().sum())
        slots = state.table.slots(base, base + int(state.fed.max(initial=-1)) + 1)
        source, target = slots[places[:count]], slots[:count]
        if (source != target).any():
            self.cache.move([(source, target)])
        state.computed = base + count
