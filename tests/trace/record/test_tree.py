"""Trees and how people write them; sampling parameters; coins; and entropies of what is left of a row."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from specscope.errors import UserError
from specscope.trace.record.coins import Stream, coins
from specscope.trace.record.notes import spread, spread_without
from specscope.trace.record.params import StructuredOutputs
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


def row(seed, off):
    """A likely token 7, and a float32 softmax that adds up to 1 + off."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(0, 3, 20_000)
    logits[7] += rng.uniform(6, 16)
    weights = np.exp(logits - logits.max())
    return (weights / weights.sum() * (1 + off)).astype(np.float32)


@pytest.mark.parametrize("off", [0.0, -1e-5, 1e-5])
def test_what_is_left_has_its_own_entropy_whatever_the_row_adds_up_to(off):
    known = 0
    for seed in range(60):
        p = row(seed, off)
        found = spread_without(spread(p), float(p[7]), float(p.sum()))
        if found is None:
            continue
        left = p.astype(np.float64)
        left[7] = 0
        left = left[left > 0] / left.sum()
        entropy = -(left * np.log(left)).sum()
        varentropy = (left * np.log(left) ** 2).sum() - entropy**2
        assert found == (pytest.approx(entropy, rel=1e-5), pytest.approx(varentropy, rel=1e-3))
        known += 1
    assert known > 20


def test_where_little_is_left_nothing_is_said():
    p = np.array([0.95, 0.03, 0.02], np.float32)
    assert spread_without(spread(p), 0.95, 1.0) is None


seeds = st.integers(0, 2**63 - 1)
positions = st.integers(0, 2**31)


@given(seeds, st.sampled_from(Stream), positions, st.integers(0, 40), st.integers(0, 40))
def test_a_coin_does_not_depend_on_how_many_follow_it(seed, stream, position, few, more):
    short, long = sorted((few, more))
    assert np.array_equal(coins(seed, stream, position, short), coins(seed, stream, position, long)[:short])


@given(seeds, positions)
def test_coins_lie_in_the_open_interval_and_streams_differ(seed, position):
    draft, check = (coins(seed, stream, position, 8) for stream in Stream)
    assert ((draft > 0) & (draft < 1) & (check > 0) & (check < 1)).all()
    assert not np.intersect1d(draft, check).size
    assert not np.intersect1d(draft, coins(seed, Stream.DRAFT, position + 1, 8)).size


def test_the_largest_and_smallest_bits_stay_inside(monkeypatch):
    class Extreme:
        def __init__(self, **_):
            pass

        def random_raw(self, count):
            return np.array([0, 2**64 - 1], dtype=np.uint64)[:count]

    monkeypatch.setattr(np.random, "Philox", Extreme)
    low, high = coins(0, Stream.DRAFT, 0, 2)
    assert 0 < low < 1e-15
    assert 1 - 1e-15 < high < 1


def test_coins_are_uniform_over_positions():
    values = np.concatenate([coins(3, Stream.VERIFY, position, 4) for position in range(2000)])
    assert stats.kstest(values, "uniform").pvalue > 0.01


def test_coins_are_stable_over_versions():
    """Captures are replayed by later versions: these values may never change."""
    assert coins(1, Stream.VERIFY, 5, 2).tolist() == [0.3234783185625372, 0.6681304086048103]


def test_a_schema_as_a_mapping_is_kept_as_text_in_its_order():
    schema = {"type": "object", "properties": {"b": {}, "a": {}}}
    assert StructuredOutputs(json=schema).json == json.dumps(schema)


@pytest.mark.parametrize(
    ("form", "why"),
    [
        ({}, "exactly one of json, regex, choice, grammar, json_object; given: none"),
        ({"json": "[" * 2000 + "]" * 2000}, "json is not valid JSON"),
        ({"json": '{"a":' * 65 + "1" + "}" * 65}, "nested more than 64 deep"),
        ({"json": {"a": float("nan")}}, "cannot be written as JSON"),
        ({"json": {"a": "\ud800"}}, "json"),
        ({"json": " " * 65537 + "{}"}, "at most 64 KiB"),
        ({"regex": "a" * 8193}, "at most 8 KiB"),
        ({"regex": "a\0"}, "NUL"),
        ({"regex": "\ud800"}, "regex must be"),
        ({"choice": ("a\0",)}, "NUL"),
        ({"choice": ("a",) * 1001}, "1 to 1000"),
    ],
)
def test_what_cannot_be_used_is_refused_in_one_line(form, why):
    with pytest.raises(UserError, match=why) as caught:
        StructuredOutputs(**form)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 250


def test_one_form_has_one_kind_and_one_text():
    assert StructuredOutputs(json='{"a":' * 64 + "1" + "}" * 64).kind == "json"  # so many levels are allowed
    assert (StructuredOutputs(json="true").kind, StructuredOutputs(regex="[0-9]{3}").kind) == ("json", "regex")
    assert StructuredOutputs(choice=("a", 'b"')).text == '["a", "b\\""]'
    assert StructuredOutputs(json_object=True).text == ""
