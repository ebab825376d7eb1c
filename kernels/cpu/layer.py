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

from specscope.kernels.cpu import product
from specscope.kernels.cpu.attention import ONE, ZERO, attend, exp, merge, own_floats
from specscope.kernels.cpu.flat_batch import CUT, SEGMENT, FlatBatch
from specscope.kernels.cpu.product import KIND_OF, Panels, multiply_at, shape
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
ALONE = 16384  # numbers of a norm that one thread is through with before another has begun


@jit(fastmath={"reassoc", "nsz", "contract"})
def normalise(x, weight, eps, out):
    """out = x / sqrt(mean x^2 + eps) * weight."""
    total = ZERO
    for d in range(len(x)):
        total += x[d] * x[d]
    factor = ONE / np.sqrt(total / np.float32(len(x)) + eps)
    for d in range(len(x)):
        out[d] = x[d] * factor * weight[d]


def _norm(address):
    x, norm, out, rows, width = carray(integers(address), 5)
    weight, eps = carray(floats(norm + 4), width), floats(norm)[0]
    for row in range(me(), rows, members()):
        line = carray(floats(out + 4 * row * width), width)
        normalise(carray(floats(x + 4 * row * width), width), weight, eps, line)


@jit
def _rotate(head, cos, sin):
    """x cos + flip(x) sin, where the halves of a head are flipped and the first half of sin is negative."""
    half = len(head) // 2
    for d in range(half):
        low, high = head[d], head[half + d]
        head[d] = low * cos[d] + high * sin[d]
        head[half + d] = high * cos[half + d] + low * sin[half + d]


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
def _pair(numbers, kind, out):
    """Where the next product's weights are in pairs: numbers as bfloat16 at an address, perhaps their own."""
    if kind == PAIRS:
        keep(numbers, BFLOAT16, out)


@jit
def _norm_row(x, weight, eps, width, kind, out):
    """The RMSNorm of a row of floats, as a product with weights of that kind takes it."""
    line = carray(floats(out), width)
    normalise(carray(floats(x), width), carray(floats(weight), width), eps, line)
    _pair(line, kind, out)


@jit
def _enter(given, given_projected, kind, residual, projected, norm, eps, joined_kind, rows, width, joined, team):
    """Rows as floats, and what attention projects: given too, or the rows after the first norm."""
    number = size_of(kind)
    for row in range(team[0], rows, team[1]):
        x, line = residual + 4 * row * width, projected + 4 * row * joined
        _widen(given + number * row * width, kind, x, width)
        if given_projected != 0:
            _widen(given_projected + number * row * joined, kind, line, joined)
            _pair(carray(floats(line), joined), joined_kind, line)
        else:
            _norm_row(x, norm, eps, width, joined_kind, line)


@jit
def _prepare_heads(qkv, heads, kv_heads, size, norms, eps, cos_at, sin_at, turn, kind, store, slots, slot_of, team):
    """Norm and rotation of every row's heads; keys and values go into the cache, [2 * kv_heads, slots, size]."""
    rows, every, number = len(slot_of), heads + 2 * kv_heads, size_of(kind)
    cos, sin = carray(floats(cos_at), (rows, turn)), carray(floats(sin_at), (rows, turn))
    for item in range(team[0], rows * every, team[1]):
        row, index = item // every, item % every
        head = qkv[row, index * size : (index + 1) * size]
        if index < heads + kv_heads:
            which = 0 if index < heads else 1
            if norms[0] != 0:
                normalise(head, carray(floats(norms[which]), size), eps[2 + which], head)
            _rotate(head, cos[row], sin[row])
        if index >= heads:
            keep(head, kind, store + number * size * ((index - heads) * slots + slot_of[row]))


@jit
def _share(panels, team):
    """This thread's panels: (first, one past the last)."""
    return panels * team[0] // team[1], panels * (team[0] + 1) // team[1]


@jit
def _project(multiply, weight, first, last, x, x_stride, y, y_stride, rows):
    kind, w, _, start, width = weight
    length, apart = shape(kind, width)
    call_product(multiply, kind, first, last, w, PANEL, apart, x, x_stride, start, 0, y, y_stride, rows, length)


@jit
def _add_product(multiply, weight, x, x_stride, residual, made, rows, width, team):
    """residual += bias + x W^T, this thread's panels. `made`: room for the sums, [rows, width]."""
    first, last = _share(weight[2], team)
    _project(multiply, weight, first, last, x, x_stride, made, width, rows)
    total, sums = carray(floats(residual), (rows, width)), carray(floats(made), (rows, width))
    for row in range(rows):
        for d in range(first * PANEL, last * PANEL):
            total[row, d] += sums[row, d]


@jit
def _gate_product(multiply, weight, x, width, gated, paired, kind, rows, inner, team):
    """silu(gate) * up of x W^T, this thread's panels of both; `kind`: of the weights that it is multiplied by next."""
    first, last = _share(inner // PANEL, team)
    for half in (0, inner // PANEL):
        _project(multiply, weight, half + first, half + last, x, width, gated, 2 * inner, rows)
    both, low, high = carray(floats(gated), (rows, 2 * inner)), first * PANEL, last * PANEL
    for row in range(rows):
        gate, up = both[row, low:high], both[row, inner + low : inner + high]
        for d in range(len(gate)):
            gate[d] = gate[d] / (ONE + exp(-gate[d])) * up[d]
        _pair(gate, kind, paired + 4 * row * inner + 2 * low)


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
    team = me(), members()
    batch_at, kind, given_projected, cos_at, sin_at, turn, slots, scratch, multiply = carray(integers(call_at), 9)
    width, heads, kv_heads, size, inner, window, floats_at, n1, n2, nq, nk = carray(integers(layer_at), 11)
    weights = carray(integers(layer_at + 8 * 11), (4, WORDS))
    segments_at, count, cuts_at, cut_count, slots_at, rows, partial = carray(integers(batch_at), 7)
    settings = carray(floats(floats_at), 5)  # scale, and the eps of each norm
    eps, wide, size_all, joined = settings[1:], (heads + 2 * kv_heads) * size, heads * size, weights[0, 4]
    gate_up, down = weights[2], weights[3]
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
    own = sums + 4 * partial * heads + 4 * team[0] * own_floats(size)

    _enter(given, given_projected, kind, residual, projected, n1, eps[0], weights[0, 0], rows, width, joined, team)
    barrier()
    first, last = _share(weights[0, 2], team)
    _project(multiply, weights[0], first, last, projected, joined, qkv, wide, rows)
    barrier()
    lines, slot_of = carray(floats(qkv), (rows, wide)), carray(integers(slots_at), rows)
    _prepare_heads(lines, heads, kv_heads, size, (nq, nk), eps, cos_at, sin_at, turn, kind, store, slots, slot_of, team)
    barrier()
    attend(
        segments_at, count, cuts_at, cut_count, kv_heads, heads // kv_heads, size, settings[0], window, qkv, wide,
        multiply, kind, store, slots, outputs, tops, sums, own, team,
    )  # fmt: skip
    barrier()
    _merge_all(
        segments_at, count, cuts_at, cut_count, heads, heads // kv_heads, size, attended, outputs, tops, sums, partial,
        weights[1, 0], own, team,
    )  # fmt: skip
    barrier()
    _add_product(multiply, weights[1], attended, size_all, residual, normed, rows, width, team)
    barrier()
    for row in range(team[0], rows, team[1]):
        _norm_row(residual + 4 * row * width, n2, eps[1], width, gate_up[0], normed + 4 * row * width)
    barrier()
    _gate_product(multiply, gate_up, normed, width, gated, paired, down[0], rows, inner, team)
    barrier()
    into, apart = (paired, inner) if down[0] == PAIRS else (gated, 2 * inner)
    _add_product(multiply, down, into, apart, residual, normed, rows, width, team)
    first, last = _share(down[2], team)
    made, number = carray(floats(residual), (rows, width)), size_of(kind)
    for row in range(rows):
        keep(made[row, PANEL * first : PANEL * last], kind, out + number * (row * width + PANEL * first))


@jit
def _merge_all(
    segments_at, count, cuts_at, cut_count, heads, fold, size, attended, outputs, tops, sums, partial, kind, own, team,
):  # fmt: skip
    """Merge each row's results over all parts of its context, [rows, heads * size]: this thread's share.

    `kind`: of the weights that it is multiplied by next; `own`: floats of this thread.
    """
    mine, segments = carray(floats(own), size), carray(integers(segments_at), (count, SEGMENT))
    cuts, lines = carray(integers(cuts_at), (cut_count, CUT)), carray(floats(outputs), (partial * heads, size))
    top, total = carray(floats(tops), partial * heads), carray(floats(sums), partial * heads)
    stored_kind, item = BFLOAT16 if kind == PAIRS else FLOAT32, 0
    for segment in range(count):
        first, rows, begin = segments[segment, 0], segments[segment, 1], segments[segment, 7]
        parts = (segments[segment + 1, 7] if segment + 1 < count else cut_count) - begin
        before = cuts[begin, 3] * heads
        for row in range(rows):
            for head in range(heads):
                if item % team[1] == team[0]:
                    line = before + (head // fold) * rows * fold + row * fold + head % fold
                    merge(mine, lines, top, total, line, rows * heads, parts)
                    at_row = attended + 4 * (first + row) * heads * size
                    keep(mine, stored_kind, at_row + size_of(stored_kind) * head * size)
                item += 1


@cache
def prepare() -> None:
    """Compile all kernels, or load what was kept. Raises what stands in the way of using them on this machine."""
    multiply_at()
    for work in (product._product, _norm, _layers):
        compiled(work)


@dataclass(frozen=True)
class Norm:
    """An RMSNorm: x / sqrt(mean x^2 + eps) * weight."""

    weight: Tensor  # float32 [width]
    eps: float
    _numbers: Tensor  # eps, then the weight, as the kernel reads them

    @staticmethod
    def of(weight: Tensor, eps: float) -> Norm:
        """Raises what stands in the way of running it on this machine."""
        compiled(_norm)
        wide = weight.detach().float().contiguous()
        return Norm(wide, eps, torch.cat([wide.new_tensor([eps]), wide]))

    def __call__(self, x: Tensor) -> Tensor:
        """x float32 [..., width]."""
        x = x.contiguous()
        out, width = torch.empty_like(x), len(self.weight)
        call = x.data_ptr(), self._numbers.data_ptr(), out.data_ptr(), x.numel() // width, width
        compiled(_norm)(*call, alone=x.numel() <= ALONE)
        return out


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
        eps = [0.0 if norm is None else norm.eps for norm in norms]
        settings = torch.tensor([self.scale, *eps], dtype=torch.float32)
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
        heads = max(2 * (of.heads + of.kv_heads) * of.size for of in parts)
        self._row_floats = heads + max(2 * of.width + of.qkv.in_features + 3 * of.inner for of in parts)
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
                *(
                    ctypes.addressof(batch.words),
                    KIND_OF[x.dtype],
                    0 if projected is None else projected.data_ptr() + first * joined,
                ),
                *(cos.data_ptr() + 4 * first * turn, sin.data_ptr() + 4 * first * turn, turn),
                *(stores[0].shape[1], scratch.data_ptr(), self._multiply),
            )
        return out
