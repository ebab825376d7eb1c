"""Arrival times have the distribution that they say."""

import numpy as np
import pytest
from scipy import stats

from specscope.bench.datasets import Load, arrivals


@pytest.mark.parametrize("burstiness", [0.3, 1.0, 5.0])
def test_gaps_have_a_gamma_distribution(burstiness):
    at = arrivals(20_000, 50.0, burstiness, seed=1)
    gaps = np.diff([0.0, *at])
    wanted = stats.gamma(burstiness, scale=1 / (50.0 * burstiness))
    assert stats.kstest(gaps, wanted.cdf).pvalue > 0.001
    other = stats.gamma(burstiness * 1.2, scale=1 / (50.0 * burstiness * 1.2))
    assert stats.kstest(gaps, other.cdf).pvalue < 0.001


@pytest.mark.parametrize(("count", "rate"), [(1, 3.0), (7, 0.5), (100, 40.0)])
def test_the_offered_rate_is_the_one_that_was_asked_for(count, rate):
    at = arrivals(count, rate, 1.0, seed=5)
    assert len(at) == count
    assert at[-1] == pytest.approx(count / rate)
    assert list(at) == sorted(at)
    assert at[0] > 0


def test_the_seed_decides():
    assert arrivals(9, 1.0, 1.0, seed=2) == arrivals(9, 1.0, 1.0, seed=2)
    assert arrivals(9, 1.0, 1.0, seed=2) != arrivals(9, 1.0, 1.0, seed=3)


def test_a_load_in_words():
    assert [Load(rate=2.5).name, Load(concurrency=8).name] == ["rate 2.5/s", "concurrency 8"]
    assert [Load(rate=2.5).size, Load(concurrency=8).size] == [2.5, 8.0]
