"""Small products that stay in a processor's vector registers, as operations for Numba's functions.

They are written in LLVM's own language, which Numba compiles for the processor at hand, whatever its vectors: eight
numbers of a tile are one vector of LLVM's, which becomes one AVX register, two of NEON's or half an AVX-512 one.
Addresses are int64. Every sum is made in the order of its terms, one product after the other, in float32: a result
depends neither on how many rows are computed together nor on how many threads share the work.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

LANES = 8
AHEAD = 1024  # bytes of weights that are fetched before they are read: a processor's own guess ends at each page
FLOAT, HALF, DOUBLE = ir.FloatType(), ir.HalfType(), ir.DoubleType()
INT32, INT64 = ir.IntType(32), ir.IntType(64)
VECTOR, HALVES = ir.VectorType(FLOAT, LANES), ir.VectorType(HALF, LANES)
ZERO, NOTHING = ir.Constant(VECTOR, [0.0] * LANES), ir.Constant(VECTOR, ir.Undefined)
FIRST = ir.Constant(ir.VectorType(INT32, LANES), [0] * LANES)


def _int(value: int) -> Any:
    return ir.Constant(INT64, value)


def _vector(builder: Any, address: Any, item: Any = FLOAT) -> Any:
    """Eight numbers from an address on, as floats."""
    pointer = builder.inttoptr(address, (VECTOR if item is FLOAT else HALVES).as_pointer())
    loaded = builder.load(pointer, align=4 if item is FLOAT else 2)
    return loaded if item is FLOAT else builder.fpext(loaded, VECTOR)


def _store(builder: Any, address: Any, value: Any) -> None:
    builder.store(value, builder.inttoptr(address, VECTOR.as_pointer()), align=4)


def _everywhere(builder: Any, address: Any) -> Any:
    """The float at an address in all eight places of a vector."""
    scalar = builder.load(builder.inttoptr(address, FLOAT.as_pointer()), align=4)
    return builder.shuffle_vector(builder.insert_element(NOTHING, scalar, INT32(0)), NOTHING, FIRST)


def _fetch(builder: Any, address: Any) -> None:
    """Ask for what lies there before it is read; where nothing does, nothing happens."""
    byte = ir.IntType(8).as_pointer()
    kind = ir.FunctionType(ir.VoidType(), [byte, INT32, INT32, INT32])
    fetch = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
    builder.call(fetch, [builder.inttoptr(address, byte), INT32(0), INT32(3), INT32(1)])  # to read, to keep, data


def _multiply_add(builder: Any) -> Any:
    kind = ir.FunctionType(VECTOR, [VECTOR] * 3)
    return cgutils.get_or_insert_function(builder.module, kind, f"llvm.fma.v{LANES}f32")


@cache
def product_tile(rows: int, panels: int, *, halves: bool) -> Any:
    """y[r, c] = start[r, c] + sum over k of x[r, k] w[k, c], of `rows` rows and `panels` panels of 16 columns.

    The operation takes (w, its row's stride, the bytes from one panel to the next; x, its row's stride; start, its
    row's stride; y, its row's stride; k): addresses, and strides in numbers. w is float16 or float32, all else float32;
    y and start of the second panel lie next to those of the first.
    """
    width, size = 2 * panels, 2 if halves else 4

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        w, w_stride, apart, x, x_stride, start, start_stride, y, y_stride, length = args
        fma = _multiply_add(builder)
        at = lambda base, stride, row: builder.add(base, builder.mul(builder.mul(stride, _int(row)), _int(4)))  # noqa: E731
        sums = [[cgutils.alloca_once(builder, VECTOR) for _ in range(width)] for _ in range(rows)]
        for row in range(rows):
            for v in range(width):
                begin = builder.add(at(start, start_stride, row), _int(4 * LANES * v))
                builder.store(_vector(builder, begin), sums[row][v])
        row_of = [at(x, x_stride, row) for row in range(rows)]
        step = builder.mul(w_stride, _int(size))
        with cgutils.for_range(builder, length) as loop:
            here = builder.add(w, builder.mul(loop.index, step))
            offset = builder.mul(loop.index, _int(4))
            weights = []
            for v in range(width):
                panel = builder.add(here, apart) if v >= 2 else here
                column = builder.add(panel, _int(size * LANES * (v % 2)))
                weights.append(_vector(builder, column, HALF if halves else FLOAT))
                if halves and v % 2 == 0:
                    _fetch(builder, builder.add(column, _int(AHEAD)))
            for row in range(rows):
                factor = _everywhere(builder, builder.add(row_of[row], offset))
                for v in range(width):
                    builder.store(builder.call(fma, [factor, weights[v], builder.load(sums[row][v])]), sums[row][v])
        for row in range(rows):
            for v in range(width):
                _store(builder, builder.add(at(y, y_stride, row), _int(4 * LANES * v)), builder.load(sums[row][v]))
        return context.get_dummy_value()

    @intrinsic
    def tile(typing_context, w, w_stride, apart, x, x_stride, start, start_stride, y, y_stride, length):
        return types.void(*[types.int64] * 10), generate

    return tile


@cache
def dot_tile(rows: int, slots: int) -> Any:
    """scores[r, s] = q[r] . k[s] of `rows` queries and `slots` keys.

    The operation takes (q, k, scores, the scores' row stride, size): queries and keys lie one after the other.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        q, k, scores, stride, size = args
        fma = _multiply_add(builder)
        total = cgutils.get_or_insert_function(
            builder.module, ir.FunctionType(FLOAT, [FLOAT, VECTOR]), f"llvm.vector.reduce.fadd.v{LANES}f32"
        )
        bytes_each = builder.mul(size, _int(4))
        sums = [[cgutils.alloca_once(builder, VECTOR) for _ in range(slots)] for _ in range(rows)]
        for row in sums:
            for one in row:
                builder.store(ZERO, one)
        with cgutils.for_range(builder, builder.sdiv(size, _int(LANES))) as loop:
            offset = builder.mul(loop.index, _int(4 * LANES))
            place = lambda base, n: builder.add(builder.add(base, builder.mul(bytes_each, _int(n))), offset)  # noqa: E731
            keys = [_vector(builder, place(k, s)) for s in range(slots)]
            for r in range(rows):
                query = _vector(builder, place(q, r))
                for s in range(slots):
                    builder.store(builder.call(fma, [query, keys[s], builder.load(sums[r][s])]), sums[r][s])
        for r in range(rows):
            row_at = builder.add(scores, builder.mul(stride, _int(4 * r)))
            for s in range(slots):
                whole = builder.call(total, [FLOAT(0.0), builder.load(sums[r][s])], fastmath=("reassoc",))
                address = builder.add(row_at, _int(4 * s))
                builder.store(whole, builder.inttoptr(address, FLOAT.as_pointer()), align=4)
        return context.get_dummy_value()

    @intrinsic
    def tile(typing_context, q, k, scores, stride, size):
        return types.void(*[types.int64] * 5), generate

    return tile


@intrinsic
def floats(typing_context, address):
    """What lies at an address, for carray: a pointer to float32."""
    pointer = types.CPointer(types.float32)
    return pointer(types.int64), lambda c, builder, s, args: builder.inttoptr(args[0], FLOAT.as_pointer())


@intrinsic
def doubles(typing_context, address):
    """The same of float64."""
    pointer = types.CPointer(types.float64)
    return pointer(types.int64), lambda c, builder, s, args: builder.inttoptr(args[0], DOUBLE.as_pointer())


@intrinsic
def integers(typing_context, address):
    """The same of int64."""
    pointer = types.CPointer(types.int64)
    return pointer(types.int64), lambda c, builder, s, args: builder.inttoptr(args[0], INT64.as_pointer())


@intrinsic
def flags(typing_context, address):
    """The same of one-byte truth values."""
    pointer = types.CPointer(types.uint8)
    return pointer(types.int64), lambda c, builder, s, args: builder.inttoptr(args[0], ir.IntType(8).as_pointer())


@intrinsic
def as_float(typing_context, bits):
    """The float32 of these 32 bits."""
    return types.float32(types.int32), lambda c, builder, s, args: builder.bitcast(args[0], FLOAT)
