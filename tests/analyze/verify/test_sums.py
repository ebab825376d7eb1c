"""The bound, the power, and Holm's correction."""

import math

import numpy as np
import pytest

from specscope.analyze.significance import holm
from specscope.analyze.verify.sums import Distance, Sum


def total(rng, chance, count, bias=0.0):
    a = np.full(count, chance)
    found = (rng.random(count) < a + bias) - a
    return Sum.of(found, a * (1 - a), 1.0, np.arange(count))


@pytest.mark.parametrize(("chance", "count"), [(0.5, 20), (0.01, 50), (0.002, 2000), (0.9, 400)])
def test_the_bound_holds(chance, count):
    """P(p-value <= x) <= x, for few and for rare ones too."""
    rng = np.random.default_rng(1)
    values = np.array([total(rng, chance, count).p_value for _ in range(4000)])
    for level in (0.3, 0.1, 0.01):
        assert (values <= level).mean() <= level


def test_the_power_is_what_it_says():
    rng = np.random.default_rng(2)
    level, count = 0.001, 2000
    least = total(rng, 0.4, count).least_bias(level)
    seen = np.mean([total(rng, 0.4, count, least).p_value <= level for _ in range(400)])
    missed = np.mean([total(rng, 0.4, count, least / 2).p_value <= level for _ in range(400)])
    assert seen > 0.92
    assert missed < 0.5


def test_holm():
    """Holm 1979: the smallest against alpha / m, the next against alpha / (m - 1)."""
    assert holm([0.01, 0.04, 0.03, 0.005], 0.05) == [True, False, False, True]
    assert holm([], 0.05) == []
    assert holm([0.06], 0.05) == [False]


def test_a_sum_says_which_spoke_loudest():
    found = Sum.of(np.array([0.1, -0.9, 0.2]), np.full(3, 0.25), 1.0, np.array([7, 8, 9]))
    assert found.worst == 8
    assert found.total == pytest.approx(-0.6)
    assert found.z == pytest.approx(-0.6 / math.sqrt(0.75))
    assert not found.judged  # three are too few


def test_the_distance_of_uniform_numbers():
    rng = np.random.default_rng(3)
    values = [Distance.of(rng.random(200)).p_value for _ in range(1000)]
    assert np.mean(np.array(values) <= 0.05) <= 0.05 + 3 * math.sqrt(0.05 / 1000)  # the bound is all but exact
    assert Distance.of(rng.random(200) ** 2).p_value < 1e-6
    assert not Distance.of(np.zeros(0)).judged
