"""Coins are a pure function of what they decide, and lie in the open interval."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from specscope.trace.record.coins import Stream, coins

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
