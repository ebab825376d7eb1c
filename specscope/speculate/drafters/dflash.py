"""DFlash heads as drafters: one pass over a block of mask tokens gives the distributions of all depths.

What a block's rows see of the text are keys and values made of the target's features. So a step first writes those of
the positions that were committed since the last draft, then runs the block, whose slots are given back. As in vLLM
(v1/spec_decode/dflash.py) a block has the root's row and one for each depth of the tree: a shorter block than the head
was trained for is another input, with other drafts. Trees are grown from the depths' distributions as a P-EAGLE head's.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from specscope.errors import UserError
from specscope.model.batch import Segment
from specscope.model.heads.dflash import DFlashRunner, block_segment
from specscope.plans.plan import TreePlan
from specscope.speculate.drafters.base import Level
from specscope.speculate.drafters.eagle import HeadDrafter
from specscope.speculate.drafters.model_drafter import Drafting


class DFlash(HeadDrafter):
    """Drafts with a DFlash head.

    A draft takes as many slots as its block has rows, behind the committed positions, and gives them all back.
    """

    name = "dflash"
    runner: DFlashRunner
    behind = 0  # a slot holds the features of its own position

    def __init__(self, runner: DFlashRunner, plan: TreePlan, max_context: int, **notes: bool) -> None:
        """Raises UserError where the plan is deeper than the head's block."""
        super().__init__(runner, plan, max_context, **notes)
        config = runner.head.config
        if plan.max_depth > config.longest:
            raise UserError(
                f"the tree {plan} is {plan.max_depth} deep, but a block of {runner.loaded.name} drafts "
                f"{config.longest} tokens: use --tree {config.longest} or a shallower one"
            )
        self.ahead = self.max_fed = config.rows(plan.max_depth)
        self.rows_fed = (self.max_fed,)

    def write(self, segments: list[Segment], features: Tensor) -> None:
        """No pass: keys and values are made of the features alone.

        features [N, F]: the target's, at the positions that the segments feed.
        """
        self.runner.write_context(segments, self.runner.combine(features))

    def root_level(self, drafting: Sequence[Drafting], segments: list[Segment], features: Tensor) -> Level:
        """The pass over each request's block, which begins with its root.

        Rows of the level: for each request one a depth of the plan.
        """
        self.write(segments, features)
        config = self.runner.head.config
        blocks = [block_segment(g.state.table, g.base, g.context.tokens[-1], self.max_fed, config) for g in drafting]
        return self.level_of(self.runner.forward(blocks))
