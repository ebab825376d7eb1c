"""Attention over a paged cache for prefill chunks, single tokens and draft trees: one kernel, one mask.

Each row sees its sequence's context and, of the window behind it, the slots whose bits are set: itself and its
ancestors in a tree, itself and all before it in a chunk. The softmax is computed online over blocks of keys (Milakov
and Gimelshein 2018; FlashAttention, Dao et al. 2022). Where few tiles would leave a device idle, the context is split
and the parts are joined by a second launch (flash-decoding, Dao et al. 2023).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specscope.kernels import launch
from specscope.kernels.launch import LEAST_BLOCKS, MOST_SPLITS, MOST_TILE, Launch, interpreted, splits_of, tile_of
from specscope.kernels.tree_batch import BLOCK_SIZE, LayerShape, TreeBatch

WIDEN = tl.constexpr(interpreted())  # Triton's interpreter multiplies bfloat16 as if it were integers


def tree_attention(
    query: Tensor,
    rows: Tensor,
    shape: LayerShape,
    batch: TreeBatch,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    splits: int | None = None,
    keys: int | None = None,
    least: int = LEAST_BLOCKS,
) -> Tensor:
    """softmax(softcap(q k^T * scale) + mask) v of every row. Returns [N, H, value size] in the query's dtype.

    query [N, H, key size]; rows [slots, width] a layer of the cache, with the rows' own
    keys and values in it; sinks [H]. `splits`: into how many parts a context is cut at most; `keys`: how many are read
    at a time; `least`: blocks of so many in a part at least. None: as the device needs. Sums are float32.
    """
    n, query_heads, _ = query.shape
    device = launch.limits(query.device)
    variant = {"WINDOW": window or 0, "SOFTCAP": softcap is not None, "SINKS": sinks is not None}
    tile, blocks = tile_of(shape, query_heads // shape.heads, batch.most, query.dtype.itemsize, device.shared)
    blocks = blocks if keys is None else (keys, blocks[1])
    tiles = triton.cdiv(batch.most, tile // (query_heads // shape.heads))
    programs = len(batch.context) * tiles * shape.heads
    splits = splits_of(programs, batch.longest, blocks[0], device.multiprocessors) if splits is None else splits
    out = query.new_empty(n, query_heads, shape.value_size)
    parts = sums = out
    if splits > 1:
        parts = torch.empty(splits, n, query_heads, shape.value_size, dtype=torch.float32, device=query.device)
        sums = torch.empty(splits, n, query_heads, 2, dtype=torch.float32, device=query.device)
    attend_launch(shape, query_heads, tile, *blocks, LEAST=least, SPLIT=splits > 1, **variant)(
        (len(batch.context) * tiles, shape.heads, splits),
        *(query, query.stride(0), query.stride(1), rows, rows.stride(0)),
        *(out, parts, sums, sums if sinks is None else sinks, n, tiles),
        *(batch.table, batch.table.stride(0), batch.context, batch.first_row, batch.first_slot, batch.positions),
        *(batch.reach, batch.mask, batch.mask.stride(0), scale, softcap or 0.0),
    )
    if splits > 1:
        join_launch(shape, query_heads, SINKS=sinks is not None)(
            (n, query_heads), parts, sums, sums if sinks is None else sinks, out, n, splits
        )
    return out


def attend_launch(shape: LayerShape, query_heads: int, tile: int, keys: int, blocks: int, **variant: int) -> Launch:
    """One tile of rows of one key head and one part of a context; `variant`: the constants that layers differ in."""
    key, value = triton.next_power_of_2(shape.key_size), triton.next_power_of_2(shape.value_size)
    constants = {
        **{"HEADS": query_heads, "FOLD": query_heads // shape.heads, "VALUES_AT": shape.heads * shape.key_size},
        **{"KEY": shape.key_size, "VALUE": shape.value_size, "KEY_WIDE": key, "VALUE_WIDE": value},
        **{"TILE": tile, "KEYS": keys, "BLOCK": BLOCK_SIZE, **variant},
    }
    return Launch(_attend, constants, warps=8 if tile * value > MOST_TILE * 128 else 4, stages=blocks)


def join_launch(shape: LayerShape, query_heads: int, **variant: int) -> Launch:
    """One row and query head."""
    wide = triton.next_power_of_2(shape.value_size)
    constants = {"HEADS": query_heads, "VALUE": shape.value_size, "VALUE_WIDE": wide, "MOST": MOST_SPLITS, **variant}
    return Launch(_join, constants, warps=8 if wide > 128 else 4)


@triton.jit  # type: ignore[untyped-decorator]
def _bounds(  # type: ignore[no-untyped-def]
    row, real, position, reach, before, split, KEYS: tl.constexpr, LEAST: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """(first slot, one past the last, first slot of the first block that does not lie wholly in the context)."""
    end = tl.max(tl.load(reach + row, mask=real, other=0), 0)  # 0 where no row of the tile is real: no keys are read
    start = 0
    if WINDOW > 0:
        least = tl.min(tl.where(real, position, position + end), 0)
        start = tl.maximum(least - WINDOW + 1, 0) // KEYS * KEYS
    # As many parts as this context is worth; where the grid has more, those have no keys.
    share = tl.maximum(tl.cdiv(tl.cdiv(end - start, KEYS), tl.num_programs(2)), LEAST) * KEYS
    low = start + split * share
    high = tl.minimum(low + share, end)
    return low, high, tl.maximum(tl.minimum(high, before // KEYS * KEYS), low)


@triton.jit  # type: ignore[untyped-decorator]
def _sees(  # type: ignore[no-untyped-def]
    j, inside, row, real, begin, plain, before, slot_0, position, positions, mask, mask_stride, WINDOW: tl.constexpr,
):  # fmt: skip
    """bool [TILE, KEYS] which of the slots j each row sees. Those before `plain` need no bits of the mask."""
    seen = real[:, None] & inside[None, :]
    if begin >= plain:
        w = j - before
        behind = inside & (w >= 0)
        word = tl.load(
            mask + row.to(tl.int64)[:, None] * mask_stride + (w // 64)[None, :],
            mask=real[:, None] & behind[None, :],
            other=0,
        )
        seen = seen & ((w < 0)[None, :] | (((word >> (w % 64).to(tl.int64)[None, :]) & 1) != 0))
        if WINDOW > 0:
            theirs = tl.where(w < 0, j, tl.load(positions + slot_0 + w, mask=behind, other=0))
            seen = seen & (position[:, None] - theirs[None, :] < WINDOW)
    elif WINDOW > 0:
        seen = seen & (position[:, None] - j[None, :] < WINDOW)
    return seen


@triton.jit  # type: ignore[untyped-decorator]
def _scores(  # type: ignore[no-untyped-def]
    q, kv, kv_head, inside, scale, cap, KEY: tl.constexpr, KEY_WIDE: tl.constexpr, SOFTCAP: tl.constexpr,
):  # fmt: skip
    """float32 [TILE, KEYS] of the keys at these slots."""
    d = tl.arange(0, KEY_WIDE)
    k = tl.load(kv[None, :] + kv_head * KEY + d[:, None], mask=inside[None, :] & (d < KEY)[:, None], other=0.0)
    if WIDEN:
        k = k.to(tl.float32)
    score = tl.dot(q, k, input_precision="ieee") * scale
    if SOFTCAP:
        score = cap * (2 * tl.sigmoid(2 * score / cap) - 1)
    return score


@triton.jit
def _set_apart(v, seen):  # type: ignore[no-untyped-def]
    """(v without what is not finite, NaN for each row that sees such a value): 0 x NaN is NaN."""
    broken = tl.max(tl.where(tl.abs(v.to(tl.float32)) < float("inf"), 0, 1), 1) > 0
    whole = tl.where(broken[:, None], tl.zeros_like(v), v)
    return whole, tl.sum(tl.where(seen & broken[None, :], float("nan"), 0.0), 1)


@triton.jit  # type: ignore[untyped-decorator]
def _keep(  # type: ignore[no-untyped-def]
    acc, best, total, row, head, real, split, some, n, out, parts, sums, sinks,
    HEADS: tl.constexpr, VALUE: tl.constexpr, VALUE_WIDE: tl.constexpr, SPLIT: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """Write what a tile found: the rows' outputs or, of a part of the context that has keys (`some`), its share."""
    dv = tl.arange(0, VALUE_WIDE)
    at_out = row.to(tl.int64) * HEADS + head
    place = at_out[:, None] * VALUE + dv[None, :]
    inside_out = real[:, None] & (dv < VALUE)[None, :]
    if not SPLIT:
        if SINKS:
            sink = tl.load(sinks + head).to(tl.float32)
            new = tl.maximum(best, sink)
            faded = tl.exp(best - new)
            acc = acc * faded[:, None]
            total = total * faded + tl.exp(sink - new)
        total = tl.where(real, total, 1.0)
        tl.store(out + place, (acc / total[:, None]).to(out.dtype.element_ty), mask=inside_out)
    else:
        all_rows = tl.cast(n, tl.int64) * HEADS
        tl.store(parts + split * all_rows * VALUE + place, acc, mask=inside_out & some)
        tl.store(sums + (split * all_rows + at_out) * 2, best, mask=real)
        tl.store(sums + (split * all_rows + at_out) * 2 + 1, total, mask=real)


@triton.jit(do_not_specialize=["query_row", "query_head", "n", "tiles", "table_stride", "mask_stride"])  # type: ignore[untyped-decorator]
def _attend(  # type: ignore[no-untyped-def]
    query, query_row, query_head, rows, rows_stride,
    out, parts, sums, sinks, n, tiles,
    table, table_stride, context, first_row, first_slot, positions,
    reach, mask, mask_stride, scale, cap,
    HEADS: tl.constexpr, FOLD: tl.constexpr, VALUES_AT: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr,
    KEY_WIDE: tl.constexpr, VALUE_WIDE: tl.constexpr, TILE: tl.constexpr, KEYS: tl.constexpr, BLOCK: tl.constexpr,
    LEAST: tl.constexpr, SPLIT: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """One tile of rows, all query heads of one key head, one part of the context."""
    sequence, kv_head, split = tl.program_id(0) // tiles, tl.program_id(1), tl.program_id(2)
    tile_row = tl.program_id(0) % tiles * (TILE // FOLD)
    row_0, row_1 = tl.load(first_row + sequence), tl.load(first_row + sequence + 1)
    slot_0, slot_1 = tl.load(first_slot + sequence), tl.load(first_slot + sequence + 1)
    before = tl.load(context + sequence)
    m = tl.arange(0, TILE)
    row = row_0 + tile_row + m // FOLD
    real = (row < row_1) & (m < TILE // FOLD * FOLD)
    head = kv_head * FOLD + m % FOLD
    d = tl.arange(0, KEY_WIDE)
    dv = tl.arange(0, VALUE_WIDE)
    q = tl.load(
        query + row.to(tl.int64)[:, None] * query_row + head[:, None] * query_head + d[None, :],
        mask=real[:, None] & (d < KEY)[None, :],
        other=0.0,
    )
    if WIDEN:
        q = q.to(tl.float32)
    position = tl.load(positions + slot_1 - row_1 + row, mask=real, other=0)
    low, high, plain = _bounds(row, real, position, reach, before, split, KEYS, LEAST, WINDOW)
    best = tl.full([TILE], -float("inf"), tl.float32)
    total = tl.zeros([TILE], tl.float32)
    acc = tl.zeros([TILE, VALUE_WIDE], tl.float32)
    for begin in range(low, high, KEYS):
        j = begin + tl.arange(0, KEYS)
        inside = j < high
        block = tl.load(table + sequence * table_stride + j // BLOCK, mask=inside, other=0)
        kv = rows + (block.to(tl.int64) * BLOCK + j % BLOCK) * rows_stride
        score = _scores(q, kv, kv_head, inside, scale, cap, KEY, KEY_WIDE, SOFTCAP)
        seen = _sees(j, inside, row, real, begin, plain, before, slot_0, position, positions, mask, mask_stride, WINDOW)
        score = tl.where(seen, score, -float("inf"))
        new = tl.maximum(best, tl.max(score, 1))
        safe = tl.where(new == -float("inf"), 0.0, new)  # a row that has seen nothing yet
        faded = tl.exp(best - safe)
        weight = tl.exp(score - safe[:, None])
        v = tl.load(
            kv[:, None] + VALUES_AT + kv_head * VALUE + dv[None, :],
            mask=inside[:, None] & (dv < VALUE)[None, :],
            other=0.0,
        )
        total = total * faded + tl.sum(weight, 1)
        if begin >= plain or WINDOW > 0:  # what is not finite must reach only the rows that see it
            v, spoiled = _set_apart(v, seen)
            total += spoiled
        rounded = weight.to(v.dtype)
        if WIDEN:
            rounded, v = rounded.to(tl.float32), v.to(tl.float32)
        acc = acc * faded[:, None] + tl.dot(rounded, v, input_precision="ieee")
        best = new
    _keep(
        acc, best, total, row, head, real, split, low < high, n, out, parts, sums, sinks,
        HEADS, VALUE, VALUE_WIDE, SPLIT, SINKS,
    )  # fmt: skip


@triton.jit(do_not_specialize=["n", "splits"])  # type: ignore[untyped-decorator]
def _join(  # type: ignore[no-untyped-def]
    parts, sums, sinks, out, n, splits,
    HEADS: tl.constexpr, VALUE: tl.constexpr, VALUE_WIDE: tl.constexpr, MOST: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """One row and head: the parts of its context, each weighed by its share of the softmax's sum."""
    row, head = tl.program_id(0), tl.program_id(1)
    s = tl.arange(0, MOST)
    dv = tl.arange(0, VALUE_WIDE)
    index = s.to(tl.int64) * n * HEADS + row * HEADS + head
    best = tl.load(sums + index * 2, mask=s < splits, other=-float("inf"))
    total = tl.load(sums + index * 2 + 1, mask=s < splits, other=0.0)
    top = tl.max(best, 0)
    if SINKS:
        sink = tl.load(sinks + head).to(tl.float32)
        top = tl.maximum(top, sink)
    share = tl.exp(best - top)
    whole = tl.sum(total * share, 0)
    if SINKS:
        whole += tl.exp(sink - top)
    used = best > -float("inf")  # a part that saw no key was not written
    inside = used[:, None] & (dv < VALUE)[None, :]
    acc = tl.load(parts + index[:, None] * VALUE + dv[None, :], mask=inside, other=0.0)
    joined = tl.sum(acc * share[:, None], 0) / whole
    place = (row.to(tl.int64) * HEADS + head) * VALUE + dv
    tl.store(out + place, joined.to(out.dtype.element_ty), mask=dv < VALUE)
