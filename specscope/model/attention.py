"""The attention function that transformers' models call: paged KV, any ancestor mask, any of their variants.

This is the torch backend: the default on the CPU, and the reference. It is registered with transformers'
AttentionInterface under BACKEND; the batch and the cache arrive as keyword arguments of the model's forward.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers.modeling_utils import AttentionInterface

from specscope.kernels.tree_batch import put
from specscope.model.batch import Batch
from specscope.model.fast.fast_paths import has_bfloat16
from specscope.model.groups import AttentionGroup, Masks
from specscope.model.kv_cache import KVCache
from specscope.model.segment import Segment

if TYPE_CHECKING:
    from specscope.kernels.tree_batch import TreeBatch

BACKEND = "specscope"
MANY = 8  # sequences of a group from which on plain products in bfloat16 take less time than the fused attention
UNIT = 32  # rows that the fused attention gives a thread together, for each key head of each sequence
SPLIT = 2048  # slots from which on a part for each idle thread saves more than putting them together takes
IDLE = 0.2  # of the threads' time
# What scaled_dot_product_attention calls on a processor; it gives the logarithms of the sums too.
FUSED = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
Parts = tuple[Tensor, Tensor]  # as `attend` returns them
Read = Callable[[int, int], Parts]  # keys and values of slots that lie side by side


@dataclass(frozen=True)
class Variant:
    """What distinguishes the attention of one layer."""

    scale: float
    window: int | None
    softcap: float | None
    sinks: Tensor | None


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    scale: float,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """softmax(softcap(q k^T * scale) + bias) v, and the logarithm of the softmax's sum.

    query [Hkv, B, M, D], key [Hkv, B, K, D], value [Hkv, B, K, E], bias additive [1, B, M, K]. Returns [Hkv, B, M, E]
    and float32 [Hkv, B, M]. The query heads that share a key head are folded into rows, so that no key is repeated.
    torch's fused attention where it can; else plain products with a float32 softmax.
    """
    if softcap is None and key.device.type == "cpu" and key.shape[-1] == value.shape[-1]:
        out, sums = FUSED(query, key, value, attn_mask=bias, scale=scale)
        return out, sums
    scores = (query @ key.transpose(2, 3)).float() * scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if bias is not None:
        scores = scores + bias
    sums = scores.logsumexp(-1)
    return (scores - sums[..., None]).exp().to(value.dtype) @ value, sums


def parts_of(kv_heads: int, rows: int, slots: int) -> int:
    """In how many parts a sequence's keys are best read, so that no thread is idle while others work."""
    threads, units = torch.get_num_threads(), kv_heads * -(-rows // UNIT)  # that the fused attention has without that
    idle = -units % threads
    return threads if slots >= max(SPLIT, threads) and idle > IDLE * (units + idle) else 1


def _attend_in_parts(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, variant: Variant) -> Parts:
    """`attend` of one segment's rows [Hkv, 1, M, D] on parts of its keys [Hkv, P, K, D]."""
    out, sums = attend(query.expand(-1, key.shape[1], -1, -1), key, value, bias, variant.scale, variant.softcap)
    share = sums.softmax(1)[..., None]
    return (out.float() * share).sum(1, keepdim=True), sums.logsumexp(1, keepdim=True)


def _attend_in_place(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, variant: Variant) -> Parts:
    """`attend` of one segment's rows [Hkv, 1, M, D] on keys [Hkv, 1, K, D] where they lie."""
    parts = parts_of(len(key), query.shape[2], key.shape[2]) if key.device.type == "cpu" else 1
    if bias is not None or parts == 1 or key.shape[2] % parts:
        return attend(query, key, value, bias, variant.scale, variant.softcap)
    key, value = (x.unflatten(2, (parts, -1)).squeeze(1) for x in (key, value))
    return _attend_in_parts(query, key, value, None, variant)


def _group_attention(query: Tensor, layer: int, cache: KVCache, group: AttentionGroup, variant: Variant) -> Tensor:
    """Attention of one padded group. query [N, H, D]; returns [real rows, H, E].

    The softmax over all of a context is put together from those over its parts (FlashAttention, Dao et al. 2022).
    """
    rows, kv_heads = query[group.rows], cache.layers[layer].heads
    padded, heads, size = rows.shape
    fold, alone = heads // kv_heads, padded == group.size  # alone: one row a segment, nothing to turn round
    if alone:
        q = rows.view(padded, kv_heads, fold, size).transpose(0, 1)
    else:
        q = rows.view(group.size, -1, kv_heads, fold, size).permute(2, 0, 3, 1, 4).flatten(2, 3)
    masks = (variant.window, fold, query.dtype)
    parts = parts_of(kv_heads, q.shape[2], group.width(variant.window)) if group.can_be_cut else 1
    key, value = group.context(cache, layer, variant.window, parts)
    if _suits_products(query, group, variant):
        scores = (q * variant.scale) @ key.transpose(2, 3)
        bias = group.bias(*masks)
        out = (scores if bias is None else scores.add_(bias)).softmax(-1) @ value
    else:
        out = _with_pieces(q, key, value, group, masks, variant, lambda start, end: cache.read(layer, start, end))
    by_row = out.transpose(0, 1) if alone else out.unflatten(2, (fold, -1)).permute(1, 3, 0, 2, 4)
    flat: Tensor = by_row.reshape(padded, heads, -1).to(query.dtype)
    return flat if group.real is None else flat.index_select(0, group.real)


def _suits_products(query: Tensor, group: AttentionGroup, variant: Variant) -> bool:
    """Whether products in bfloat16 do: they round scores and weights, as transformers' own eager attention does."""
    plain = group.start is None and not group.runs and variant.softcap is None and variant.sinks is None
    cpu = query.dtype is torch.bfloat16 and query.device.type == "cpu" and has_bfloat16()
    return plain and cpu and group.size >= MANY


def _with_pieces(
    query: Tensor, key: Tensor, value: Tensor, group: AttentionGroup, masks: Masks, variant: Variant, read: Read
) -> Tensor:
    """Attention of a group's rows [Hkv, B, M, D] on what was gathered or lies in place, then on runs."""
    if key.shape[1] > group.size:
        out, sums = _attend_in_parts(query, key, value, group.bias(*masks, key.shape[1]), variant)
    else:
        out, sums = attend(query, key, value, group.bias(*masks), variant.scale, variant.softcap)
    pieces = group.pieces(*masks)
    if pieces or variant.sinks is not None:
        out = out.float()
    for piece in pieces:
        member = slice(piece.member, piece.member + 1)
        partial = _attend_in_place(query[:, member], *read(piece.start, piece.end), piece.bias, variant)
        _merge(out[:, member], sums[:, member], *partial)
    if variant.sinks is not None:  # a logit of its own in each head's softmax, whose value is 0
        folded = variant.sinks.float().view(len(query), 1, -1, 1)
        sink = folded.expand(-1, -1, -1, query.shape[2] // folded.shape[2]).flatten(2)
        out = out * torch.sigmoid(sums - sink)[..., None]
    return out


def _merge(out: Tensor, sums: Tensor, more: Tensor, more_sums: Tensor) -> None:
    """Merge into `out` and `sums` the attention of the same rows over other keys. out float32."""
    out.lerp_(more.float(), torch.sigmoid(more_sums - sums)[..., None])
    torch.logaddexp(sums, more_sums, out=sums)


def paged_attention(query: Tensor, layer: int, cache: KVCache, batch: Batch, variant: Variant) -> Tensor:
    """Attention of every row of the batch over its own context in the cache. query [N, H, D]; returns [N, H, E]."""
    if batch.tree is not None:
        return _kernel_attention(query, layer, cache, batch.tree, variant)
    parts = [_group_attention(query, layer, cache, group, variant) for group in batch.groups]
    if len(parts) == 1 and isinstance(batch.groups[0].into, slice):
        out = parts[0]
    else:
        out = parts[0].new_empty(query.shape[0], *parts[0].shape[1:])
        for group, part in zip(batch.groups, parts, strict=True):
            out[group.into] = part
    if math.isfinite(out.sum(dtype=torch.float32)):  # weights of 0 do not keep out what is not finite: 0 x NaN is NaN
        return out
    rows = query.split([len(segment.tokens) for segment in batch.segments])
    return torch.cat([_strict_attention(*own, layer, cache, variant) for own in zip(rows, batch.segments, strict=True)])


def _strict_attention(query: Tensor, segment: Segment, layer: int, cache: KVCache, variant: Variant) -> Tensor:
    """One sequence's rows [M, H, D] where something is not finite: a row reads only what it sees."""
    seen = np.concatenate([np.ones((len(query), segment.context), np.bool_), segment.mask], axis=1)
    if variant.window is not None:
        positions = np.concatenate([np.arange(segment.context), segment.positions])
        seen &= segment.positions[-len(query) :, None] - positions < variant.window
    slots, sees = put(segment.table.slots(0, segment.length), query.device), put(seen, query.device)
    key, value = (store[layer][:, slots].float() for store in (cache.key, cache.value))  # [Hkv, K, D]
    rows = query.float().unflatten(1, (len(key), -1)).permute(1, 2, 0, 3)  # [Hkv, fold, M, D]
    scores = rows @ key[:, None].transpose(2, 3) * variant.scale
    if variant.softcap is not None:
        scores = torch.tanh(scores / variant.softcap) * variant.softcap
    scores = scores.masked_fill(~sees, -torch.inf)
    if variant.sinks is not None:
        sinks = variant.sinks.float().view(len(key), -1, 1, 1)
        scores = torch.cat([scores, sinks.expand(-1, -1, len(query), -1)], dim=-1)
    whole = key.isfinite().all(-1) & value.isfinite().all(-1)
    out = scores.softmax(-1)[..., : segment.length] @ value.masked_fill(~whole[..., None], 0.0)[:, None]
    spoiled = (sees & ~whole[:, None]).any(-1)[:, None, :, None]
    by_row: Tensor = out.masked_fill(spoiled, torch.nan).permute(2, 0, 1, 3).flatten(1, 2)
    return by_row.to(query.dtype)


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
    pages: KVCache,
    variants: dict[int, Variant] | None = None,
    **kwargs: Any,  # noqa: ANN401
) -> tuple[Tensor, None]:
    """What transformers calls in every layer. query [1, H, N, D], key and value [1, Hkv, N, D].

    Writes the new keys and values into `pages`, then attends. Returns [1, N, H, E]. Where `variants` is given, the
    layer's is put into it, for those who go on without transformers.
    """
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    variant = Variant(scale, sliding_window, softcap, s_aux)
    if variants is not None:
        variants[layer] = variant
    pages.write(layer, batch.slots, key[0], value[0])
    return paged_attention(query[0].transpose(0, 1), layer, pages, batch, variant)[None], None


def register() -> None:
    """Make `attn_implementation="specscope"` known to transformers."""
    AttentionInterface.register(BACKEND, specscope_attention)
