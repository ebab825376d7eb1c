"""`specscope train eagle3`: from a folder of data to a head in the published format."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from specscope.model.heads.eagle_head import EagleHead
from specscope.train.attend import HeadRotary, attend, project
from specscope.train.heads import going_on, new_head
from specscope.train.scores import BatchScores, DepthScores, Padded, TargetTensors, ahead
from specscope.train.training import CommonRecipe, Training

# Training-time test: a head is trained on its own outputs, as in inference (EAGLE-3, Li et al. 2025, section 3.2).
#
# At index t, step 0 attends to the target's features up to t, with the token at t + 1, and predicts the token at t + 2.
# Step k continues from step k - 1's own hidden state at t, with the token at t + 1 + k: its queries attend to the keys
# of step 0 up to t, and of steps 1..k at t alone, which are the nodes of a chain drafted from t.


def forward(head: EagleHead, target: TargetTensors, batch: Padded, steps: int) -> BatchScores:
    """Run the head `steps` times over a batch; the loss is differentiable.

    Positions where the prediction follows a token that was given to the target are left out.
    """
    wanted, fed = target.wanted(batch.final), head.combine(batch.features)
    cache, scores = _Cache(head, batch.tokens.shape[1]), DepthScores()
    for step in range(steps):
        shift = step + 1
        tokens = ahead(batch.tokens, shift)
        x = _layer(head, functional.embedding(tokens, target.embedding), fed, cache, step)
        normed, fed = head.leave(x)
        logits = head.lm_head(normed)
        counts = ahead(batch.real & batch.learn, shift)
        scores.add(logits[counts], ahead(wanted, shift)[counts])
    return scores.total()


class _Cache:
    """Keys and values of the steps so far, and the rotary tables."""

    def __init__(self, head: EagleHead, length: int) -> None:
        self.kv: list[tuple[Tensor, Tensor]] = []
        self.rotary = HeadRotary(head, length)
        self.causal = torch.ones(length, length, dtype=torch.bool, device=head.fc.weight.device).tril()


def _layer(head: EagleHead, embedding: Tensor, hidden: Tensor, cache: _Cache, step: int) -> Tensor:
    """One pass of the layer over [B, T, width]: a position attends to step 0 up to it, to later ones at itself."""
    layer = head.midlayer
    residual, projected = head.prepare(embedding, hidden)
    q, k, v = project(head, projected)
    positions = slice(step, step + q.shape[1])
    cache.kv.append((cache.rotary.turn(k, positions), v))
    mixed = attend(cache.rotary.turn(q, positions), cache.kv[0], cache.kv[1:], cache.causal, layer.self_attn.kv_heads)
    x = residual + layer.self_attn.o_proj(mixed)
    out: Tensor = x + layer.mlp(layer.post_attention_layernorm(x))
    return out


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
