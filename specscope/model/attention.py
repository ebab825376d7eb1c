"""The attention function that transformers' models call: paged KV, any ancestor mask, any of their variants.

This is the torch backend: the default on the CPU, and the reference. It is registered with transformers'
AttentionInterface under BACKEND; the batch and the cache arrive as keyword arguments of the model's forward.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.modeling_utils import AttentionInterface

from specscope.model.batch import Batch, Group
from specscope.model.kv_cache import KVCache

if TYPE_CHECKING:
    from specscope.kernels.tree_batch import TreeBatch

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

    query [B, Hkv, G * M, D], key [B, Hkv, K, D], value [B, Hkv, K, E], bias additive float32 [B, 1, G * M, K], sinks
    [H]. Returns [B, Hkv, G * M, E]. The G query heads that share a key head are folded into rows, M each, so that no
    key is repeated. Without soft-cap and sinks it is torch's fused attention; with them, plain products with a
    float32 softmax.
    """
    if softcap is None and sinks is None:
        mask = None if bias is None else bias.to(query.dtype)
        return functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale)
    scores = (query @ key.transpose(2, 3)).float() * scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if bias is not None:
        scores = scores + bias
    if sinks is not None:
        by_head = sinks.float().view(1, query.shape[1], -1, 1, 1)
        sink = by_head.expand(len(query), -1, -1, query.shape[2] // by_head.shape[2], 1).flatten(2, 3)
        weights = torch.cat([scores, sink], dim=-1).softmax(-1)[..., :-1]
    else:
        weights = scores.softmax(-1)
    return weights.to(value.dtype) @ value


@dataclass(frozen=True)
class Variant:
    """What distinguishes the attention of one layer."""

    scale: float
    window: int | None
    softcap: float | None
    sinks: Tensor | None


def _group_attention(query: Tensor, layer: int, cache: KVCache, group: Group, variant: Variant) -> Tensor:
    """Attention of one padded group. query [N, H, D]; returns [real rows, H, E]."""
    key, value = group.context(cache, layer)
    rows = query[group.rows]
    (padded, heads, size), kv_heads = rows.shape, key.shape[1]
    fold, alone = heads // kv_heads, padded == group.size  # alone: one row a segment, nothing to turn round
    if alone:
        q = rows.view(padded, kv_heads, fold, size)
    else:
        q = rows.view(group.size, -1, kv_heads, fold, size).permute(0, 2, 3, 1, 4).flatten(2, 3)
    out = attend(q, key, value, group.bias(variant.window, fold), variant.scale, variant.softcap, variant.sinks)
    if not alone:
        out = out.unflatten(2, (fold, -1)).permute(0, 3, 1, 2, 4)
    flat = out.reshape(padded, heads, -1)
    return flat if group.real is None else flat.index_select(0, group.real)


def paged_attention(query: Tensor, layer: int, cache: KVCache, batch: Batch, variant: Variant) -> Tensor:
    """Attention of every row of the batch over its own context in the cache. query [N, H, D]; returns [N, H, E]."""
    if batch.tree is not None:
        return _kernel_attention(query, layer, cache, batch.tree, variant)
    parts = [_group_attention(query, layer, cache, group, variant) for group in batch.groups]
    if len(parts) == 1:
        return parts[0]
    out = parts[0].new_empty(query.shape[0], *parts[0].shape[1:])
    for group, part in zip(batch.groups, parts, strict=True):
        out[group.into] = part
    return out


def _kernel_attention(query: Tensor, layer: int, cache: KVCache, batch: TreeBatch, variant: Variant) -> Tensor:
    from specscope.kernels.tree_attention import Heads, tree_attention  # triton is imported only where it runs

    shape = cache.layers[layer]
    heads = Heads(shape.heads, shape.key_size, shape.value_size)
    return tree_attention(
        query,
        cache.rows[layer],
        heads,
        batch,
        scale=variant.scale,
        window=variant.window,
        softcap=variant.softcap,
        sinks=variant.sinks,
    )


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
    variants: dict[int, Variant] | None = None,
    **kwargs: Any,  # noqa: ANN401
) -> tuple[Tensor, None]:
    """What transformers calls in every layer. query [1, H, N, D], key and value [1, Hkv, N, D].

    Writes the new keys and values into the cache, then attends. Returns [1, N, H, E]. Where `variants` is given, the
    layer's is put into it, for those who go on without transformers.
    """
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    variant = Variant(scale, sliding_window, softcap, s_aux)
    if variants is not None:
        variants[layer] = variant
    cache.write(layer, batch.slots, key[0], value[0])
    return paged_attention(query[0].transpose(0, 1), layer, cache, batch, variant)[None], None


def register() -> None:
    """Make `attn_implementation="specscope"` known to transformers."""
    AttentionInterface.register(BACKEND, specscope_attention)
