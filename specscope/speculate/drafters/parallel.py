"""P-EAGLE heads as drafters: one pass gives the distributions of all depths.

Parallel drafting as in P-EAGLE (Hui et al. 2026, arXiv 2602.01469, section 3) and vLLM's `parallel_drafting` (0.33,
v1/spec_decode/utils.py, copy_and_expand_eagle_inputs_kernel): behind the root's pair come depth - 1 mask rows, each of
the mask token and the learned feature `mask_hidden`, at the positions that follow. All is causal: row d sees the
committed pairs and the mask rows before it, and gives the distribution of the tokens d deep, whatever path leads there.

A tree is chosen from these distributions as from those of an EAGLE head: a dynamic one is EAGLE-2's search, where a
path's score is the product of its depths' probabilities, and a static one takes the shape's top tokens, or draws each
node's children without replacement. Only committed pairs stay in the head's cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from specscope.model.batch import Segment
from specscope.model.heads.head_runner import HeadRunner
from specscope.plans.plan import TreePlan
from specscope.speculate.drafters.base import Draft
from specscope.speculate.drafters.eagle import Eagle
from specscope.speculate.drafters.model_drafter import Drafting
from specscope.speculate.drafters.tree_builder import Level
from specscope.trace.record.notes import MethodNotes
from specscope.trace.record.tree import DraftTree


class ParallelEagle(Eagle):
    """Drafts with a P-EAGLE head. Its name in records is an EAGLE head's; their notes say that it was one pass."""

    def __init__(self, runner: HeadRunner, plan: TreePlan, max_context: int, *, notes_features: bool = True) -> None:
        super().__init__(runner, plan, max_context, notes_features=notes_features)
        parallel = runner.head.config.parallel
        assert parallel is not None
        self.rows_fed = (plan.max_depth, 2 * plan.max_depth)  # what was committed, with a row for each further depth
        self.mask_token = parallel.mask_token
        with torch.inference_mode():
            self._mask_hidden = runner.combine(runner.head.mask_features())  # [1, width]

    def grow(self, drafting: Sequence[Drafting]) -> None:
        """Grow the trees from one pass: the nodes of a frontier share the row of their depth."""
        level, row = self.run_pass(self.feed_context, drafting), dict[str, int]()
        for place, g in enumerate(drafting):
            row[g.context.request] = place * self.max_depth
            g.fed = [g.base - g.cached + self.max_depth - 1]
        while drafting:
            for g in drafting:
                g.rows = [row[g.context.request]] * len(g.builder.frontier)
                row[g.context.request] += 1
            drafting = self.give_children(level, drafting)

    def _root_level(self, drafting: Sequence[Drafting], segments: list[Segment], hidden: Tensor) -> Level:
        """The pass over the committed pairs, with the mask rows of each request behind its own."""
        true = hidden.split([len(segment.tokens) for segment in segments])
        masks = self._mask_hidden.expand(self.max_depth - 1, -1)
        both = [x for rows in true for x in (rows, masks)]
        masked = [with_masks(segment, self.max_depth - 1, self.mask_token) for segment in segments]
        return self._level(masked, torch.cat(both))

    def _finish(self, g: Drafting) -> Draft:
        draft = super()._finish(g)
        assert draft.notes is not None
        sure = np.exp(np.minimum(draft.notes.score, 0), dtype=np.float32)  # of the whole path
        return replace(draft, method=MethodNotes(confidence=sure, one_pass=True)) if len(draft.tree) else draft


def with_masks(segment: Segment, count: int, mask_token: int) -> Segment:
    """Pending pairs with `count` mask rows behind them; the rows of the root's pair and of the masks are wanted."""
    last, tokens = len(segment.tokens) - 1, segment.tokens + [mask_token] * count
    causal = Segment.of_tree(segment.table, segment.context, tokens, DraftTree.empty(), logits=False)
    return replace(causal, wanted=range(last, len(tokens)))
