"""The best static tree of a size: against every tree there is."""

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


def test_there_are_as_many_trees_as_catalan_says():
    assert [len(every_tree(n, MOST, MOST)) for n in range(1, MOST + 1)] == [1, 2, 5, 14, 42, 132]


@given(st.data())
def test_no_tree_is_better(data):
    """Also where a child's figure is above its parent's: noise can make it so."""
    width, depth = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 4))
    positions = [p for d in range(1, depth + 1) for p in itertools.product(range(width), repeat=d)]
    drawn = np.random.default_rng(data.draw(st.integers(0, 10**6)))
    rho = dict(zip(positions, drawn.random(len(positions)), strict=True))
    found = best_shapes(rho, range(1, MOST + 1), depth)
    for nodes, (shape, value) in enumerate(found, 1):
        best = max(sum(rho[path] for path in tree) for tree in every_tree(nodes, width, depth))
        assert value == pytest.approx(best)
        assert len(shape) == nodes
        assert sum(rho[path] for path in shape.paths) == pytest.approx(value)
    assert len(found) == min(MOST, len(positions))
