"""What is done to single rows between products: an RMSNorm, and the likeliest tokens with their log probabilities."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numba import carray
from numpy.typing import NDArray
from torch import Tensor

from specscope.kernels.cpu.attention import NEVER, ONE, ZERO, exp
from specscope.kernels.cpu.team import barrier, compiled, me, members
from specscope.kernels.cpu.tiles import doubles, floats, integers, jit

CHUNK = 1024  # columns that are looked through together: results do not depend on the number of threads
BLOCK = 64  # columns whose largest is looked at first
ALONE = 16384  # numbers that one thread is through with before another has begun


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
    thread, threads = me(), members()
    for row in range(thread, rows, threads):
        line = carray(floats(out + 4 * row * width), width)
        normalise(carray(floats(x + 4 * row * width), width), weight, eps, line)


@jit(fastmath={"reassoc", "nsz", "contract"})
def _largest(row, first, last):
    largest = NEVER
    for column in range(first, last):
        largest = max(largest, row[column])
    return largest


@jit(fastmath={"reassoc", "nsz", "contract"})
def _mass(row, first, last, largest):
    """The sum of e^(number - largest)."""
    total = ZERO
    for column in range(first, last):
        total += exp(row[column] - largest)
    return total


@jit
def _take(row, first, last, values, columns):
    """Put these columns among the largest so far, which fall; of equal ones the earlier column comes first."""
    least = len(values) - 1
    for column in range(first, last):
        value = row[column]
        if value > values[least]:
            place = least
            while place > 0 and value > values[place - 1]:
                values[place], columns[place] = values[place - 1], columns[place - 1]
                place -= 1
            values[place], columns[place] = value, column


@jit
def _look_through(row, first, last, values, columns):
    """The largest number of a chunk and the sum of e^(number - largest); fills `values` and `columns`."""
    for n in range(len(values)):
        values[n], columns[n] = -np.inf, first
    largest = NEVER
    for block in range(first, last, BLOCK):
        end = min(block + BLOCK, last)
        block_largest = _largest(row, block, end)
        largest = max(largest, block_largest)
        if block_largest > values[len(values) - 1]:
            _take(row, block, end, values, columns)
    return largest, _mass(row, first, last, largest)


@jit
def _join(tops, sums, values, columns, out, tokens):
    """The likeliest columns of a row out of those of its chunks, with the logarithms of their probabilities."""
    chunks, count = values.shape
    largest = NEVER
    for chunk in range(chunks):
        largest = max(largest, tops[chunk])
    total = np.float64(0)
    for chunk in range(chunks):
        total += np.float64(sums[chunk]) * np.exp(np.float64(tops[chunk]) - np.float64(largest))
    less = np.float64(largest) + np.log(total)
    for n in range(count):
        best = 0
        for chunk in range(1, chunks):
            if values[chunk, 0] > values[best, 0]:
                best = chunk
        out[n], tokens[n] = np.float64(values[best, 0]) - less, columns[best, 0]
        for place in range(1, count):  # the next one of that chunk
            values[best, place - 1], columns[best, place - 1] = values[best, place], columns[best, place]
        values[best, count - 1] = -np.inf


def _top(address):
    x, rows, width, count, chunks, tops_at, columns_at, out_at, tokens_at = carray(integers(address), 9)
    tops = carray(floats(tops_at), (2 + count, rows, chunks))
    thread, threads = me(), members()
    values_at = tops_at + 8 * rows * chunks
    for item in range(thread, rows * chunks, threads):
        row, chunk = item // chunks, item % chunks
        values = carray(floats(values_at + 4 * item * count), count)
        columns = carray(integers(columns_at + 8 * item * count), count)
        line, first = carray(floats(x + 4 * row * width), width), chunk * CHUNK
        largest, total = _look_through(line, first, min(first + CHUNK, width), values, columns)
        tops[0, row, chunk], tops[1, row, chunk] = largest, total
    barrier()
    for row in range(thread, rows, threads):
        values = carray(floats(values_at + 4 * row * chunks * count), (chunks, count))
        columns = carray(integers(columns_at + 8 * row * chunks * count), (chunks, count))
        out = carray(doubles(out_at + 8 * row * count), count)
        _join(tops[0, row], tops[1, row], values, columns, out, carray(integers(tokens_at + 8 * row * count), count))


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


def likeliest(logits: Tensor, count: int) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """(columns, log probabilities) of the `count` likeliest of each row of logits, float32 [R, V]: [R, count] each.

    They fall; of equal ones the earlier column comes first. Where a row has fewer numbers above -inf, the last log
    probabilities are -inf and their columns mean nothing. A NaN is never among them.
    """
    rows, width = logits.shape
    logits, chunks = logits.contiguous(), -(-width // CHUNK)
    count = min(count, width)
    if not count or not rows:
        return np.empty((rows, count), np.int64), np.empty((rows, count), np.float64)
    partial = np.empty((2 + count) * rows * chunks, np.float32)
    columns = np.empty(rows * chunks * count, np.int64)
    tokens, values = np.empty((rows, count), np.int64), np.empty((rows, count), np.float64)
    addresses = (array.ctypes.data for array in (partial, columns, values, tokens))
    call = logits.data_ptr(), rows, width, count, chunks, *addresses
    compiled(_top)(*call, alone=logits.numel() <= ALONE)
    return tokens, values
