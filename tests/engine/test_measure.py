"""What an engine's costs are made of, from rounds whose true costs are known."""

from contextlib import nullcontext

import numpy as np
import pytest

from specscope.engine.measure import DEPTHS, ROUNDS, ROWS, TREES, Bench, measure
from specscope.trace.plan import DynamicPlan

BATCH = 4
ROW, PLAIN, FURTHER, OF_TREES = (
    1.5e-3,
    20e-3,
    1e-3,
    2.5e-3,
)  # seconds of a row, a step, a further request of either kind
FIRST, FIRST_FURTHER, LATER = 4e-3, 0.5e-3, 2e-3


class Rounds(Bench):
    """Rounds in which a machine with these costs is as much slower as `pace` says."""

    def __init__(self, pace):
        self.batch, self.plan, self.pace = BATCH, DynamicPlan(12, 3, 4), pace

    def requests(self):
        return nullcontext()

    def rounds(self):
        alone = {(rows, 1): [PLAIN + ROW * rows] for rows in ROWS}
        together = {
            (n * BATCH, BATCH): [PLAIN + ROW * n * BATCH + (BATCH - 1) * (FURTHER if n == 1 else OF_TREES)]
            for n in (1, *TREES)
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

    assert [point.rows for point in costs.step] == list(ROWS)
    assert [point.seconds for point in costs.step] == [close(PLAIN + ROW * rows) for rows in ROWS]
    assert costs.step_request == close(FURTHER)
    assert costs.tree_request == close(OF_TREES)
    assert costs.first == close(FIRST)
    assert costs.first_request == close(FIRST_FURTHER)
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
    assert costs.step_request == pytest.approx(FURTHER * np.median(pace), rel=1e-3)
    assert costs.tree_request == pytest.approx(OF_TREES * np.median(pace), rel=1e-3)


def test_a_machine_that_is_slow_throughout_has_the_costs_of_its_pace():
    """The ratios are what trees are chosen by."""
    costs = measure(Rounds([2.0] * ROUNDS), {}, print)
    assert costs.step_request / costs.step[0].seconds == pytest.approx(FURTHER / (PLAIN + ROW), rel=1e-3)
