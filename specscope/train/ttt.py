"""Training-time test: a head is trained on its own outputs, as it will be run (EAGLE-3, Li et al. 2025, section 3.2).

At index t step 0 sees the target's features up to t, with the token at t + 1, and guesses the token at t + 2. Step k
goes on from step k - 1's own hidden state at t, with the token at t + 1 + k: its queries see the keys of step 0 up to
t, and of the steps 1..k at t alone, which are the nodes of a chain drafted from t.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional
from transformers.models.llama.modeling_llama import rotate_half

from specscope.model.eagle_head import EagleHead

DECAY = 0.8  # the weight of a step over that of the one before it, as in the authors' code


@dataclass(frozen=True)
class Padded:
    """Samples of one training step, padded on the right: B sequences of T tokens."""

    tokens: Tensor  # int64 [B, T]
    real: Tensor  # bool [B, T]
    learn: Tensor  # bool [B, T] False in what was given to the target
    features: Tensor  # [B, T, aux_layers * target width]
    final: Tensor  # [B, T, target width]


@dataclass(frozen=True)
class BatchScores:
    """What a batch gave, step by step: loss, and sums over the positions that count."""

    loss: Tensor
    positions: list[int]
    first: list[int]  # the head's first choice is the target's
    among: list[int]  # the target's choice is among the head's first four
    by_step: list[float]  # mean loss


class TargetTensors:
    """The tensors that training needs of a target besides the data: embedding and the rows of its head."""

    def __init__(self, embedding: Tensor, rows: Tensor) -> None:
        self.embedding = embedding  # [V, width]
        self.rows = rows  # [draft vocabulary, width] of the target's head


def forward(head: EagleHead, target: TargetTensors, batch: Padded, steps: int) -> BatchScores:
    """Run the head `steps` times over a batch; the loss is differentiable.

    Cross-entropy with the target's distribution over the draft vocabulary, averaged over positions and weighted over
    steps. Positions whose most likely token (of the draft vocabulary) follows something given are left out.
    """
    length = batch.tokens.shape[1]
    with torch.no_grad(), torch.autocast(batch.final.device.type, enabled=False):  # what is learnt stays exact
        wanted = (batch.final @ target.rows.T).float().softmax(-1)  # the target's choice after each token
        best = wanted.argmax(-1)
    hidden = head.combine(batch.features)
    cache = _Cache(head, length)
    losses, positions, first, among = [], [], [], []
    for step in range(steps):
        shift = step + 1
        tokens = _ahead(batch.tokens, shift)
        hidden = _layer(head, functional.embedding(tokens, target.embedding), hidden, cache, step)
        logits = head.lm_head(head.norm(hidden)).float()
        counts = _ahead(batch.real & batch.learn, shift)
        rows = logits[counts]
        p, choice = _ahead(wanted, shift)[counts], _ahead(best, shift)[counts]
        losses.append(-(p * rows.log_softmax(-1)).sum() / max(len(rows), 1))
        with torch.no_grad():
            top = rows.topk(4, dim=-1).indices == choice[:, None]
        positions.append(len(rows))
        first.append(int(top[:, 0].sum()))
        among.append(int(top.sum()))
    weights = [DECAY**step for step in range(steps)]
    loss = torch.stack([w * x for w, x in zip(weights, losses, strict=True)]).sum() / sum(weights)
    return BatchScores(loss, positions, first, among, [float(x.detach()) for x in losses])


def _ahead(x: Tensor, by: int) -> Tensor:
    """x [B, T, ...] seen `by` positions further on; zeros where it ends."""
    return functional.pad(x[:, by:], (0, 0) * (x.dim() - 2) + (0, min(by, x.shape[1])))


class _Cache:
    """Keys and values of the steps so far, and the rotary tables."""

    def __init__(self, head: EagleHead, length: int) -> None:
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        weight = head.fc.weight
        self.causal = torch.ones(length, length, dtype=torch.bool, device=weight.device).tril()
        positions = torch.arange(length + 32, device=weight.device)[None]
        self.cos, self.sin = (table[0] for table in head.rotary(weight, positions))

    def turn(self, x: Tensor, step: int) -> Tensor:
        """Rotate x [B, T, heads, D] by its positions at a step."""
        rows = slice(step, step + x.shape[1])
        turned: Tensor = x * self.cos[rows, None] + rotate_half(x) * self.sin[rows, None]
        return turned


def _layer(head: EagleHead, embedding: Tensor, hidden: Tensor, cache: _Cache, step: int) -> Tensor:
    """One pass of the head's layer over [B, T, width]."""
    layer = head.midlayer
    residual, projected = head.prepare(embedding, hidden)
    x = residual + layer.self_attn.o_proj(_attend(head, projected, cache, step))
    out: Tensor = x + layer.mlp(layer.post_attention_layernorm(x))
    return out


def _attend(head: EagleHead, projected: Tensor, cache: _Cache, step: int) -> Tensor:
    """Attention over step 0 up to each position, and over the later steps at the position itself. [B, T, heads * D]."""
    attention = head.midlayer.self_attn
    size, kv = attention.size, attention.kv_heads
    q, k, v = (
        part(projected).view(*projected.shape[:2], -1, size)
        for part in (attention.q_proj, attention.k_proj, attention.v_proj)
    )
    q = cache.turn(q, step).view(*projected.shape[:2], kv, -1, size)  # [B, T, kv, G, D]
    cache.keys.append(cache.turn(k, step))
    cache.values.append(v)
    scores = torch.einsum("btkgd,bskd->bkgts", q, cache.keys[0])
    scores = scores.masked_fill(~cache.causal, torch.finfo(scores.dtype).min)
    own = [torch.einsum("btkgd,btkd->bkgt", q, key)[..., None] for key in cache.keys[1:]]
    weights = (torch.cat([scores, *own], dim=-1) * size**-0.5).float().softmax(-1).to(v.dtype)
    length = scores.shape[-1]
    out = torch.einsum("bkgts,bskd->btkgd", weights[..., :length], cache.values[0])
    for i, value in enumerate(cache.values[1:]):
        out = out + torch.einsum("bkgt,btkd->btkgd", weights[..., length + i], value)
    return out.flatten(2)
