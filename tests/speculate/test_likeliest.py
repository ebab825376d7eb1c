"""The largest few of a row, found in blocks: those that a sort finds."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specscope.speculate.sampling import BLOCK, LONG, likeliest


@given(
    st.sampled_from([10, BLOCK, LONG, LONG + 1, 3 * LONG]),
    st.integers(1, 5),
    st.integers(1, 50),
    st.sampled_from([1.0, 1e-3]),
    st.integers(0, 99),
)
@settings(max_examples=80, deadline=None)
def test_they_are_those_of_a_sort(size, rows, count, step, seed):
    """Ties and infinities among them (`step`: of few values there are many alike)."""
    generator = torch.Generator().manual_seed(seed)
    x = (torch.randn(rows, size, generator=generator) / step).round() * step
    x[torch.rand(rows, size, generator=generator) < 0.3] = -torch.inf
    count = min(count, size)
    values, columns = likeliest(x, count)
    assert values.tolist() == x.sort(descending=True).values[:, :count].tolist()
    assert x.gather(1, columns).tolist() == values.tolist()
    assert all(len(set(row)) == count for row in columns.tolist())


@pytest.mark.parametrize("size", [LONG, LONG + 1])
def test_which_of_equals_does_not_depend_on_other_rows(size):
    x = torch.randint(0, 3, (9, size), generator=torch.Generator().manual_seed(1)).float()
    whole = likeliest(x, 6)[1]
    assert all(likeliest(x[i : i + 1], 6)[1].tolist() == whole[i : i + 1].tolist() for i in range(9))
