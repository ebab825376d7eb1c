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
from specscope.speculate.drafters.model_drafter import Drafting, ModelDrafter
from specscope.speculate.drafters.tree_builder import Level
from specscope.trace.record.notes import MethodNotes


class ParallelEagle(Eagle):
    """Drafts with a P-EAGLE head. Its name in records is an EAGLE head's; their notes say that it was one pass."""

    runner: HeadRunner

    def __init__(self, runner: HeadRunner, plan: TreePlan, max_context: int, **notes: bool) -> None:
        super().__init__(runner, plan, max_context, **notes)
        self.rows_fed = (plan.max_depth, 2 * plan.max_depth)  # what was committed, with a row for each further depth
        self.mask_token = runner.head.config.mask_token or 0
        with torch.inference_mode():
            self._mask_hidden = runner.combine(runner.head.mask_features())  # [1, width]

    def grow(self, drafting: Sequence[Drafting]) -> None:
        """Grow the trees from one pass."""
        grow_at_once(self, drafting, self.max_depth - 1)

    def root_level(self, drafting: Sequence[Drafting], segments: list[Segment], features: Tensor) -> Level:
        """The pass over the committed pairs, with the mask rows of each request behind its own."""
        true = self.runner.combine(features).split([len(segment.tokens) for segment in segments])
        masks = self._mask_hidden.expand(self.max_depth - 1, -1)
        both = [x for rows in true for x in (rows, masks)]
        masked = [with_masks(segment, self.max_depth - 1, self.mask_token) for segment in segments]
        return self._level(masked, torch.cat(both))

    def _finish(self, g: Drafting) -> Draft:
        return noted_as_one(super()._finish(g))


def grow_at_once(drafter: ModelDrafter, drafting: Sequence[Drafting], rows: int) -> None:
    """Grow trees from one pass, in which the nodes of a frontier share the row of their depth.

    `rows`: that the pass feeds behind those that are committed.
    """
    level, row = drafter.run_pass(drafter.feed_context, drafting), dict[str, int]()
    for place, g in enumerate(drafting):
        row[g.context.request] = place * drafter.max_depth
        g.fed = [g.base - g.cached + rows]
    while drafting:
        for g in drafting:
            g.rows = [row[g.context.request]] * len(g.builder.frontier)
            row[g.context.request] += 1
        drafting = drafter.give_children(level, drafting)


def noted_as_one(draft: Draft) -> Draft:
    """A draft whose notes say that it came of one pass, and how sure the drafter is of the path down to each node."""
    assert draft.notes is not None
    sure = np.exp(np.minimum(draft.notes.score, 0), dtype=np.float32)
    return replace(draft, method=MethodNotes(confidence=sure, one_pass=True)) if len(draft.tree) else draft


def with_masks(segment: Segment, count: int, mask_token: int) -> Segment:
    """Pending pairs with `count` mask rows behind them; the rows of the root's pair and of the masks are wanted."""
    last, tokens = len(segment.tokens) - 1, segment.tokens + [mask_token] * count
    causal = Segment.of_tree(segment.table, segment.context, tokens, logits=False)
    return replace(causal, wanted=range(last, len(tokens)))
