"""What an engine's costs are made of, from rounds whose true costs are known."""

from contextlib import nullcontext
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specscope.speculate.sizing.measure import DEPTHS, ROUNDS, ROWS, Bench, batches, measure, trees_of, uneven
from specscope.trace.plan import DynamicPlan

BATCH, MOST = 4, 12
# seconds of a row, a step, a further request, and of the first tree in a batch
ROW, PLAIN, FURTHER, JUMP = 1.5e-3, 20e-3, 1e-3, 2.5e-3
FIRST, FIRST_FURTHER, LATER = 4e-3, 0.5e-3, 2e-3


def step_takes(rows, batch):
    return PLAIN + ROW * rows + (batch - 1) * FURTHER + JUMP * (rows > batch > 1)


class Rounds(Bench):
    """Rounds in which a machine with these costs is as much slower as `pace` says."""

    def __init__(self, pace):
        self.batch, self.plan, self.pace = BATCH, DynamicPlan(12, 3, 4), pace
        self.sizes = batches(MOST)

    def requests(self):
        return nullcontext()

    def rounds(self):
        alone = {(rows, 1): [PLAIN + ROW * rows] for rows in ROWS}
        together = {
            (size + nodes, size): [step_takes(size + nodes, size)] for size in self.sizes for nodes in trees_of(size)
        }
        drafts = {
            (depth, batch): [FIRST + (batch - 1) * FIRST_FURTHER + (depth - 1) * LATER]
            for depth in DEPTHS
            for batch in (1, BATCH)
        }

        def slowed(figures):
            return {key: [seconds * slow for slow in self.pace] for key, (seconds,) in figures.items()}

        return slowed({**alone, **together}), slowed(drafts)


def check(costs, within):
    def close(wanted):
        return pytest.approx(wanted, rel=within)

    assert [point.rows for point in costs.steps[0]] == list(ROWS)
    assert [point.seconds for point in costs.steps[0]] == [close(PLAIN + ROW * rows) for rows in ROWS]
    assert costs.batches == [1, BATCH, MOST]
    for batch in (1, BATCH, MOST):
        for nodes in (0, 1, 2, 7, 40):
            assert costs.step_seconds(batch + nodes, batch) == close(step_takes(batch + nodes, batch))
    assert [costs.first_seconds(batch) for batch in (1, 7)] == [close(FIRST), close(FIRST + 6 * FIRST_FURTHER)]
    assert [(point.rows, point.seconds) for point in costs.passes] == [(4, close(LATER)), (16, close(LATER))]


def test_costs_are_those_of_the_machine():
    check(measure(Rounds([1.0] * ROUNDS), {}, print), within=1e-3)


@pytest.mark.parametrize("slow_rounds", [1, 2, 4])
def test_rounds_in_which_the_machine_was_slow_do_not_count(slow_rounds):
    pace = np.ones(ROUNDS)
    pace[:slow_rounds] = 1.8
    check(measure(Rounds(pace.tolist()), {}, print), within=1e-3)


def test_noise_of_a_step_falls_out_of_what_a_request_adds():
    """Each round has a pace of its own: a difference between one round's step and another's would be all noise."""
    pace = 1 + 0.3 * np.random.default_rng(0).random(ROUNDS)
    costs = measure(Rounds(pace.tolist()), {}, print)
    for batch in (BATCH, MOST):
        added = costs.step_seconds(batch + 1, batch) - costs.step_seconds(batch, batch)
        assert added == pytest.approx((ROW + JUMP) * np.median(pace), rel=1e-3)


def test_a_machine_that_is_slow_throughout_has_the_costs_of_its_pace():
    """The ratios are what trees are chosen by."""
    costs = measure(Rounds([2.0] * ROUNDS), {}, print)
    plain = costs.step_seconds(1, 1)
    assert costs.step_seconds(MOST, MOST) / plain == pytest.approx(step_takes(MOST, MOST) / (PLAIN + ROW), rel=1e-3)


@pytest.mark.parametrize("most", [1, 2, 4, 5, 16, 17, 64])
def test_batches_go_up_to_the_most(most):
    sizes = batches(most)
    assert sizes == sorted(set(sizes))
    assert sizes[-1:] == ([most] if most > 1 else [])
    assert all(2 * size <= further < 8 * size for size, further in pairwise([1, *sizes]))


@given(st.integers(0, 200), st.integers(1, 64))
def test_nodes_are_shared_out_whole(nodes, batch):
    counts = uneven(nodes, batch)
    assert len(counts) == batch
    assert sum(counts) == nodes
    assert min(counts) >= 0
