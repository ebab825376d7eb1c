"""`specscope train eagle3`: from a folder of data to a head in the published format."""

from __future__ import annotations

from dataclasses import dataclass

from specscope.model.heads.eagle_head import EagleHead
from specscope.train.heads import going_on, new_head
from specscope.train.scores import BatchScores, Padded, TargetTensors
from specscope.train.training import CommonRecipe, Training
from specscope.train.ttt import forward


@dataclass(frozen=True, kw_only=True)
class Recipe(CommonRecipe):
    """Everything that decides a training run besides the data."""

    steps: int = 3  # training-time test: passes of the head over its own outputs
    norm_output: bool = False  # EAGLE-3.1: each pass is fed the normalised state of the one before


class Eagle3Training(Training):
    """An EAGLE-3 head in training."""

    kind, verb = "EAGLE-3", "eagle3"
    recipe: Recipe

    @property
    def depths(self) -> int:
        """A pass for each."""
        return self.recipe.steps

    @property
    def method(self) -> str:
        """Training-time test."""
        return f"{self.recipe.steps} passes of training-time test"

    def _make(self) -> tuple[EagleHead, TargetTensors]:
        make = going_on if self.recipe.start else new_head
        return make(self.target, self.data, self.samples, self.recipe, norm_output=self.recipe.norm_output)

    def _scores(self, batch: Padded, *, whole: bool) -> BatchScores:
        return forward(self.head, self.heads, batch, self.recipe.steps)
