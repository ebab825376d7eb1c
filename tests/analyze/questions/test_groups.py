"""Counts, examples, medians, buckets and intervals of groups."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specscope.analyze.questions.groups import Grouping, Share, by_value, doubling


def test_wilsons_interval():
    low, high = Share(8, 10).interval
    assert (low, high) == pytest.approx((0.49016, 0.94332), abs=1e-5)  # Wilson 1927, as statsmodels has it
    assert Share(0, 0).value is None
    assert Share(0, 0).interval is None
    assert Share(0, 5).interval[0] == 0
    assert Share(5, 5).interval[1] == 1


@given(
    st.lists(st.tuples(st.integers(-1, 3), st.integers(0, 5), st.sampled_from([0.0, 0.5, 1.0, np.nan])), max_size=30)
)
def test_groups_against_loops(items):
    group = np.array([g for g, _, _ in items], np.int64)
    values = np.array([v for _, v, _ in items], np.int64)
    weights = np.array([w for _, _, w in items], np.float64)
    groups = Grouping(group, 4)
    for g in range(4):
        mine = [at for at in range(len(items)) if group[at] == g]
        known = sorted(weights[at] for at in mine if not np.isnan(weights[at]))
        assert groups.counts()[g] == len(mine)
        assert groups.first()[g] == (mine[0] if mine else -1)
        assert groups.medians(weights)[g] == (known[(len(known) - 1) // 2] if known else None)
        assert groups.means(weights)[g] == (pytest.approx(np.mean(known)) if known else None)
        heaviest = [at for at in mine if weights[at] == (known[-1] if known else None)]
        assert groups.best(weights)[g] == (heaviest[0] if heaviest else mine[0] if mine else -1)
        counts = dict(groups.commonest(values)[g])
        assert counts == {v: [values[at] for at in mine].count(v) for v in {values[at] for at in mine}}
        assert list(counts.values()) == sorted(counts.values(), reverse=True)


def test_values_and_their_groups():
    values, groups = by_value(np.array([7, 3, 7, 9]))
    assert values.tolist() == [3, 7, 9]
    assert groups.counts() == [1, 2, 1]


def test_buckets_double():
    buckets = doubling(16)
    places = buckets.place(np.array([0, 15, 16, 31, 32, 64, 1e9, np.nan]))
    assert [buckets.name(at) for at in places[:6]] == ["0–15", "0–15", "16–31", "16–31", "32–63", "64–127"]
    assert buckets.name(places[6]) == "262,144+"
    assert buckets.name(places[7]) == "unknown"
