"""Whole decoder layers on a processor: one call for up to 256 rows through many of them, no small operations between.

A layer is the one of model/fast/decoder.py: RMSNorm, queries, keys and values, rotary positions, tree attention on the
paged cache, a gated MLP. All threads go through its phases together; each phase is cut by rows, heads, parts of
contexts or panels of weights, none of which changes a sum.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import numpy as np
import torch
from numba import carray
from torch import Tensor

from specscope.kernels.cpu import product, rows
from specscope.kernels.cpu.attention import ONE, attend, exp, merge, own_floats
from specscope.kernels.cpu.flat_batch import SEGMENT, FlatBatch
from specscope.kernels.cpu.product import KIND_OF, Panels, multiply_at, shape
from specscope.kernels.cpu.rows import Norm, normalise
from specscope.kernels.cpu.team import barrier, compiled, me, members
from specscope.kernels.cpu.tiles import (
    BFLOAT16,
    FLOAT32,
    PAIRS,
    PANEL,
    as_float,
    briefs,
    call_product,
    floats,
    integers,
    jit,
    keep,
    size_of,
)

WORDS = 5  # that tell of a product: Panels.words


@jit
def _rotate(head, cos, sin):
    """x cos + flip(x) sin, where the halves of a head are flipped and the first half of sin is negative."""
    half = len(head) // 2
    for d in range(half):
        low, high = head[d], head[half + d]
        head[d] = low * cos[d] + high * sin[d]
        head[half + d] = high * cos[half + d] + low * sin[half + d]


@jit
def _gate(gate, up):
    """gate = silu(gate) * up."""
    for d in range(len(gate)):
        gate[d] = gate[d] / (ONE + exp(-gate[d])) * up[d]


@jit
def _widen(x, kind, out, count):
    """Copy numbers of that kind at one address as floats to another."""
    wide = carray(floats(out), count)
    if kind == FLOAT32:
        given = carray(floats(x), count)
        for d in range(count):
            wide[d] = given[d]
    else:
        brief = carray(briefs(x), count)
        for d in range(count):
            wide[d] = as_float(np.int32(np.uint32(brief[d]) << np.uint32(16)))


@jit
def _prepare_heads(qkv, index, heads, kv_heads, size, norms, eps, cos, sin, kind, store, slots, slot):
    """One head of one row: its norm and rotation; keys and values go into the cache, [2 * kv_heads, slots, size]."""
    head = qkv[index * size : (index + 1) * size]
    if index < heads + kv_heads:
        if norms[0] != 0:
            normalise(
                head, carray(floats(norms[0 if index < heads else 1]), size), eps[2 if index < heads else 3], head
            )
        _rotate(head, cos, sin)
    if index >= heads:
        number = size_of(kind)
        keep(head, kind, store + number * size * ((index - heads) * slots + slot))


@jit
def _pair(numbers, kind, out):
    """Where the next product's weights are in pairs: numbers as bfloat16 at an address, perhaps their own."""
    if kind == PAIRS:
        keep(numbers, BFLOAT16, out)


@jit
def _project(multiply, weight, first, last, x, x_stride, start, start_stride, y, y_stride, rows):
    kind, w, _, _, width = weight
    length, apart = shape(kind, width)
    call_product(
        multiply, kind, first, last, w, PANEL, apart, x, x_stride, start, start_stride, y, y_stride, rows, length
    )


@jit
def _add_product(multiply, weight, x, x_stride, residual, made, rows, width, thread, threads):
    """residual += bias + x W^T, this thread's panels. `made`: room for the sums, [rows, width]."""
    panels = weight[2]
    first, last = panels * thread // threads, panels * (thread + 1) // threads
    _project(multiply, weight, first, last, x, x_stride, weight[3], 0, made, width, rows)
    total, sums = carray(floats(residual), (rows, width)), carray(floats(made), (rows, width))
    for row in range(rows):
        for d in range(first * PANEL, last * PANEL):
            total[row, d] += sums[row, d]


def _layers(address):
    """Each layer's output is the next one's input; `apart`: bytes from one to the next."""
    given, out, apart, count, layers_at, stores_at = carray(integers(address), 6)
    layers, stores = carray(integers(layers_at), count), carray(integers(stores_at), count)
    for index in range(count):
        _layer(layers[index], address + 8 * 6, given, out, stores[index])
        given, out = out, out + apart
        barrier()


@jit
def _layer(layer_at, call_at, given, out, store):
    thread, threads = me(), members()
    batch_at, kind, given_projected, cos_at, sin_at, turn, slots, scratch, multiply = carray(integers(call_at), 9)
    width, heads, kv_heads, size, inner, window, floats_at, n1, n2, nq, nk = carray(integers(layer_at), 11)
    weights = carray(integers(layer_at + 8 * 11), (4, WORDS))
    segments_at, count, cuts_at, cut_count, slots_at, rows, partial = carray(integers(batch_at), 7)
    settings = carray(floats(floats_at), 5)  # scale, and the eps of each norm
    scale, eps = settings[0], settings[1:]
    fold, wide, size_all, joined = heads // kv_heads, (heads + 2 * kv_heads) * size, heads * size, weights[0, 4]
    number = size_of(kind)
    residual = scratch
    projected = residual + 4 * rows * width
    normed = projected + 4 * rows * joined
    qkv = normed + 4 * rows * width
    attended = qkv + 4 * rows * wide
    gated = attended + 4 * rows * size_all
    paired = gated + 4 * rows * 2 * inner  # of `gated`, where the next product takes pairs
    outputs = paired + 4 * rows * inner
    tops = outputs + 4 * partial * heads * size
    sums = tops + 4 * partial * heads
    thread_scratch = sums + 4 * partial * heads + 4 * thread * own_floats(size)

    for row in range(thread, rows, threads):
        x, line = residual + 4 * row * width, projected + 4 * row * joined
        _widen(given + number * row * width, kind, x, width)
        if given_projected != 0:
            _widen(given_projected + number * row * joined, kind, line, joined)
        else:
            normalise(carray(floats(x), width), carray(floats(n1), width), eps[0], carray(floats(line), width))
        _pair(carray(floats(line), joined), weights[0, 0], line)
    barrier()

    panels = weights[0, 2]
    first, last = panels * thread // threads, panels * (thread + 1) // threads
    _project(multiply, weights[0], first, last, projected, joined, weights[0, 3], 0, qkv, wide, rows)
    barrier()

    every, norms = heads + 2 * kv_heads, (nq, nk)
    lines, slot_of = carray(floats(qkv), (rows, wide)), carray(integers(slots_at), rows)
    cos, sin = carray(floats(cos_at), (rows, turn)), carray(floats(sin_at), (rows, turn))
    for item in range(thread, rows * every, threads):
        row, index = item // every, item % every
        slot = slot_of[row]
        _prepare_heads(
            lines[row], index, heads, kv_heads, size, norms, eps, cos[row], sin[row], kind, store, slots, slot
        )
    barrier()

    attend(
        segments_at, count, cuts_at, cut_count, partial, kv_heads, fold, size, scale, window, qkv, wide, multiply, kind,
        store, slots, outputs, tops, sums, thread_scratch, thread, threads,
    )  # fmt: skip
    barrier()

    segments = carray(integers(segments_at), (count, SEGMENT))
    _merge_all(
        segments, cut_count, heads, fold, size, attended, outputs, tops, sums, cuts_at, partial, weights[1, 0],
        thread_scratch, thread, threads,
    )  # fmt: skip
    barrier()

    _add_product(multiply, weights[1], attended, size_all, residual, normed, rows, width, thread, threads)
    barrier()

    gate_up, down = weights[2], weights[3]
    for row in range(thread, rows, threads):
        x, line = residual + 4 * row * width, normed + 4 * row * width
        normalise(carray(floats(x), width), carray(floats(n2), width), eps[1], carray(floats(line), width))
        _pair(carray(floats(line), width), gate_up[0], line)
    barrier()

    panels = inner // PANEL
    first, last = panels * thread // threads, panels * (thread + 1) // threads
    _project(multiply, gate_up, first, last, normed, width, gate_up[3], 0, gated, 2 * inner, rows)
    _project(multiply, gate_up, panels + first, panels + last, normed, width, gate_up[3], 0, gated, 2 * inner, rows)
    both = carray(floats(gated), (rows, 2 * inner))
    for row in range(rows):
        gate = both[row, first * PANEL : last * PANEL]
        _gate(gate, both[row, inner + first * PANEL : inner + last * PANEL])
        _pair(gate, down[0], paired + 4 * row * inner + 2 * first * PANEL)
    barrier()

    into, apart = (paired, inner) if down[0] == PAIRS else (gated, 2 * inner)
    _add_product(multiply, down, into, apart, residual, normed, rows, width, thread, threads)
    panels = down[2]
    first, last = PANEL * (panels * thread // threads), PANEL * (panels * (thread + 1) // threads)
    made = carray(floats(residual), (rows, width))
    for row in range(rows):
        keep(made[row, first:last], kind, out + number * (row * width + first))


@jit
def _merge_all(
    segments, cuts, heads, fold, size, attended, outputs, tops, sums, cuts_at, partial, kind, scratch, thread, threads
):
    """Merge each row's results over all parts of its context, [rows, heads * size]: this thread's share.

    `kind`: of the weights that it is multiplied by next; `scratch`: floats of this thread.
    """
    mine = carray(floats(scratch), size)
    cut_of = carray(integers(cuts_at), (cuts, 4))
    lines, top, total = (
        carray(floats(outputs), (partial * heads, size)),
        carray(floats(tops), partial * heads),
        carray(floats(sums), partial * heads),
    )
    item = 0
    for segment in range(len(segments)):
        first, rows, begin = segments[segment, 0], segments[segment, 1], segments[segment, 7]
        parts = (segments[segment + 1, 7] if segment + 1 < len(segments) else cuts) - begin
        before = cut_of[begin, 3] * heads
        for row in range(rows):
            for head in range(heads):
                if item % threads == thread:
                    line = before + (head // fold) * rows * fold + row * fold + head % fold
                    merge(mine, lines, top, total, line, rows * heads, parts)
                    at_row = attended + 4 * (first + row) * heads * size
                    stored_kind = BFLOAT16 if kind == PAIRS else FLOAT32
                    keep(mine, stored_kind, at_row + size_of(stored_kind) * head * size)
                item += 1


@cache
def prepare() -> None:
    """Compile all kernels, or load what was kept. Raises what stands in the way of using them on this machine."""
    multiply_at()
    for work in (product._product, rows._norm, rows._top, _layers):
        compiled(work)


@dataclass(frozen=True)
class LayerParts:
    """What a layer is made of. Filled by model/fast/decoder.py."""

    heads: int
    kv_heads: int
    size: int  # of a head
    scale: float  # of scores
    window: int | None  # positions that a query looks back, itself among them
    first_norm: Norm | None  # None where the caller normalises
    second_norm: Norm
    head_norms: tuple[Norm, Norm] | None  # of queries and keys
    qkv: Panels  # rows of queries' heads, then keys', then values'
    out: Panels
    gate_up: Panels
    down: Panels

    def __post_init__(self) -> None:
        assert self.size % PANEL == 0, "the kernel computes values in panels"
        assert self.inner % PANEL == 0, "the kernel computes gates in panels"

    @property
    def width(self) -> int:
        """Of the residual stream."""
        return self.out.out_features

    @property
    def inner(self) -> int:
        """Gates."""
        return self.down.in_features

    @cached_property
    def words(self) -> tuple[Any, Tensor]:
        """What is passed to the kernel, and the settings that it points to."""
        norms = [self.first_norm, self.second_norm, *(self.head_norms or (None, None))]
        settings = torch.tensor(
            [self.scale, *(0.0 if norm is None else norm.eps for norm in norms)], dtype=torch.float32
        )
        numbers = [
            *(self.width, self.heads, self.kv_heads, self.size, self.inner, self.window or 0, settings.data_ptr()),
            *(0 if norm is None else norm.weight.data_ptr() for norm in norms),
            *(word for part in (self.qkv, self.out, self.gate_up, self.down) for word in part.words),
        ]
        return (ctypes.c_int64 * len(numbers))(*numbers), settings


class CompiledLayers:
    """Layers of one width that follow each other, as one kernel."""

    def __init__(self, parts: Sequence[LayerParts]) -> None:
        self.count = len(parts)
        self._width, self._joined = parts[0].width, parts[0].qkv.in_features
        assert all(of.width == self._width for of in parts), "layers hand on what they make"
        self._parts = parts  # what the addresses point to
        self._addresses = (ctypes.c_int64 * self.count)(*(ctypes.addressof(of.words[0]) for of in parts))
        # What is kept between products, in floats: of a thread, of a row, and of a row in a part of its context.
        self._own_floats = max(own_floats.py_func(of.size) for of in parts)
        self._row_floats = max(
            2 * of.width + of.qkv.in_features + 3 * of.inner + 2 * (of.heads + of.kv_heads) * of.size for of in parts
        )
        self._part_floats = max(of.heads * (of.size + 2) for of in parts)
        self._run, self._multiply = compiled(_layers), multiply_at()

    def __call__(
        self,
        x: Tensor,
        projected: Tensor | None,
        cos: Tensor,
        sin: Tensor,
        batches: Sequence[FlatBatch],
        stores: Sequence[Tensor],
    ) -> Tensor:
        """The residual stream x [N, width] after each of L layers, [L, N, width].

        `projected`: what the attention of a single layer projects, [N, in]; None: x after the first norm. `cos`, `sin`:
        of each row's position, float32 [N, size], rows as far apart in both; the first half of sin is negative.
        `batches`: the N rows in their order. `stores`: the layers' caches, [2 * kv_heads, slots, size] each, into which
        keys and values go. They, x and `projected` are all float32 or all bfloat16; between them everything is float32.
        """
        assert projected is None or self.count == 1
        x = x.contiguous()
        out = x.new_empty(self.count, *x.shape)
        projected = None if projected is None else projected.contiguous()
        row = self._width * x.itemsize  # bytes
        joined = 0 if projected is None else self._joined * x.itemsize
        turn = cos.stride(0)
        stores_at = (ctypes.c_int64 * self.count)(*(store.data_ptr() for store in stores))
        needed = max(batch.rows * self._row_floats + batch.partial * self._part_floats for batch in batches)
        scratch = torch.empty(needed + torch.get_num_threads() * self._own_floats, dtype=torch.float32, device="cpu")
        for batch in batches:
            first = batch.first
            self._run(
                *(x.data_ptr() + first * row, out.data_ptr() + first * row, len(x) * row),
                *(self.count, ctypes.addressof(self._addresses), ctypes.addressof(stores_at)),
                *(batch.address, KIND_OF[x.dtype], 0 if projected is None else projected.data_ptr() + first * joined),
                *(cos.data_ptr() + 4 * first * turn, sin.data_ptr() + 4 * first * turn, turn),
                *(stores[0].shape[1], scratch.data_ptr(), self._multiply),
            )
        return out
