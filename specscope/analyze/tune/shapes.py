"""The best static tree of every size, by dynamic programming over positions (Sequoia, Chen et al. 2024, section 3.1).

A position is a path of child ranks. The accepted tokens of a tree are the sum of rho over its positions, rho being the
mean reach. Of all trees with n nodes, closed under parents and elder siblings, the one of the largest sum is wanted.
With "first child" and "next sibling" as the two arms of each position the closure is one under parents in a binary
tree, and

    best(v, n) = rho(v) + max over a + b = n - 1 of best(first child of v, a) + best(next sibling of v, b).

Sequoia's rho is a product of one rate per rank. Here it is measured at each position that the record holds, and only
beyond them a product of rates (judged.Rates).
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Mapping

import numpy as np

from specscope.analyze.tune.judged import Judge, Path
from specscope.trace.record.tree import Doubles, TreeShape, parse_tree

LEAST = 1e-4  # rho of a position below which nothing is looked for


def positions(judge: Judge, count: int, max_depth: int, max_rank: int) -> dict[Path, float]:
    """rho of about the best `count` positions: from each that was taken, its first child and its next sibling."""
    found: dict[Path, float] = {}
    waiting: list[tuple[float, Path]] = []

    def look(path: Path) -> None:
        if len(path) <= max_depth and path[-1] < max_rank:
            rho = float(judge.position(path)[0].mean())
            if rho >= LEAST:
                heapq.heappush(waiting, (-rho, path))

    look((0,))
    while waiting and len(found) < count:
        rho, path = heapq.heappop(waiting)
        found[path] = -rho
        look((*path, 0))
        look((*path[:-1], path[-1] + 1))
    return found


def best_shapes(rho: Mapping[Path, float], sizes: Collection[int], max_depth: int) -> list[tuple[TreeShape, float]]:
    """The best tree of each size at most `max_depth` deep, with its sum; none of a size for which positions run out."""
    known = {path: value for path, value in rho.items() if len(path) <= max_depth}
    best: dict[Path, Doubles] = {}
    nothing = np.array([0.0])
    for path in sorted(known, key=lambda path: (len(path), path), reverse=True):
        child, sibling = best.get((*path, 0), nothing), best.get((*path[:-1], path[-1] + 1), nothing)
        below = _both(child, sibling, max(sizes) - 1)
        best[path] = np.concatenate([nothing, known[path] + below])
    whole = best.get((0,), nothing)
    return [(_shape(best, known, n), float(whole[n])) for n in sorted(sizes) if n < len(whole)]


def _both(a: Doubles, b: Doubles, most: int) -> Doubles:
    """[n] the largest a[i] + b[n - i], for n up to `most`."""
    size = min(len(a) + len(b) - 1, most + 1)
    found = np.full(size, -np.inf)
    for i, value in enumerate(a[:size]):
        part = b[: size - i]
        found[i : i + len(part)] = np.maximum(found[i : i + len(part)], value + part)
    return found


def _shape(best: Mapping[Path, Doubles], rho: Mapping[Path, float], nodes: int) -> TreeShape:
    """The tree behind best[(0,)][nodes]."""
    taken: list[Path] = []
    left: list[tuple[Path, int]] = [((0,), nodes)]
    nothing = np.array([0.0])
    while left:
        path, n = left.pop()
        if n == 0:
            continue
        taken.append(path)
        below, beside = (*path, 0), (*path[:-1], path[-1] + 1)
        child, sibling = best.get(below, nothing), best.get(beside, nothing)
        sums = [child[a] + sibling[n - 1 - a] for a in range(max(0, n - len(sibling)), min(n, len(child)))]
        a = max(0, n - len(sibling)) + int(np.argmax(sums))
        left += [(below, a), (beside, n - 1 - a)]
    return parse_tree(str(sorted(taken, key=lambda path: (len(path), path))))
