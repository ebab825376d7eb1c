"""Pieces of benchmarks: what they wait for and set is there, and what they print is right."""

import itertools
import math
import os
import subprocess

import pytest

from benchmarks.attach import ANSWER, CLOSE, KEY
from benchmarks.debug import NEVER
from benchmarks.paired import PairedSides
from benchmarks.terminal import module
from specscope.debug.breakpoints import Breakpoints
from specscope.measure.step_costs import median_interval
from tests.tui.sample import replay, running


async def test_the_key_of_attach_opens_what_is_waited_for():
    async with running(replay(5)) as (app, pilot):
        assert ANSWER.decode() not in app.export_screenshot().replace("&#160;", " ")
        await pilot.press(KEY)
        await pilot.pause()
        assert ANSWER.decode() in app.export_screenshot().replace("&#160;", " ")
        await pilot.press({"\x1b": "escape"}[CLOSE])


def test_conditions_of_debug_use_fields_that_there_are():
    breakpoints = Breakpoints()
    for event, condition in NEVER:
        breakpoints.add(event, condition)
    assert len(breakpoints.points) == len(NEVER)


def test_a_module_runs_from_any_folder(tmp_path):
    """Although no child looks in the current one."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        module("benchmarks.replay"), cwd=tmp_path, env=kept | {"PYTHONSAFEPATH": "1"}, capture_output=True
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("n", [1, 2, 5, 6, 9, 20, 41])
def test_the_interval_holds_the_median_as_often_as_it_says(n):
    values = list(range(n))
    low, high = median_interval(values)
    assert low + high == n - 1
    below = low + 1  # the interval misses where fewer values than this lie on one side of the median
    misses = 2 * sum(math.comb(n, k) for k in range(below)) / 2**n if n > 1 else 1.0
    assert misses <= 0.05 or (low, high) == (0, n - 1)
    tighter = 2 * sum(math.comb(n, k) for k in range(below + 1)) / 2**n
    assert tighter > 0.05 or high - low <= 2


def test_a_comparison_tells_ratio_and_interval():
    rates = {"a": [99.0, 101.0, 98.0, 100.0, 97.0, 102.0, 100.0], "b": [100.0] * 7}
    row = PairedSides("x", "a", "b", 0.9, rates)
    assert row.ratio == 1.0
    assert all(0.97 <= end <= 1.02 for end in itertools.chain(row.interval))
    assert row.to_dict()["interval"] == row.interval
