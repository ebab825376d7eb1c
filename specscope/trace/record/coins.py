"""Counter-based randomness: every coin is a pure function of what it decides.

A coin follows from (request seed, stream, position of the step's root in the request, draw number) by Philox
4x64 (Salmon et al. 2011, as numpy.random.Philox), so it does not matter who else is in the batch, whether the
request was preempted, or whether the step is run again.
"""

from __future__ import annotations

from enum import IntEnum
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from specscope.trace.record.tree import ROOT, Doubles

Words = NDArray[np.uint64]
Number = TypeVar("Number", int, NDArray[np.int64])


class Stream(IntEnum):
    """Drafting and verifying never share a coin."""

    DRAFT = 0
    VERIFY = 1


STRIDE = 4  # draws at a node, at most, of a tree whose draws were counted, as older captures hold them


def draw_number(parent: Number, rank: Number) -> Number:
    """The number of the draw that gave a counted tree's node: that of its coin in the stream DRAFT.

    It follows from the nodes alone, so that a tree can be drawn again from its shape: q may have had fewer tokens to
    give than were asked for. Of a static tree the draws are numbered as the nodes of its shape.
    """
    return (parent - ROOT) * STRIDE + rank


def coins(seed: int, stream: Stream, position: int, count: int) -> Doubles:
    """Draws 0..count-1 at one position: float64 [count] in the open interval (0, 1).

    53 random bits k give (k + 1/2) / 2^53, which is never 0 (it would accept a token of probability zero) and,
    the largest k aside, below 1; that one is stepped down from 1 (it would overrun a cumulative sum).
    """
    generator = np.random.Philox(
        key=np.array([seed, stream], np.uint64), counter=np.array([0, position, 0, 0], np.uint64)
    )
    bits = generator.random_raw(count) >> np.uint64(11)
    uniform = (bits.astype(np.float64) + 0.5) * 2.0**-53
    return np.minimum(uniform, np.nextafter(1.0, 0.0))


def coins_at(seeds: Words, stream: Stream, positions: NDArray[np.int64], counts: NDArray[np.int64]) -> Doubles:
    """`coins` of many steps laid end to end: float64 [sum(counts)]. A hundred times as fast as one after another."""
    blocks = -(-counts // 4)
    step = np.repeat(np.arange(len(counts)), blocks)
    block = np.arange(len(step)) - np.repeat(np.cumsum(blocks) - blocks, blocks)
    # numpy's Philox counts up before it draws: the first block is that of 1
    counter = [(block + 1).astype(np.uint64), positions[step].astype(np.uint64), *np.zeros((2, len(step)), np.uint64)]
    bits = _philox(counter, seeds[step], np.full(len(step), stream, np.uint64))
    within = np.arange(4 * len(step)) - np.repeat(4 * (np.cumsum(blocks) - blocks), 4 * blocks)
    mantissas = bits.ravel()[within < np.repeat(counts, 4 * blocks)] >> np.uint64(11)
    return np.minimum((mantissas.astype(np.float64) + 0.5) * 2.0**-53, np.nextafter(1.0, 0.0))


def _philox(counter: list[Words], key: Words, other: Words) -> Words:
    """Philox 4x64, ten rounds: uint64 [n, 4]."""
    x0, x1, x2, x3 = counter
    for _ in range(10):
        (high0, low0), (high2, low2) = _product(x0, 0xD2E7470EE14C6C93), _product(x2, 0xCA5A826395121157)
        x0, x1, x2, x3 = high2 ^ x1 ^ key, low2, high0 ^ x3 ^ other, low0
        key, other = key + np.uint64(0x9E3779B97F4A7C15), other + np.uint64(0xBB67AE8584CAA73B)
    return np.stack([x0, x1, x2, x3], axis=1)


def _product(a: Words, by: int) -> tuple[Words, Words]:
    """(high, low) 64 bits of each a * by, by halves of 32 bits."""
    half, low32 = np.uint64(32), np.uint64(0xFFFFFFFF)
    al, ah, bl, bh = a & low32, a >> half, np.uint64(by & 0xFFFFFFFF), np.uint64(by >> 32)
    middle = ah * bl + (al * bl >> half)
    other = al * bh + (middle & low32)
    return ah * bh + (middle >> half) + (other >> half), a * np.uint64(by)
