"""The breakpoints that `python -m benchmarks debug` sets."""

from benchmarks.debug import NEVER
from specscope.debug.breakpoints import Breakpoints


def test_its_conditions_use_fields_that_there_are():
    breakpoints = Breakpoints()
    for event, condition in NEVER:
        breakpoints.add(event, condition)
    assert len(breakpoints.points) == len(NEVER)
