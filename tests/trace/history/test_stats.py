"""The figures, against numbers worked out by hand."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specscope.trace.history.stats import Acceptance, mean_tau, measure
from specscope.trace.record.aggregate import Aggregate
from specscope.trace.record.records import FinalKind
from specscope.trace.record.tree import ROOT, DraftTree
from tests.trace.samples import part, records, verdict


def chain(depth, accepted):
    tree = DraftTree.build(list(range(depth)), range(-1, depth - 1))
    outcome = [1] * accepted + [2] * (accepted < depth) + [0] * max(depth - accepted - 1, 0)
    kind = FinalKind.BONUS if accepted == depth else FinalKind.RECOVERED
    return part(0, tree, verdict(tree, outcome, range(accepted), 9, kind), accepted + 1)


def test_figures_of_three_chains():
    figures = measure([chain(3, 3), chain(3, 1), chain(2, 0)])
    assert figures.tau == pytest.approx(1 + 4 / 3)
    assert figures.rate == pytest.approx(4 / 8)
    assert figures.per_position == pytest.approx([2 / 3, 1 / 3, 1 / 3])
    assert figures.per_position_corrected == pytest.approx([2 / 3, 1 / 3, 1 / 2])
    assert figures.conditional == pytest.approx([2 / 3, 1 / 2, 1])
    assert figures.counts == [3, 2, 1, 1]
    assert figures.kinds == {FinalKind.BONUS: 1, FinalKind.RECOVERED: 2}


def test_trees_count_nodes_and_depth():
    figures = measure(p for record in records() for p in record.requests)
    assert (figures.steps, figures.drafts, figures.drafted, figures.accepted) == (3, 2, 5, 3)
    assert figures.depth_rate == pytest.approx(3 / 4)
    assert figures.emitted == 6


def test_an_accepted_leaf_above_the_deepest_node_is_no_trial_below_it():
    tree = DraftTree.build([1, 2, 3], [ROOT, ROOT, 0])
    figures = measure([part(0, tree, verdict(tree, [2, 1, 0], [1], 9, FinalKind.BONUS), 2)])
    assert figures.conditional == [1.0, None]
    assert figures.per_position_corrected == [1.0, 0.0]


def test_a_depth_that_no_draft_proposed_has_no_rate():
    figures = measure([Aggregate("x", drafts=4, drafted=6, accepted=3, accepted_at=(2, 1, 0), proposed_at=(4, 2, 0))])
    assert figures.per_position == [0.5, 0.25, None]
    assert figures.per_position_corrected == [0.5, 0.5, None]
    assert figures.to_dict()["proposed_at"] == [4, 2, 0]


def test_nothing_gives_none_and_not_nan():
    empty = Acceptance()
    assert (empty.tau, empty.rate, empty.depth_rate, empty.per_position) == (None, None, None, [])
    assert mean_tau([empty]) is None


@given(st.lists(st.tuples(st.integers(1, 5), st.integers(0, 5)), max_size=12), st.integers(0, 12))
def test_merging_parts_is_counting_the_whole(sizes, cut):
    steps = [chain(depth, min(depth, accepted)) for depth, accepted in sizes]
    first, second = measure(steps[:cut]), measure(steps[cut:])
    first.merge(second)
    assert first.to_dict() == measure(steps).to_dict()
