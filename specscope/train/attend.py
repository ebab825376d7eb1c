"""Attention of a head in training: dense, over padded sequences. Shared by the ways to train one."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers.models.llama.modeling_llama import rotate_half

from specscope.model.heads.eagle_head import EagleHead

FURTHER = 32  # positions beyond the end of the sequence that drafts may reach


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
    q, k, v = (part(projected).unflatten(-1, (-1, attention.size)) for part in parts)
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
