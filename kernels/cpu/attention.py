"""Tree attention on a processor: each query reads the paged cache where it lies, nothing is gathered or padded.

A context is read in parts of 128 slots, for each head of keys apart, by all queries that share the part, so that its
bytes are read once. Its keys are transposed for them: scores then come from the same product as all else. What a query
finds in a part is kept as a sum without its divisor, the largest score and the divisor; the softmax over all parts is
put together from those (FlashAttention, Dao et al. 2022). The parts do not depend on the batch or on the number of
threads, and so neither do the results.
"""

from __future__ import annotations

import numpy as np
from numba import carray

from specscope.kernels.cpu.flat_batch import CUT, PART, SEGMENT
from specscope.kernels.cpu.tiles import (
    BFLOAT16,
    FLOAT32,
    LANES,
    PAIRED,
    PAIRS,
    PANEL,
    as_float,
    call_product,
    flags,
    floats,
    integers,
    jit,
    keep,
    size_of,
    turn,
)
from specscope.kernels.tree_batch import BLOCK_SIZE

QUERIES = 24  # of one head of keys that read a part together: their scores stay in the fastest cache
NEVER = np.float32(-1e30)  # the score of a slot that a query does not see
LOG2E, LN2_HIGH, LN2_LOW = np.float32(1.44269504), np.float32(0.693359375), np.float32(-2.12194440e-4)
NO_NUMBER, INFINITE = np.float32(np.nan), np.float32(np.inf)
HALF, ONE, LEAST, ZERO = np.float32(0.5), np.float32(1), np.float32(-87), np.float32(0)
# Of exp on [-ln 2 / 2, ln 2 / 2] (Cephes, S. Moshier: expf)
C5, C4, C3 = np.float32(1.9875691500e-4), np.float32(1.3981999507e-3), np.float32(8.3334519073e-3)
C2, C1, C0 = np.float32(4.1665795894e-2), np.float32(1.6666665459e-1), np.float32(5.0000001201e-1)


@jit(fastmath={"contract"})  # said, since a function takes over what its first caller allows
def exp(x):
    """e^x in float32 to its last digit or two; no less than e^-87, no more than e^87."""
    x = min(max(x, LEAST), -LEAST)
    n = np.floor(x * LOG2E + HALF)
    r = x - n * LN2_HIGH - n * LN2_LOW
    series = ((((C5 * r + C4) * r + C3) * r + C2) * r + C1) * r + C0
    return (series * r * r + r + ONE) * as_float((np.int32(n) + np.int32(127)) << np.int32(23))


@jit
def own_floats(size):
    """What a thread needs for itself: queries and their scores, a part's keys in panels, and zeros."""
    return QUERIES * (size + PART) + PART * size + PART


@jit
def _turn_keys(kind, keys, blocks, start, end, units, out):
    """Keys of slots start..end-1 in panels of 16 slots, [panels, units, 16], so that a product can take them."""
    number = size_of(kind)
    for slot in range(start, end, BLOCK_SIZE):
        key = keys + number * units * (blocks[slot // BLOCK_SIZE] * BLOCK_SIZE)
        for offset in range(0, BLOCK_SIZE, LANES):
            for unit in range(0, units, LANES):
                turn(kind, key + number * (offset * units + unit), units, out + 4 * (unit * PANEL + offset))
        out += 4 * units * PANEL


@jit
def _hide(scores, queries, start, end, context, seen, positions, window, first_row, rows, fold):
    """Take away the scores of slots that a query's row does not see. scores [queries, PART], of slots start..end-1."""
    wide = len(positions)
    fed_start = max(start, context)
    for j in range(queries):
        row = (first_row + j) // fold
        line, sees, count = scores[j, fed_start - start :], seen[row, fed_start - context :], end - fed_start
        for t in range(count):
            line[t] = line[t] if sees[t] != 0 else NEVER
        if window:
            least = positions[wide - rows + row] - window + 1
            for t in range(start, min(end, context, least)):
                scores[j, t - start] = NEVER
            for t in range(fed_start, end):
                if positions[t - context] < least:
                    scores[j, t - start] = NEVER


@jit(fastmath={"reassoc", "nsz", "contract"})
def _softmax(row, count, scale):
    """Turn the first scores of a row into e^(scale (score - largest)); gives the largest, scaled, and their sum.

    Always over a whole part, so that sums are made in one order, whatever lies behind a query's own slots. A score that
    is infinite or no number makes the sum no number.
    """
    for t in range(count, PART):
        row[t] = NEVER
    largest = NEVER
    for t in range(PART):
        largest = max(largest, row[t])
    total, finite = ZERO, True
    for t in range(PART):
        finite &= abs(row[t]) < INFINITE
        weight = exp(scale * (row[t] - largest)) if row[t] > NEVER else ZERO
        row[t] = weight
        total += weight
    return scale * largest, total if finite else NO_NUMBER


@jit
def _add_values(multiply, kind, blocks, start, end, values, size, scores, alone, count, weights, out):
    """Add to `count` lines of `out` the values of slots start..end-1, by their weights.

    `alone`: the one row of `scores` that this is for, whose slots without a weight are not read; -1: of several rows.
    """
    number = size_of(kind)
    slot = start
    while slot < end:
        run = _run_end(blocks, slot, end)  # blocks that lie side by side
        if alone >= 0:
            if scores[alone, slot - start] == ZERO:
                slot += 1
                continue
            stop, run = run, slot + 1
            while run < stop and scores[alone, run - start] != ZERO:
                run += 1
        value = values + number * size * (blocks[slot // BLOCK_SIZE] * BLOCK_SIZE + slot % BLOCK_SIZE)
        call_product(
            multiply, kind, 0, size // PANEL, value, size, number * PANEL, weights + 4 * (slot - start), PART,
            out, size, out, size, count, run - slot,
        )  # fmt: skip
        slot = run


@jit
def _run_end(blocks, slot, end):
    """Up to which slot, from this first one of a block on, blocks lie side by side."""
    block = slot // BLOCK_SIZE
    while (block + 1) * BLOCK_SIZE < end and blocks[block + 1] == blocks[block] + 1:
        block += 1
    return min(end, (block + 1) * BLOCK_SIZE)


@jit(fastmath={"reassoc", "nsz", "contract"})
def merge(out, outputs, tops, sums, first, apart, parts):
    """Fill out [size] of one query from its results in all parts: lines `first`, `first + apart`, ... of the three."""
    largest = NEVER
    for p in range(parts):
        largest = max(largest, tops[first + p * apart])
    total = ZERO
    for d in range(len(out)):
        out[d] = ZERO
    for p in range(parts):
        line = first + p * apart
        if sums[line] != ZERO:
            weight = exp(tops[line] - largest)
            total += weight * sums[line]
            for d in range(len(out)):
                out[d] += weight * outputs[line, d]
    share = ONE / total
    for d in range(len(out)):
        out[d] *= share


@jit
def attend(
    segments_at, count, cuts_at, cut_count, kv_heads, fold, size, scale, window, qkv, stride, multiply, kind, store,
    slots, outputs, tops, sums, scratch, team,
):  # fmt: skip
    """This thread's share of attention: over each part of the slots, for each head of keys, by all its queries.

    `qkv`: rows of queries [heads * size] and more, `stride` floats apart; `multiply`: address of product.multiply;
    `kind`: of keys and values; where it is bfloat16 and the processor multiplies pairs, queries are rounded to it.
    `store`: keys, then values [2 * kv_heads, slots, size]. Line (heads * rows before the part) + head * rows of the
    part + query of `outputs` [.., size], `tops`, `sums` is its result. `scratch`: floats of this thread.
    """
    segments, cuts = carray(integers(segments_at), (count, SEGMENT)), carray(integers(cuts_at), (cut_count, CUT))
    scores_at = scratch + 4 * QUERIES * size
    panels_at = scores_at + 4 * QUERIES * PART
    zeros_at = panels_at + 4 * PART * size
    carray(floats(zeros_at), PART)[:] = ZERO
    scores, number = carray(floats(scores_at), (QUERIES, PART)), size_of(kind)
    paired = PAIRED and kind == BFLOAT16 and size % (2 * LANES) == 0
    as_kind, units = (PAIRS, size // 2) if paired else (FLOAT32, size)
    for item in range(team[0], cut_count * kv_heads, team[1]):
        segment, start, end, before = cuts[item // kv_heads]
        first, rows, context, wide, block_at, position_at, mask_at, _ = segments[segment]
        head, queries, panels = item % kv_heads, rows * fold, (end - start + PANEL - 1) // PANEL
        line, values = before * fold * kv_heads + head * queries, store + number * (kv_heads + head) * slots * size
        blocks = carray(integers(block_at), (end - 1) // BLOCK_SIZE + 1)
        positions, seen = carray(integers(position_at), wide), carray(flags(mask_at), (rows, wide))
        heads, out = (
            carray(floats(qkv), (first + rows, stride)),
            carray(floats(outputs + 4 * line * size), (queries, size)),
        )
        top, divisor = carray(floats(tops + 4 * line), queries), carray(floats(sums + 4 * line), queries)
        keys = store + number * head * slots * size
        _turn_keys(FLOAT32 if paired else kind, keys, blocks, start, end, units, panels_at)
        for begin in range(0, queries, QUERIES):
            some = min(QUERIES, queries - begin)
            for j in range(some):
                row, column = first + (begin + j) // fold, (head * fold + (begin + j) % fold) * size
                keep(heads[row, column : column + size], BFLOAT16 if paired else FLOAT32, scratch + 4 * units * j)
                out[begin + j, :] = ZERO
            call_product(
                multiply, as_kind, 0, panels, panels_at, PANEL, 4 * units * PANEL, scratch, units, zeros_at, 0,
                scores_at, PART, some, units,
            )  # fmt: skip
            if end > context or window:
                _hide(scores, some, start, end, context, seen, positions, window, begin, rows, fold)
            for j in range(some):
                top[begin + j], divisor[begin + j] = _softmax(scores[j], end - start, scale)
            made = outputs + 4 * (line + begin) * size
            _add_values(multiply, kind, blocks, start, end, values, size, scores, -1, some, scores_at, made)
            if end > context or window:  # 0 times what is not finite is no number: a hidden slot must not be read then
                for j in range(some):
                    if not np.isfinite(out[begin + j].sum()):
                        out[begin + j, :] = ZERO
                        at = scores_at + 4 * PART * j
                        _add_values(
                            multiply, kind, blocks, start, end, values, size, scores, j, 1, at, made + 4 * size * j
                        )
