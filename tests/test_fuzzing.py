"""Changed samples into each reader. SPECSCOPE_SWEEP=100000 tries so many of each."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests import fuzzing
from tests.sweep import cases

WORDS = [
    b"",
    b"\0",
    b"\xff",
    b"\n",
    b"NaN",
    b"-1",
    b"1e999",
    b"9" * 30,
    b"null",
    b"[",
    b"{" * 60,
    b'"',
    b"\\u202e",
    b"\x1b[2J",
]
PLACES = st.lists(
    st.tuples(st.integers(0, 2**20), st.integers(0, 60), st.sampled_from(WORDS) | st.binary(max_size=12)),
    max_size=6,
)


def changed(sample, changes):
    """A sample with pieces of it gone and others in their places."""
    for at, gone, new in changes:
        place = at % (len(sample) + 1)
        sample = sample[:place] + new + sample[place + gone :]
    return sample


@pytest.mark.parametrize("examples", [10, pytest.param(300, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", fuzzing.TARGETS)
def test_no_bytes_are_a_traceback(name, examples):
    @settings(max_examples=examples if examples == 10 else cases(examples), suppress_health_check=list(HealthCheck))
    @given(st.sampled_from(fuzzing.samples()[name]), PLACES)
    def bytes_of_all_kinds(sample, changes):
        fuzzing.run(name, changed(sample, changes))

    fuzzing.run(name, b"")
    for sample in fuzzing.samples()[name]:
        fuzzing.TARGETS[name](sample)  # as it is, it is read
    bytes_of_all_kinds()
