"""Which node of a tree is not worth its row: counted by hand, and against a count node by node."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specscope.analyze.questions.answers import answer, grids
from specscope.analyze.questions.evidence import Evidence
from specscope.analyze.questions.rates import FEWEST_ROWS, by_cell
from specscope.trace.record.vocabulary import Vocabulary
from tests.analyze.histories import demo

from .made import decode, run_of

ROOT = Path(__file__).parents[3]
FORK = [-1, -1, 0]  # two below the root, one below the first of them


def cells(history):
    return {(cell.depth, cell.sibling): cell for cell in by_cell(Evidence.of(history)).cells}


def test_each_cell_is_counted():
    first = [decode([1, 2, 3], FORK, path=[0, 2], index=at, own=[0.8, 0.1, 0.5]) for at in range(FEWEST_ROWS)]
    second = decode([1, 2, 3], FORK, path=[1], rejected=[0], index=FEWEST_ROWS, own=[0.2, 0.3, 0.5])
    forced = decode([1, 2, 3], FORK, path=[0], forced=[0], index=FEWEST_ROWS + 1)
    history = run_of([*first, second, forced, decode(index=FEWEST_ROWS + 2)])
    found = cells(history)
    counts = {key: (cell.accepted.total, cell.tried, cell.accepted.count) for key, cell in found.items()}
    assert counts == {(1, 1): (21, 21, 20), (1, 2): (21, 1, 1), (2, 1): (21, 20, 20)}
    assert found[1, 1].draft_p == pytest.approx((20 * 0.8 + 0.2) / 21)
    clearest = found[1, 1].examples.clearest
    assert (clearest.request, clearest.index, clearest.node) == ("a", FEWEST_ROWS, 0)  # it was rejected there
    answers = answer(history)
    assert [(cell.depth, cell.sibling) for cell in answers.tree.cells] == [(1, 2), (2, 1), (1, 1)]  # the worst first
    grid = grids(answers, Vocabulary())[-1]
    assert grid.summary.startswith("least useful: depth 1 sibling 2 (1 of 21 accepted), depth 2 sibling 1")
    assert grid.rows[0][:6] == ("1", "2", "21", "1", "1", "4.8%")
    assert grid.rows[0][7:9] == ("100.0%", "0.110")


def test_few_rows_condemn_no_node():
    history = run_of([decode([1, 2], [-1, -1], rejected=[0, 1])])
    found = by_cell(Evidence.of(history))
    assert (len(found.cells), found.worst) == (2, ())
    assert grids(answer(history), Vocabulary())[-1].summary == "too few rows to name the least useful"
    alone = by_cell(Evidence.of(run_of([decode([1], rejected=[0], index=at) for at in range(30)])))
    assert alone.worst == ()  # one cell alone is not the worst of any


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 6), st.integers(1, 12))
def test_totals_are_those_of_the_stats(seed, requests, steps):
    history = demo(requests, steps, seed)
    found, counted = answer(history), history.acceptance
    assert sum(cell.accepted.total for cell in found.tree.cells) == counted.drafted
    assert sum(cell.accepted.count for cell in found.tree.cells) == counted.accepted
    assert found.rejections.rejected.total - found.rejections.rejected.count == counted.accepted
    for name in history.requests:
        alone, mine = answer(history, name), history.requests[name].acceptance
        assert sum(cell.accepted.count for cell in alone.tree.cells) == mine.accepted
