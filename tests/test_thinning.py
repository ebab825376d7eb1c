"""Of a matrix of cases some are left out of the ordinary suite, and no value of either side is."""

import math

from hypothesis import given
from hypothesis import strategies as st

from tests.thinning import ordinary

matrices = st.tuples(st.integers(1, 6), st.integers(1, 6), st.integers(2, 5))


@given(matrices)
def test_each_value_that_several_cases_share_is_in_one_that_is_kept(sizes):
    left, right, every = sizes
    cases = [{"left": a, "right": b} for a in range(left) for b in range(right)]
    kept = [cases[place] for place in ordinary(cases, every)]
    if right > 1:
        assert {case["left"] for case in kept} == set(range(left))
    if left > 1:
        assert {case["right"] for case in kept} == set(range(right))
    assert math.ceil(len(cases) / every) <= len(kept) <= max(math.ceil(len(cases) / every), left + right)


@given(st.integers(1, 40), st.integers(2, 5))
def test_of_a_list_one_of_so_many_is_kept(count, every):
    assert len(ordinary([{"name": i} for i in range(count)], every)) == math.ceil(count / every)
