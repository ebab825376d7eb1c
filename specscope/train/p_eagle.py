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
# At index t the row of depth 0 is an EAGLE-3 head's: the target's feature of t with the token at t + 1 gives the
# token at t + 2. The mask row of depth d of the same t (its anchor) lies at position t + d, sees the rows of depth 0
# up to t and its anchor's mask rows 1..d, and gives the token at t + 2 + d. That is what a draft from t will see.
#
# Deeper rows are made for fewer anchors (Conditional Drop-token sampling, section 4; vLLM's speculators 0.5,
# models/peagle/data.py): a share of keep^d, at least LEAST, and only for anchors that have the rows above. All mask
# rows are fed the same token and feature, so that their queries, keys and values are computed once, and only rotated.

LEAST = 0.2  # of the positions: as many anchors the deepest depth keeps, as in vLLM's speculators


@dataclass(frozen=True)
class Anchors:
    """Which positions get mask rows: depth d has those in the first `sizes[d - 1]` columns."""

    at: Tensor  # int64 [B, A] positions of each sequence
    sizes: tuple[int, ...]  # of depth 1, 2, ...; never growing


def every_anchor(batch: Padded, depths: int) -> Anchors:
    """All positions at all depths."""
    size, length = batch.tokens.shape
    at = torch.arange(length, device=batch.tokens.device).expand(size, length)
    return Anchors(at, (length,) * (depths - 1))


def sampled_anchors(batch: Padded, depths: int, keep: float, seed: int) -> Anchors:
    """A random choice that depends on nothing but the seed and the batch. keep: the share from depth to depth."""
    fits = ahead(batch.real & batch.learn, 2)  # what depth 1 learns there
    chance = torch.rand(fits.shape, generator=torch.Generator().manual_seed(seed)).to(fits.device)
    most = int(fits.sum(-1).max())
    sizes = tuple(round(most * max(keep**depth, LEAST)) for depth in range(1, depths))
    return Anchors(chance.masked_fill(~fits, 2.0).argsort(-1)[:, : max(sizes, default=0)], sizes)


def forward(head: EagleHead, target: TargetTensors, batch: Padded, anchors: Anchors) -> BatchScores:
    """One pass over a batch, with mask rows at the anchors; the loss is differentiable. Scores by depth, from 0."""
    size, length = batch.tokens.shape
    wanted = target.wanted(batch.final).flatten(0, 1)
    learnt = functional.pad(batch.real & batch.learn, (0, len(anchors.sizes) + 2))
    first = torch.arange(size, device=batch.tokens.device)[:, None]  # row of each sequence
    rows = _rows(head, target, batch, anchors)
    kept, p = [], []
    for depth, (at, residual, mixed) in enumerate(rows):
        counts = learnt[first, at + depth + 1]
        label = (first * length + at + depth + 1)[counts]
        kept.append((residual.expand(*mixed.shape[:2], -1)[counts], mixed[counts]))
        p.append(wanted[label])
    logits = _rest(head, torch.cat([x for x, _ in kept]), torch.cat([y for _, y in kept]))
    scores = DepthScores()
    for one, q in zip(logits.split([len(x) for x, _ in kept]), p, strict=True):
        scores.add(one, q)
    return scores.total()


def _rows(
    head: EagleHead, target: TargetTensors, batch: Padded, anchors: Anchors
) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Of each depth: anchors [B, n], residual stream [B or 1, n or 1, width], attention's output [B, n, heads * D]."""
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
    own: list[tuple[Tensor, Tensor]] = []
    for depth, count in enumerate(anchors.sizes, 1):
        at = anchors.at[:, :count]
        own = [(key[:, :count], value[:, :count]) for key, value in own]
        own.append((rotary.turn(k, at + depth), v.expand(size, count, -1, -1)))
        seen = (places <= at[..., None])[:, None, None]  # [B, 1, 1, n, T]
        rows.append((at, residual[None], attend(rotary.turn(q, at + depth), context, own, seen, kv_heads)))
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
