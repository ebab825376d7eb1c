"""The attention function that transformers' models call: paged KV, any ancestor mask, any of their variants.

This is the torch backend: the default on the CPU, and the reference. It is registered with transformers'
AttentionInterface under BACKEND; the batch and the cache arrive as keyword arguments of the model's forward.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_utils import AttentionInterface

from specscope.model.batch import Batch, Reach
from specscope.model.kv_cache import KVCache

BACKEND = "specscope"
FEW = 16  # rows of a sequence whose query heads are made rows, so that a key is read once for all of them
FUSED = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default


@dataclass(frozen=True)
class Variant:
    """What distinguishes the attention of one layer, by the names of tree_attention's arguments."""

    scale: float
    window: int | None
    softcap: float | None
    sinks: Tensor | None


def paged_attention(query: Tensor, layer: int, cache: KVCache, batch: Batch, variant: Variant) -> Tensor:
    """Attention of every row of the batch over its own context in the cache. query [N, H, D]; returns [N, H, E]."""
    if batch.tree is not None:
        from specscope.kernels.tree_attention import tree_attention  # triton is imported only where it runs

        return tree_attention(query, cache.rows[layer], cache.layers[layer], batch.tree, **vars(variant))
    key, value = cache.key[layer], cache.value[layer]
    plain = variant.softcap is None and variant.sinks is None and key.shape[-1] == value.shape[-1]
    attend = _fused if plain and query.device.type == "cpu" else _masked
    by_head = query.unflatten(1, (len(key), -1)).permute(1, 2, 0, 3)  # [Hkv, fold, N, D]
    given = [
        (by_head[:, :, reach.rows], key[:, reach.slots], value[:, reach.slots], reach, variant)
        for reach in batch.reaches(variant.window)
    ]
    each = [attend(*own) for own in given]
    out = _by_row(each)
    if not math.isfinite(out.sum(dtype=torch.float32)):
        out = _by_row([x if x.isfinite().all() else _kept_apart(*own) for x, own in zip(each, given, strict=True)])
    return out


def _by_row(each: list[Tensor]) -> Tensor:
    """What was made for each Reach [Hkv, fold, M, E] as rows [N, H, E]."""
    rows = [out.permute(2, 0, 1, 3).flatten(1, 2) for out in each]
    return rows[0] if len(rows) == 1 else torch.cat(rows)


def _fused(query: Tensor, key: Tensor, value: Tensor, reach: Reach, variant: Variant) -> Tensor:
    """torch's own. query [Hkv, fold, M, D], key [Hkv, K, D], value [Hkv, K, E]: [Hkv, fold, M, E]."""
    fold, rows = query.shape[1:3]
    few = rows <= FEW
    bias = reach.bias(query.dtype, fold if few else 1)
    by_head = (x[:, None] if few else x[:, None].expand(-1, fold, -1, -1) for x in (key, value))
    flat = query.flatten(1, 2)[:, None] if few else query
    out: Tensor = FUSED(flat, *by_head, attn_mask=bias, scale=variant.scale)[0]
    return out.reshape(*query.shape[:3], -1)


def _masked(query: Tensor, key: Tensor, value: Tensor, reach: Reach, variant: Variant) -> Tensor:
    """The same in plain operators, for every variant."""
    weights = _weights(query, key, reach, variant).to(value.dtype)
    return (weights.flatten(1, 2) @ value).unflatten(1, weights.shape[1:3])  # type: ignore[no-any-return]


def _weights(query: Tensor, key: Tensor, reach: Reach, variant: Variant) -> Tensor:
    """float32 [Hkv, fold, M, K]: 0 where a row does not see a slot."""
    flat = (query.flatten(1, 2) @ key.transpose(1, 2)).float() * variant.scale
    scores: Tensor = flat.unflatten(1, query.shape[1:3])
    if variant.softcap is not None:
        scores = torch.tanh(scores / variant.softcap) * variant.softcap
    scores = scores.masked_fill(~reach.seen, -torch.inf)
    if variant.sinks is not None:  # a logit of its own in each head's softmax, whose value is 0
        sinks = variant.sinks.float().view(len(key), -1, 1, 1)
        scores = torch.cat([scores, sinks.expand(-1, -1, scores.shape[2], -1)], dim=-1)
    return scores.softmax(-1)[..., : key.shape[1]]


def _kept_apart(query: Tensor, key: Tensor, value: Tensor, reach: Reach, variant: Variant) -> Tensor:
    """The same where something is not finite, which reaches only the rows that see it: 0 x NaN is NaN.

    In float32: a product in bfloat16 lets it into other rows.
    """
    weights = _weights(query.float(), key.float(), reach, variant)
    whole = key.isfinite().all(-1) & value.isfinite().all(-1)  # [Hkv, K]
    spoiled = (reach.seen & ~whole[:, None]).any(-1)[:, None, :, None]
    kept = value.float().masked_fill(~whole[..., None], 0.0)
    return (weights @ kept[:, None]).masked_fill(spoiled, torch.nan).to(query.dtype)


def specscope_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **named: Any,  # noqa: ANN401
) -> tuple[Tensor, None]:
    """What transformers calls in every layer. query [1, H, N, D], key and value [1, Hkv, N, D].

    Writes the new keys and values into `pages`, then attends over those of the `batch`. Returns [1, N, H, E]. Where
    `variants` is given, the layer's is put into it, for those who go on without transformers.
    """
    layer, batch, pages = int(module.layer_idx), named["batch"], named["pages"]  # type: ignore[arg-type]
    scale = query.shape[-1] ** -0.5 if named.get("scaling") is None else named["scaling"]
    variant = Variant(scale, *map(named.get, ("sliding_window", "softcap", "s_aux")))
    if named.get("variants") is not None:
        named["variants"][layer] = variant
    pages.write(layer, batch.slots, key[0], value[0])
    return paged_attention(query[0].transpose(0, 1), layer, pages, batch, variant)[None], None


AttentionInterface.register(BACKEND, specscope_attention)  # for `attn_implementation="specscope"`
