"""The best static tree of a size, against every tree there is."""

import itertools
from functools import cache

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specscope.analyze.tune.candidates import best_shapes

MOST = 6


@cache
def every_tree(nodes, width, depth):
    """All trees of so many nodes, closed under parents and elder siblings, as sets of rank paths."""
    if nodes == 0:
        return [frozenset()]
    found = set()
    for tree in every_tree(nodes - 1, width, depth):
        for above in [(), *tree]:
            rank = sum(path[:-1] == above and len(path) == len(above) + 1 for path in tree)
            if rank < width and len(above) < depth:
                found.add(tree | {(*above, rank)})
    return sorted(found, key=sorted)


@given(st.data())
def test_no_tree_is_better(data):
    """Where a child has less reach than its parent, and than its elder sibling."""
    width, depth = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 4))
    drawn = np.random.default_rng(data.draw(st.integers(0, 10**6)))
    rho = {(): 1.0}
    positions = [p for d in range(1, depth + 1) for p in itertools.product(range(width), repeat=d)]
    for path in positions:
        elder = rho[(*path[:-1], path[-1] - 1)] if path[-1] else 1.0
        rho[path] = min(elder, rho[path[:-1]]) * drawn.uniform(0.2, 1)
    found = list(best_shapes(rho.__getitem__, range(1, MOST + 1), depth, width))
    for nodes, shape in enumerate(found, 1):
        assert len(shape) == nodes
        best = max(sum(rho[path] for path in tree) for tree in every_tree(nodes, width, depth))
        assert sum(rho[path] for path in shape.paths) == pytest.approx(best)
    assert len(found) == min(MOST, len(positions))
