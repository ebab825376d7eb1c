"""Counts, examples and intervals of groups."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specscope.analyze.questions.groups import Share, by_value


def test_wilsons_interval():
    low, high = Share(8, 10).interval
    assert (low, high) == pytest.approx((0.49016, 0.94332), abs=1e-5)  # Wilson 1927, as statsmodels has it
    assert Share(0, 0).value is None
    assert Share(0, 0).interval is None
    assert Share(0, 5).interval[0] == 0
    assert Share(5, 5).interval[1] == 1


@given(
    st.lists(
        st.tuples(st.integers(0, 3), st.integers(-1, 5), st.sampled_from([0.0, 0.5, 1.0, np.nan])),
        min_size=1,
        max_size=30,
    )
)
def test_groups_against_loops(items):
    keys, values = (np.array(column, np.int64) for column in list(zip(*items, strict=True))[:2])
    weights = np.array([weight for *_, weight in items], np.float64)
    different, groups = by_value(keys)
    assert different.tolist() == sorted(set(keys.tolist()))
    for g, key in enumerate(different.tolist()):
        mine = np.flatnonzero(keys == key).tolist()
        known = sorted(weights[at] for at in mine if not np.isnan(weights[at]))
        assert groups.counts()[g] == len(mine)
        assert groups.shares(weights == 1)[g] == Share(known.count(1), len(mine))
        assert groups.means(weights)[g] == (pytest.approx(np.mean(known)) if known else None)
        heaviest = [at for at in mine if weights[at] == (known[-1] if known else None)]
        assert groups.best(weights)[g] == (heaviest or mine)[0]
        counts = dict(groups.commonest(values)[g])
        there = [values[at] for at in mine if values[at] >= 0]
        assert counts == {v: there.count(v) for v in set(there)}
        assert list(counts.values()) == sorted(counts.values(), reverse=True)
