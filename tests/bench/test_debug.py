"""`specscope bench debug`: its breakpoints can be set, each on what its event has."""

from specscope.bench.debug import NEVER
from specscope.debug.breakpoints import Breakpoints


def test_every_condition_is_a_valid_one():
    points = Breakpoints()
    for event, condition in NEVER:
        points.add(event, condition)
    assert len(points.points) == len(NEVER) == 10
