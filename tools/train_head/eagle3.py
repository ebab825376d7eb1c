"""Training-time test: a head is trained on its own outputs, as in inference (EAGLE-3, Li et al. 2025, section 3.2).

At index t, step 0 attends to the target's features up to t, with the token at t + 1, and predicts the token at t + 2.
Step k continues from step k - 1's own hidden state at t, with the token at t + 1 + k: its queries attend to the keys
of step 0 up to t, and of steps 1..k at t alone, which are the nodes of a chain drafted from t.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional
from transformers.models.llama.modeling_llama import rotate_half

from specscope.model.heads.eagle_head import EagleHead
from tools.train_head.scores import BatchScores, DepthScores, Padded, TargetTensors, ahead


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


FURTHER = 32  # positions beyond the end of the sequence that drafts may reach


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
    mixed = attend(cache.rotary.turn(q, positions), cache.kv[0], cache.kv[1:], cache.causal, k.shape[-2])
    x = residual + layer.self_attn.o_proj(mixed)
    out: Tensor = x + layer.mlp(layer.post_attention_layernorm(x))
    return out


class HeadRotary:
    """The rotary tables of a head for sequences of some length, and FURTHER positions beyond."""

    def __init__(self, head: EagleHead, length: int) -> None:
        weight = head.fc.weight
        positions = torch.arange(length + FURTHER, device=weight.device)[None]
        self.cos, self.sin = (table[0] for table in head.rotary(weight, positions))

    def turn(self, x: Tensor, positions: Tensor | slice) -> Tensor:
        """Rotate x [..., n, heads, D] by its positions, int64 [..., n] or a slice of n."""
        cos, sin = self.cos[positions].unsqueeze(-2), self.sin[positions].unsqueeze(-2)
        turned: Tensor = x * cos + rotate_half(x) * sin
        return turned


def project(head: EagleHead, projected: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values, [..., heads, D] each and not rotated, of the output of `EagleHead.prepare`."""
    attention = head.midlayer.self_attn
    parts = (attention.q_proj, attention.k_proj, attention.v_proj)
    q, k, v = (part(projected).unflatten(-1, (-1, attention.head_dim)) for part in parts)
    return q, k, v


def attend(
    q: Tensor, context: tuple[Tensor, Tensor], extra: Sequence[tuple[Tensor, Tensor]], seen: Tensor, kv_heads: int
) -> Tensor:
    """Attention over a sequence, and over a few rows of each query's own. Returns [B, n, heads * D].

    q [B, n, heads, D]; context keys and values [B, S, KV heads, D]; extra: keys and values [B, n, KV heads, D], seen by
    the query of the same place alone; seen: bool, of a shape that broadcasts to [B, KV heads, G, n, S].
    """
    q = q.unflatten(2, (kv_heads, -1))  # [B, n, kv, G, D]
    scores = torch.einsum("btkgd,bskd->bkgts", q, context[0])
    scores = scores.masked_fill(~seen, torch.finfo(scores.dtype).min)
    single = [torch.einsum("btkgd,btkd->bkgt", q, key)[..., None] for key, _ in extra]
    weights = torch.cat([scores, *single], dim=-1) * q.shape[-1] ** -0.5
    weights = weights.float().softmax(-1).to(context[1].dtype)
    length = scores.shape[-1]
    out = torch.einsum("bkgts,bskd->btkgd", weights[..., :length], context[1])
    for i, (_, value) in enumerate(extra):
        out = out + torch.einsum("bkgt,btkd->btkgd", weights[..., length + i], value)
    return out.flatten(2)
