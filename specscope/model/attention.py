"""The attention function that transformers' models call: paged KV, any ancestor mask, any of their variants.

This is the torch backend: the default on the CPU, and the reference. It is registered with transformers'
AttentionInterface under BACKEND; the batch and the cache arrive as keyword arguments of the model's forward.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import AttentionInterface

from specscope.model.batch import Batch, Group
from specscope.model.kv_cache import KVCache

BACKEND = "specscope"


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """softmax(softcap(q k^T * scale) + bias) v, for grouped query heads, with attention sinks.

    query [B, Hkv, G, M, D], key [B, Hkv, K, D], value [B, Hkv, K, E], bias additive float32 [B, 1, G * M, K], sinks
    [H]. Returns [B, Hkv, G, M, E]. The query heads of a group are folded into rows, so that no key is repeated.
    Without soft-cap and sinks it is torch's fused attention; with them, plain products with a float32 softmax.
    """
    size, heads, group, rows, _ = query.shape
    folded = query.reshape(size, heads, group * rows, query.shape[-1])
    if softcap is None and sinks is None:
        mask = None if bias is None else bias.to(query.dtype)
        out = functional.scaled_dot_product_attention(folded, key, value, attn_mask=mask, scale=scale)
        return out.view(size, heads, group, rows, -1)
    scores = (folded @ key.transpose(2, 3)).float() * scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if bias is not None:
        scores = scores + bias
    if sinks is not None:
        sink = sinks.float().view(1, heads, group, 1, 1).expand(size, heads, group, rows, 1).flatten(2, 3)
        weights = torch.cat([scores, sink], dim=-1).softmax(-1)[..., :-1]
    else:
        weights = scores.softmax(-1)
    return (weights.to(value.dtype) @ value).view(size, heads, group, rows, -1)


def _group_attention(
    query: Tensor,
    layer: int,
    cache: KVCache,
    group: Group,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Attention of one padded group. query [H, N, D]; returns [real rows, H, E]."""
    key, value = group.gather(cache.key[layer], "key"), group.gather(cache.value[layer], "value")
    kv_heads = key.shape[1]
    rows = query if group.rows is None else query.index_select(1, group.rows)
    heads, _, size = rows.shape
    q = rows.view(kv_heads, heads // kv_heads, group.size, -1, size).permute(2, 0, 1, 3, 4)
    out = attend(q, key, value, group.bias(window, heads // kv_heads), scale, softcap, sinks)
    flat = out.permute(0, 3, 1, 2, 4).reshape(-1, heads, out.shape[-1])
    return flat if group.real is None else flat.index_select(0, group.real)


def specscope_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    *,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    batch: Batch,
    cache: KVCache,
    **kwargs: Any,  # noqa: ANN401
) -> tuple[Tensor, None]:
    """What transformers calls in every layer. query [1, H, N, D], key and value [1, Hkv, N, D].

    Writes the new keys and values into the cache, then attends. Returns [1, N, H, E].
    """
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    cache.write(layer, batch.slots, key[0], value[0])
    parts = [
        _group_attention(query[0], layer, cache, group, scale, sliding_window, softcap, s_aux) for group in batch.groups
    ]
    if len(parts) == 1:
        return parts[0][None], None
    out = torch.empty(query.shape[2], *parts[0].shape[1:], dtype=parts[0].dtype, device=query.device)
    for group, part in zip(batch.groups, parts, strict=True):
        rows = group.rows if group.real is None else group.rows.index_select(0, group.real)  # type: ignore[union-attr]
        out.index_copy_(0, rows, part)  # type: ignore[arg-type]
    return out[None], None


def register() -> None:
    """Make `attn_implementation="specscope"` known to transformers."""
    AttentionInterface.register(BACKEND, specscope_attention)
    AttentionMaskInterface.register(BACKEND, lambda *args, **kwargs: None)
