"""The interval that a benchmark prints beside its ratio."""

import itertools
import math

import pytest

from benchmarks.paired import PairedSides
from specscope.measure.step_costs import median_interval


@pytest.mark.parametrize("n", [1, 2, 5, 6, 9, 20, 41])
def test_the_interval_holds_the_median_as_often_as_it_says(n):
    values = list(range(n))
    low, high = median_interval(values)
    assert low + high == n - 1
    below = low + 1  # the interval misses where fewer values than this lie on one side of the median
    misses = 2 * sum(math.comb(n, k) for k in range(below)) / 2**n if n > 1 else 1.0
    assert misses <= 0.05 or (low, high) == (0, n - 1)
    tighter = 2 * sum(math.comb(n, k) for k in range(below + 1)) / 2**n
    assert tighter > 0.05 or high - low <= 2


def test_a_comparison_tells_ratio_and_interval():
    rates = {"a": [99.0, 101.0, 98.0, 100.0, 97.0, 102.0, 100.0], "b": [100.0] * 7}
    row = PairedSides("x", "a", "b", 0.9, rates)
    assert row.ratio == 1.0
    assert all(0.97 <= end <= 1.02 for end in itertools.chain(row.interval))
    assert row.to_dict()["interval"] == row.interval
