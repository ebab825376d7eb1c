"""`specscope train p-eagle`: a head that drafts all depths in one pass, in the layout of vLLM's speculators."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from specscope.model.heads.eagle_head import EagleHead
from specscope.model.heads.head_config import Parallel
from specscope.train.heads import going_on, mask_token_of, new_head
from specscope.train.one_pass import every_anchor, forward, sampled_anchors
from specscope.train.scores import BatchScores, Padded, TargetTensors
from specscope.train.training import CommonRecipe, Training


@dataclass(frozen=True, kw_only=True)
class PEagleRecipe(CommonRecipe):
    """Everything that decides a training run besides the data."""

    depths: int = 4  # tokens that one pass drafts
    keep_ratio: float = 0.7  # of the positions at a depth, those that are learnt at the next one too


class PEagleTraining(Training):
    """A P-EAGLE head in training. An EAGLE-3 head is a good start: only mask rows are new to it."""

    kind, verb = "P-EAGLE", "p-eagle"
    recipe: PEagleRecipe

    @property
    def depths(self) -> int:
        """All of them in one pass."""
        return self.recipe.depths

    @property
    def method(self) -> str:
        """Anchors and depths."""
        recipe = self.recipe
        return f"{recipe.depths} depths in one pass, each at {recipe.keep_ratio:g} of the positions of the one above"

    def _make(self) -> tuple[EagleHead, TargetTensors]:
        token = mask_token_of(self.data.counts(self.target.vocab_size, self.samples))
        parallel = Parallel(token, self.recipe.depths, self.target.name)
        make = going_on if self.recipe.start else new_head
        return make(self.target, self.data, self.samples, self.recipe, parallel)

    def _groups(self) -> list[dict[str, Any]]:
        """`mask_hidden` lies where features do, far from 1: Adam's steps, which have the rate's size, follow it."""
        mask = self.head.mask_hidden
        others = [p for p in self.head.parameters() if p is not mask]
        return [
            {"params": others, "times": 1.0},
            {"params": [mask], "times": max(float(mask.detach().square().mean().sqrt()), 1e-3), "weight_decay": 0.0},
        ]

    def _scores(self, batch: Padded, *, whole: bool) -> BatchScores:
        depths, seed = self.recipe.depths, self.recipe.seed * 1_000_003 + self.step
        chosen = every_anchor(batch, depths) if whole else sampled_anchors(batch, depths, self.recipe.keep_ratio, seed)
        return forward(self.head, self.heads, batch, chosen)
