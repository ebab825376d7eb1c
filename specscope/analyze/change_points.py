"""Where the level of a series changes, of weighted numbers in the order of time.

Those stretches are sought that differ most from the rest (circular binary segmentation: Olshen and others 2004).
Neighbours may have something in common, so that their sums vary more than those of independent numbers: measured by
sums of neighbours of each size in what a fit leaves; and, in long series, by how far neighbouring stretches are apart,
of which the median counts, as levels that change seldom do not move it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from specscope.analyze.significance import t_two_sided
from specscope.trace.record.tree import Doubles

LEAST = 3  # numbers of a level
CHANCE = 0.001
MOST = 1500  # places at which a level may begin, of those that are tried
MANY = 200  # numbers, among which there may be many levels
BLOCKS = 3  # sums of neighbours, at least, of which it is told how they vary
UNSURE = 2  # standard errors by which that may be more
NEIGHBOURS = 15  # stretches of one size, at least, likewise
GROWS = 2  # sizes beyond the largest that could be measured, over which sums go on to vary more
DEGREES = 20  # of freedom, at most, of what was measured so
MEDIAN = 0.4549  # of a square of a normal number


def steps(y: Doubles, w: Doubles, bounds: Sequence[int]) -> Doubles:
    """[N] the mean of each stretch."""
    parts = np.split(np.arange(len(y)), bounds)
    return np.concatenate([np.full(len(part), np.average(y[part], weights=w[part])) for part in parts])


def segments(y: Doubles, w: Doubles, known: float) -> list[int]:
    """Where a level begins that is not the one before. `known`: the least variance at weight 1."""
    m = len(y)
    if m < 2 * LEAST:
        return []
    (first, last), gain, tried = _most_different(y, w)
    found, slopes = noises(y, w, steps(y, w, sorted({first, last} - {0, m})), known)
    if least_chance(gain, found) * (1 if slopes else tried) >= CHANCE:
        return []
    parts = [(a, b) for a, b in ((0, first), (first, last), (last, m)) if b > a]
    inner = [a + place for a, b in parts for place in segments(y[a:b], w[a:b], known)]
    return sorted({first, last, *inner} - {0, m})


def noises(y: Doubles, w: Doubles, fit: Doubles, known: float) -> tuple[list[tuple[float, float]], bool]:
    """What the variance at weight 1 may be, with degrees of freedom, where a fit holds, or more levels or a slope do;
    and whether there is a slope: then some change is sure, and only its place is sought."""
    found = [_left(y, w, fit, known)]
    if len(y) > MANY:  # there may be more levels than these, which that takes for noise
        found.append((max(varies(y, w)[1], known), DEGREES))
    line = np.asarray(np.polyval(np.polyfit(np.arange(len(y)), y, 1, w=np.sqrt(w)), np.arange(len(y))), np.float64)
    sloped = _left(y, w, line, known)
    slopes = least_chance(float((w * (line - np.average(y, weights=w)) ** 2).sum()), [sloped]) < CHANCE
    return found + [sloped] * slopes, slopes


def least_chance(gain: float, found: Sequence[tuple[float, float]]) -> float:
    """The chance that so much less is left unexplained, by the noise that makes it least, of all that were tried."""
    return len(found) * min(t_two_sided(math.sqrt(gain / max(noise, 1e-12)), free) for noise, free in found)


def _left(y: Doubles, w: Doubles, fit: Doubles, known: float) -> tuple[float, float]:
    """The variance that a fit leaves at weight 1, with what neighbours have in common, and its degrees of freedom.

    What is known to be chance by itself, as counting is, they do not have in common.
    """
    m, left = len(y), np.sqrt(w) * (y - fit)
    square, size = float(left @ left), 2
    alone = square / (m - 2)
    each: list[float] = [1.0]
    while (count := m // size) >= BLOCKS and alone:
        sums = left[: count * size].reshape(count, size).sum(1)
        each.append(float(sums @ sums) / (count * size * alone) * (1 + UNSURE * math.sqrt(2 / count)))
        size *= 2
    grows = max(1.0, each[-1] / each[-2]) if len(each) > 1 else 1.0
    like = float(left[1:] @ left[:-1]) / max(square, 1e-12)  # the next interval: too low, as a mean was taken
    like = min(max(like + (1 + 4 * like) / m + m**-0.5, 0.0), 0.9)
    worse = max((1 + like) / (1 - like), max(each) * grows)
    most = max(alone * (1 + UNSURE * math.sqrt(2 / (m - 2))) - known, 0.0)
    shared = max(1 - known / alone, 0.0) if alone else 0.0
    return known + most * worse, max((m - 2) / (1 + (worse - 1) * shared), 1.0)


def _most_different(y: Doubles, w: Doubles) -> tuple[tuple[int, int], float, float]:
    """(the stretch that differs most from the rest, by how much less it leaves unexplained, of how many)."""
    m = len(y)
    grid = np.unique([0, m, *range(LEAST, m - LEAST + 1, -(-m // MOST))])
    weight = np.concatenate([[0.0], np.cumsum(w)])
    sums = np.concatenate([[0.0], np.cumsum(w * (y - np.average(y, weights=w)))])
    at, most = (0, m), 0.0
    for index, first in enumerate(grid.tolist()):
        last = grid[index + 1 :]
        last = last[(last - first >= LEAST) & ((first > 0) | (last < m))]
        inside = weight[last] - weight[first]
        gain = (sums[last] - sums[first]) ** 2 * weight[-1] / (inside * (weight[-1] - inside))
        if len(gain) and gain.max() > most:
            most, at = float(gain.max()), (first, int(last[gain.argmax()]))
    return at, most, len(grid) * (len(grid) - 1) / 2


def varies(y: Doubles, w: Doubles) -> tuple[float, float]:
    """The variance of levels at weight 1: of one interval, and of sums of neighbours, where it is largest."""
    each: list[float] = []
    size = 1
    while (m := len(y) // size) > NEIGHBOURS or (size == 1 and m > 1):
        weight = w[: m * size].reshape(m, size).sum(1)
        means = (w * y)[: m * size].reshape(m, size).sum(1) / weight
        apart = np.diff(means) ** 2 / (1 / weight[1:] + 1 / weight[:-1])
        unsure = 1 + math.sqrt(5.4 / len(apart)) if size > 1 else 1.0
        each.append(float(np.median(apart)) / MEDIAN * unsure)
        size *= 2
    grows = each[-1] / each[-2] if len(each) > 1 and each[-2] else 1.0
    return (each[0], max(each) * max(1.0, grows) ** GROWS) if each else (0.0, 0.0)
