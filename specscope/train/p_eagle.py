"""`specscope train p-eagle`: a head that drafts all depths in one pass, in the layout of vLLM's speculators."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from specscope.model.heads.eagle_head import EagleHead
from specscope.model.heads.head_config import Parallel
from specscope.train.attend import HeadRotary, attend, project
from specscope.train.heads import going_on, mask_token_of, new_head
from specscope.train.scores import BatchScores, DepthScores, Padded, TargetTensors, ahead
from specscope.train.training import CommonRecipe, Training

# P-EAGLE's training: all depths of a position are predicted in one pass (Hui et al. 2026, arXiv 2602.01469).
#
# At index t the row of depth 0 is as in an EAGLE-3 head: the target's feature at t with the token at t + 1 predicts
# the token at t + 2. The mask row of depth d of the same t (its anchor) is at position t + d, attends to the rows of
# depth 0 up to t and to its anchor's mask rows 1..d, and predicts the token at t + 2 + d. A draft from t attends to
# the same rows.
#
# Deeper rows are made for fewer anchors (Conditional Drop-token sampling, section 4; vLLM's speculators 0.5,
# models/peagle/data.py): a share of keep^d, at least LEAST, and only for anchors that have the rows above. All mask
# rows are fed the same token and feature, so their queries, keys and values are computed once and only rotated.

LEAST = 0.2  # of the positions: the least share of anchors at any depth, as in vLLM's speculators


@dataclass(frozen=True)
class Anchors:
    """Which positions get mask rows: depth d has those in the first `sizes[d - 1]` columns."""

    positions: Tensor  # int64 [B, A] in each sequence
    sizes: tuple[int, ...]  # of depth 1, 2, ...; never growing


def every_anchor(batch: Padded, depths: int) -> Anchors:
    """All positions at all depths."""
    size, length = batch.tokens.shape
    positions = torch.arange(length, device=batch.tokens.device).expand(size, length)
    return Anchors(positions, (length,) * (depths - 1))


def sampled_anchors(batch: Padded, depths: int, keep: float, seed: int) -> Anchors:
    """A random choice that depends only on the seed and the batch. keep: the share from depth to depth."""
    fits = ahead(batch.real & batch.learn, 2)  # what depth 1 learns there
    chance = torch.rand(fits.shape, generator=torch.Generator().manual_seed(seed)).to(fits.device)
    count = int(fits.sum(-1).max())
    sizes = tuple(round(count * max(keep**depth, LEAST)) for depth in range(1, depths))
    return Anchors(chance.masked_fill(~fits, 2.0).argsort(-1)[:, : max(sizes, default=0)], sizes)


def forward(head: EagleHead, target: TargetTensors, batch: Padded, anchors: Anchors) -> BatchScores:
    """One pass over a batch, with mask rows at the anchors; the loss is differentiable. Scores by depth, from 0."""
    size, length = batch.tokens.shape
    wanted = target.wanted(batch.final).flatten(0, 1)
    learnt = functional.pad(batch.real & batch.learn, (0, len(anchors.sizes) + 2))
    first = torch.arange(size, device=batch.tokens.device)[:, None]  # row of each sequence
    rows = _rows(head, target, batch, anchors)
    selected, p = [], []
    for depth, (places, residual, mixed) in enumerate(rows):
        counts = learnt[first, places + depth + 1]
        label = (first * length + places + depth + 1)[counts]
        selected.append((residual.expand(*mixed.shape[:2], -1)[counts], mixed[counts]))
        p.append(wanted[label])
    logits = _rest(head, torch.cat([x for x, _ in selected]), torch.cat([y for _, y in selected]))
    scores = DepthScores()
    for depth_logits, q in zip(logits.split([len(x) for x, _ in selected]), p, strict=True):
        scores.add(depth_logits, q)
    return scores.total()


def _rows(
    head: EagleHead, target: TargetTensors, batch: Padded, anchors: Anchors
) -> list[tuple[Tensor, Tensor, Tensor]]:
    """By depth: anchors [B, n], residual stream [B or 1, n or 1, width], attention's output [B, n, heads * D]."""
    assert head.config.parallel is not None
    (size, length), kv_heads = batch.tokens.shape, head.midlayer.self_attn.kv_heads
    places, rotary = torch.arange(length, device=batch.tokens.device), HeadRotary(head, length)
    embedding = functional.embedding(ahead(batch.tokens, 1), target.embedding)
    residual, projected = head.prepare(embedding, head.combine(batch.features))
    q, k, v = project(head, projected)
    context = rotary.turn(k, places), v
    mixed = attend(rotary.turn(q, places), context, [], places <= places[:, None], kv_heads)
    rows = [(places.expand(size, length), residual, mixed)]

    token = target.embedding[head.config.parallel.mask_token][None]
    residual, projected = head.prepare(token, head.combine(head.mask_features()))
    q, k, v = project(head, projected)  # [1, heads, D]: of every mask row
    mask_kv: list[tuple[Tensor, Tensor]] = []
    for depth, count in enumerate(anchors.sizes, 1):
        positions = anchors.positions[:, :count]
        mask_kv = [(key[:, :count], value[:, :count]) for key, value in mask_kv]
        mask_kv.append((rotary.turn(k, positions + depth), v.expand(size, count, -1, -1)))
        seen = (places <= positions[..., None])[:, None, None]  # [B, 1, 1, n, T]
        rows.append(
            (positions, residual[None], attend(rotary.turn(q, positions + depth), context, mask_kv, seen, kv_heads))
        )
    return rows


def _rest(head: EagleHead, residual: Tensor, mixed: Tensor) -> Tensor:
    """From the residual stream [N, width] and attention's output to logits [N, draft vocabulary]."""
    layer = head.midlayer
    x = residual + layer.self_attn.o_proj(mixed)
    x = x + layer.mlp(layer.post_attention_layernorm(x))
    logits: Tensor = head.lm_head(head.norm(x))
    return logits


@dataclass(frozen=True, kw_only=True)
class PEagleRecipe(CommonRecipe):
    """Everything that decides a training run besides the data."""

    depths: int = 4  # tokens that one pass drafts
    keep_ratio: float = 0.7  # share of a depth's positions that are also trained at the next depth


class PEagleTraining(Training):
    """A P-EAGLE head in training. An EAGLE-3 head is a good start: only mask rows are new to it."""

    kind, verb = "P-EAGLE", "p-eagle"
    recipe: PEagleRecipe

    @property
    def depths(self) -> int:
        """Tokens drafted in one pass."""
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
        """`mask_hidden` is of the size of features, far from 1: its learning rate is scaled by that size."""
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
