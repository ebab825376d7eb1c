"""Trees and the strings that people write for them."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specscope.errors import UserError
from specscope.trace.record.vocabulary import Vocabulary
from specscope.trace.words import branches, draw_tree
from specscope.tree_shape import parse_tree
from tests.trace.samples import records
from tests.trace.strategies import trees


@st.composite
def shapes(draw):
    """A random set of paths that hangs together, in random order."""
    paths = [()]
    for _ in range(draw(st.integers(1, 12))):
        above = draw(st.sampled_from(paths))
        rank = sum(1 for path in paths if len(path) == len(above) + 1 and path[: len(above)] == above)
        paths.append((*above, rank))
    return draw(st.permutations(paths[1:]))


@given(shapes())
def test_paths_round_trip_through_shape_and_string(paths):
    shape = parse_tree(str(paths))
    assert len(shape) == len(paths)
    assert parse_tree(str(shape)) == shape
    assert all(above < node for node, above in enumerate(shape.parent))
    assert list(shape.depth) == sorted(len(path) for path in paths)
    assert sum(map(len, shape.levels)) == len(shape)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "cannot read the tree"),
        ("0", "no nodes"),
        ("[(0,), (0,)]", "appears twice"),
        ("[(0, 0)]", r"\(0, 0\) has no parent \(0,\)"),
        ("[(0,), (2,)]", r"\(2,\) has no earlier sibling \(1,\)"),
        ("[(-1,)]", "not a path"),
        ("[(True,)]", "not a path"),
        ("999999x999999", "the limit is"),
    ],
)
def test_bad_trees_are_refused_clearly(text, message):
    with pytest.raises(UserError, match=message):
        parse_tree(text)


@given(trees())
def test_ancestors_paths_and_drawing_agree(tree):
    for node in range(len(tree)):
        path = tree.path_to(node)
        assert np.flatnonzero(tree.ancestors[node]).tolist() == path
        assert tree.depth[node] == len(path)
    rows = branches(tree.parent.tolist())
    assert [node for node, _ in rows] == sorted(range(len(tree)), key=tree.path_to)  # depth first, in draw order
    assert sorted(node for node, _ in rows) == list(range(len(tree)))
    assert all(len(lead) == 3 * tree.depth[node] for node, lead in rows)


def test_the_drawing_tells_the_whole_story():
    drawing = draw_tree(records()[3].requests[0], Vocabulary({i: b"tok%d" % i for i in range(50)}))
    assert drawing.splitlines() == [
        "root @8",
        "├─ ✗ tok30  p=0.1000 q=0.5000 a=0.2000 u=0.0500",
        "└─ ✓ tok31  p=0.5000 q=0.2500 a=0.6000 u=0.5000",
        "   └─ ✓ tok32  p=0.9000 q=0.5000 a=1.0000 u=0.9500  ⇒ bonus tok33  p=0.2500",
    ]
