"""Small products that stay in a processor's vector registers, as operations for Numba's functions.

They are written in LLVM's own language, which Numba compiles for the processor at hand. A vector is sixteen numbers
where there is AVX-512, else eight: a register of AVX, or two of NEON's. Addresses are int64. Every sum is made in the
order of its terms, one product after the other, in float32: a result depends neither on how many rows are computed
together nor on how many threads share the work.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from itertools import product
from typing import Any

import numpy as np
from llvmlite import binding, ir
from numba import carray, njit, types
from numba.core import cgutils
from numba.extending import intrinsic

jit = partial(njit, error_model="numpy")  # a division by zero is no exception: it would end one thread of a team alone
_features = binding.get_host_cpu_features()
WIDE = bool(_features.get("avx512f"))  # registers: 32 of 16 numbers, else 16 of 8
PAIRED = WIDE and bool(_features.get("avx512bf16"))  # an instruction for sums of two products of bfloat16 numbers
TILED = bool(_features.get("amx-bf16"))  # instructions for whole tiles of such sums, which libraries use and we do not
LANES = 16 if WIDE else 8
PANEL = 16  # columns of a panel
AHEAD = 2048  # bytes of weights that are fetched before they are read: a processor's own guess ends at each page
NEAR, APART = 3, 2  # what is fetched goes into the first cache, or into the second: it displaces nothing that is in use
# Kinds of numbers, as the kernels are told of them. PAIRS are two bfloat16 numbers that follow each other in a sum.
FLOAT32, FLOAT16, BFLOAT16, PAIRS = 0, 1, 2, 3
KINDS = (FLOAT32, FLOAT16, BFLOAT16, *([PAIRS] if PAIRED else []))  # that are there
BYTES = {FLOAT32: 4, FLOAT16: 2, BFLOAT16: 2, PAIRS: 4}
FLOAT, HALF = ir.FloatType(), ir.HalfType()
BYTE, INT16, INT32, INT64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
ITEMS = {FLOAT32: FLOAT, FLOAT16: HALF, BFLOAT16: INT16, PAIRS: INT32}
VECTOR, INTS = ir.VectorType(FLOAT, LANES), ir.VectorType(INT32, LANES)
ZERO = ir.Constant(VECTOR, [0.0] * LANES)
FIRST = ir.Constant(INTS, [0] * LANES)


class _Brief(ir.Type):  # type: ignore[misc]
    """LLVM's bfloat, which llvmlite does not name."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Brief)

    def __hash__(self) -> int:
        return hash(_Brief)


BRIEFS = ir.VectorType(_Brief(), 2 * LANES)


def _int(value: int) -> Any:
    return ir.Constant(INT64, value)


def _vector(builder: Any, address: Any, kind: int = FLOAT32) -> Any:
    """A vector of numbers from an address on, as floats; pairs as they are."""
    pointer = builder.inttoptr(address, ir.VectorType(ITEMS[kind], LANES).as_pointer())
    loaded = builder.load(pointer, align=BYTES[kind])
    if kind == FLOAT16:
        return builder.fpext(loaded, VECTOR)
    if kind == BFLOAT16:  # the upper half of a float
        upper = builder.shl(builder.zext(loaded, INTS), ir.Constant(INTS, [16] * LANES))
        return builder.bitcast(upper, VECTOR)
    return loaded


def _store(builder: Any, address: Any, value: Any) -> None:
    builder.store(value, builder.inttoptr(address, VECTOR.as_pointer()), align=4)


def _everywhere(builder: Any, address: Any, kind: int) -> Any:
    """The float (or pair) at an address, in all lanes of a vector."""
    vector = INTS if kind == PAIRS else VECTOR
    nothing = ir.Constant(vector, ir.Undefined)
    scalar = builder.load(builder.inttoptr(address, vector.element.as_pointer()), align=4)
    return builder.shuffle_vector(builder.insert_element(nothing, scalar, INT32(0)), nothing, FIRST)


def _fetch(builder: Any, address: Any, keep: int) -> None:
    """Prefetch what lies at an address; harmless where nothing does. `keep`: NEAR or APART."""
    byte = BYTE.as_pointer()
    kind = ir.FunctionType(ir.VoidType(), [byte, INT32, INT32, INT32])
    fetch = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
    builder.call(fetch, [builder.inttoptr(address, byte), INT32(0), INT32(keep), INT32(1)])  # to read, data


def _add_product(builder: Any, total: Any, a: Any, b: Any, kind: int) -> Any:
    """total + a b; of pairs, both products."""
    if kind == PAIRS:
        of = ir.FunctionType(VECTOR, [VECTOR, BRIEFS, BRIEFS])
        add = cgutils.get_or_insert_function(builder.module, of, "llvm.x86.avx512bf16.dpbf16ps.512")
        return builder.call(add, [total, builder.bitcast(a, BRIEFS), builder.bitcast(b, BRIEFS)])
    of = ir.FunctionType(VECTOR, [VECTOR] * 3)
    return builder.call(cgutils.get_or_insert_function(builder.module, of, f"llvm.fma.v{LANES}f32"), [a, b, total])


def _choose(builder: Any, generate: Callable[..., None], kinds: Sequence[int], rows: range, args: Any) -> None:
    """Generate what is done for each kind and number of rows; the first two arguments choose. Else nothing is done."""
    kind, many, *others = args
    done = builder.append_basic_block("done")
    switch = builder.switch(builder.add(builder.mul(kind, _int(rows.stop)), many), done)
    for of, count in product(kinds, rows):
        block = builder.append_basic_block(f"kind{of}rows{count}")
        switch.add_case(_int(rows.stop * of + count), block)
        builder.position_at_end(block)
        generate(builder, of, count, others)
        builder.branch(done)
    builder.position_at_end(done)


@cache
def product_tile(
    panels: int, min_rows: int, max_rows: int, kinds: tuple[int, ...] = KINDS, *, far: bool = False
) -> Any:
    """y[r, c] = start[r, c] + sum over k of x[r, k] w[k, c], of `panels` panels of 16 columns and so many rows.

    The operation takes (the kind of w, rows; w, its row's stride, the bytes from one panel to the next; x, its row's
    stride; start, its row's stride; y, its row's stride; k): addresses, and strides in numbers. All but w is float32; y
    and start of one panel lie next to those of the one before. Where w has pairs, x has too, and a pair is a number.
    Where y and start are one place, a sum is continued: it begins with what lies there. Else start is added last: a
    residual or a bias may be large, and would round every term that is added to it.

    What comes next of a panel is fetched into the first cache; or, where it is `far`, into the second: the operation
    then also takes how many bytes ahead that is for the first k, and how many bytes further for each of the others.
    """
    each = PANEL // LANES  # vectors of a panel
    width = each * panels

    def multiply(builder: Any, kind: int, rows: int, args: Any) -> None:
        w, w_stride, apart, x, x_stride, start, start_stride, y, y_stride, length, *ahead = args
        size = BYTES[kind]
        row_at = lambda base, stride, row: builder.add(base, builder.mul(builder.mul(stride, _int(row)), _int(4)))  # noqa: E731
        sums = [[cgutils.alloca_once(builder, VECTOR) for _ in range(width)] for _ in range(rows)]
        goes_on = builder.icmp_signed("==", start, y)
        at_start = lambda row, v: _vector(builder, builder.add(row_at(start, start_stride, row), _int(4 * LANES * v)))  # noqa: E731
        for row in range(rows):
            for v in range(width):
                builder.store(builder.select(goes_on, at_start(row, v), ZERO), sums[row][v])
        row_of = [row_at(x, x_stride, row) for row in range(rows)]
        panel_of = [builder.add(w, builder.mul(apart, _int(panel))) for panel in range(panels)]
        step = builder.mul(w_stride, _int(size))
        with cgutils.for_range(builder, length) as loop:
            further, offset = builder.mul(loop.index, step), builder.mul(loop.index, _int(4))
            weights = []
            soon = builder.add(ahead[0], builder.mul(loop.index, ahead[1])) if far else _int(AHEAD)
            for v in range(width):
                column = builder.add(builder.add(panel_of[v // each], further), _int(size * LANES * (v % each)))
                weights.append(_vector(builder, column, kind))
                if kind != FLOAT32 and v % each == 0:
                    _fetch(builder, builder.add(panel_of[v // each] if far else column, soon), APART if far else NEAR)
            for row in range(rows):
                factor = _everywhere(builder, builder.add(row_of[row], offset), kind)
                for v in range(width):
                    total = _add_product(builder, builder.load(sums[row][v]), factor, weights[v], kind)
                    builder.store(total, sums[row][v])
        for row in range(rows):
            for v in range(width):
                last = builder.select(goes_on, ZERO, at_start(row, v))
                total = builder.fadd(last, builder.load(sums[row][v]))
                _store(builder, builder.add(row_at(y, y_stride, row), _int(4 * LANES * v)), total)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _choose(builder, multiply, kinds, range(min_rows, max_rows + 1), args)
        return context.get_dummy_value()

    @intrinsic
    def near_tile(typing_context, kind, rows, w, w_stride, apart, x, x_stride, start, start_stride, y, y_stride, k):
        return types.void(*[types.int64] * 12), generate

    @intrinsic
    def far_tile(
        typing_context, kind, rows, w, w_stride, apart, x, x_stride, start, start_stride, y, y_stride, k, ahead, pace
    ):
        return types.void(*[types.int64] * 14), generate

    return far_tile if far else near_tile


def _turn(builder: Any, kind: int, rows: int, args: Any) -> None:
    """Halves of a square are interleaved row by row; done as often as its side can be halved, that transposes it."""
    base, stride, out = args
    step = builder.mul(stride, _int(BYTES[kind]))
    rows_at = [builder.add(base, builder.mul(step, _int(row))) for row in range(LANES)]
    square = [_vector(builder, address, kind) for address in rows_at]
    for address in rows_at:
        _fetch(builder, builder.add(address, _int(2 * AHEAD)), NEAR)
    half = LANES // 2
    low = [number for lane in range(half) for number in (lane, LANES + lane)]
    masks = [ir.Constant(INTS, low), ir.Constant(INTS, [half + number for number in low])]
    for _ in range(half.bit_length()):
        pairs = zip(square[:half], square[half:], strict=True)
        square = [builder.shuffle_vector(*pair, mask) for pair in pairs for mask in masks]
    for row, vector in enumerate(square):
        _store(builder, builder.add(out, _int(4 * PANEL * row)), vector)


@intrinsic
def turn(typing_context, kind, base, stride, out):
    """Transpose LANES rows of LANES numbers, `stride` numbers apart, into rows of a panel of floats.

    Two bfloat16 numbers that are to stay together count as a float32.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind, *others = args
        _choose(builder, _turn, (FLOAT32, BFLOAT16), range(1, 2), [kind, _int(1), *others])
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4), generate


PRODUCT = 15  # arguments of a product that was compiled apart: see product.multiply


@intrinsic
def call_product(
    typing_context, function, kind, first, last, w, w_stride, apart, x, x_stride, start, start_stride, y, y_stride,
    rows, length,
):  # fmt: skip
    """Call a product that was compiled apart, by its address."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        function, *others = args
        kind = ir.FunctionType(ir.VoidType(), [INT64] * len(others)).as_pointer()
        builder.call(builder.inttoptr(function, kind), others)
        return context.get_dummy_value()

    return types.void(*[types.int64] * PRODUCT), generate


def _pointer(of: Any, item: Any) -> Any:
    """What turns an address into a pointer to such numbers, for carray."""

    @intrinsic
    def pointer(typing_context, address):
        return types.CPointer(of)(types.int64), lambda c, builder, s, args: builder.inttoptr(args[0], item.as_pointer())

    return pointer


floats = _pointer(types.float32, FLOAT)
integers, briefs = _pointer(types.int64, INT64), _pointer(types.uint16, INT16)  # briefs: numbers of 16 bits
flags = _pointer(types.uint8, BYTE)  # truth values


@jit
def size_of(kind):
    """Bytes of a number that lies alone: of keys and values, of a row, of a weight that is not in pairs."""
    return 4 if kind == FLOAT32 else 2


@intrinsic
def as_float(typing_context, bits):
    """The float32 of these 32 bits."""
    return types.float32(types.int32), lambda c, builder, s, args: builder.bitcast(args[0], FLOAT)


@intrinsic
def as_bits(typing_context, number):
    """The 32 bits of a float32."""
    return types.uint32(types.float32), lambda c, builder, s, args: builder.bitcast(args[0], INT32)


@jit
def _rounded(number):
    """The upper 16 bits of a float32, rounded to even: bfloat16."""
    bits = as_bits(number)
    if number != number:
        return np.uint16(0x7FC0)
    return np.uint16((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16))


@jit
def keep(numbers, kind, out):
    """Put floats at an address as numbers of that kind: FLOAT32, or else BFLOAT16."""
    if kind == FLOAT32:
        stored = carray(floats(out), len(numbers))
        for d in range(len(numbers)):
            stored[d] = numbers[d]
    else:
        brief = carray(briefs(out), len(numbers))
        for d in range(len(numbers)):
            brief[d] = _rounded(numbers[d])
