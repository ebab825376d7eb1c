"""What a step is said to take between, below and beyond the batches that were measured."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specscope.speculate.costs import Costs
from specscope.trace.costs import CostPoint, at


def curve(*points):
    return tuple(CostPoint(rows, seconds, seconds, seconds) for rows, seconds in points)


STEP = curve((1, 10.0), (2, 12.0), (65, 75.0))
FOUR = curve((4, 16.0), (5, 17.0), (8, 23.0))
TWENTY = curve((20, 48.0), (21, 52.0), (60, 91.0))
COSTS = Costs({}, STEP, (FOUR, TWENTY), 0.0, 0.0, ())


@pytest.mark.parametrize(("batch", "points"), [(1, STEP), (4, FOUR), (20, TWENTY)])
def test_a_batch_that_was_measured_is_its_curve(batch, points):
    for rows in range(batch, points[-1].rows + 1):
        assert COSTS.step_seconds(rows, batch) == pytest.approx(at(points, rows))


def test_between_batches_it_lies_between():
    assert COSTS.step_seconds(12, 12) == pytest.approx((16 + 48) / 2)
    assert COSTS.step_seconds(13, 12) == pytest.approx((16 + 48) / 2 + (1 + 4) / 2)
    assert COSTS.step_seconds(2, 2) == pytest.approx(10 + (16 - 10) / 3)


def test_beyond_the_largest_a_request_adds_the_same_and_trees_cost_as_there():
    assert COSTS.step_seconds(36, 36) == pytest.approx(48 + (48 - 16))
    assert COSTS.step_seconds(37, 36) - COSTS.step_seconds(36, 36) == pytest.approx(4.0)


def test_beyond_the_most_rows_a_row_takes_what_it_takes_of_one_request():
    assert COSTS.step_seconds(30, 4) == pytest.approx(23.0 + at(STEP, 30) - at(STEP, 8))


def test_where_one_request_was_measured_rows_decide():
    assert Costs({}, STEP, (), 0.0, 0.0, ()).step_seconds(7, 3) == pytest.approx(at(STEP, 7))


def test_the_first_tree_of_a_batch_may_cost_more_than_its_row():
    assert COSTS.first_tree_seconds(20) == pytest.approx(4 - 1)
    assert COSTS.first_tree_seconds(4) == 0


@given(st.integers(1, 70), st.lists(st.integers(0, 200), min_size=2, max_size=2))
def test_more_rows_or_requests_never_take_less(batch, nodes):
    few, many = sorted(nodes)
    assert COSTS.step_seconds(batch + few, batch) <= COSTS.step_seconds(batch + many, batch) + 1e-9
    assert COSTS.step_seconds(batch, batch) <= COSTS.step_seconds(batch + 1, batch + 1) + 1e-9
