"""The frame governor, on clocks of its own."""

from __future__ import annotations

import pytest

from specscope.tui.governor import GOAL, LONGEST, SHORTEST, FrameGovernor


class Machine:
    """A clock that a frame of a given cost moves on."""

    def __init__(self, cores: int = 2, fps: float = 10) -> None:
        self.now = self.cpu = 100.0
        self.governor = FrameGovernor(fps, cores=cores, clock=lambda: self.now, cpu=lambda: self.cpu)
        self.cores = cores
        self.governor.start()

    def run(self, seconds: float, cost: float) -> float:
        """The share of the machine that frames of this cost took over these seconds."""
        begin, cpu = self.now, self.cpu
        while self.now < begin + seconds:
            self.cpu += cost
            self.now += max(self.governor.tick(), cost)
        return (self.cpu - cpu) / (self.now - begin) / self.cores


def test_cheap_frames_come_at_the_rate_asked_for():
    machine = Machine()
    machine.run(5, 0.001)
    assert machine.governor.interval == pytest.approx(0.1)


@pytest.mark.parametrize("cost", [0.005, 0.02, 0.05, 0.1])
@pytest.mark.parametrize("cores", [1, 2, 8])
def test_the_share_stays_below_five_percent(cost, cores):
    machine = Machine(cores)
    machine.run(10, cost)
    held = cost / (GOAL * cores) <= LONGEST
    share = machine.run(20, cost)
    assert not held or share < 0.05
    assert not held or machine.governor.share < 0.05


def test_it_slows_down_at_once_and_recovers():
    machine = Machine()
    machine.run(5, 0.001)
    machine.run(1.5, 0.06)
    assert machine.governor.interval > 0.5
    machine.run(10, 0.001)
    assert machine.governor.interval == pytest.approx(0.1)


def test_the_interval_has_bounds():
    machine = Machine(fps=1000)
    machine.run(2, 0.0)
    assert machine.governor.interval == SHORTEST
    machine.run(20, 5.0)
    assert machine.governor.interval == LONGEST
    assert FrameGovernor(0).interval == LONGEST


def test_starting_up_is_no_frame():
    machine = Machine()
    machine.cpu += 3
    machine.governor.start()
    assert machine.governor.tick() == pytest.approx(0.1)
    assert machine.governor.share == 0


def test_by_default_it_measures_this_process():
    governor = FrameGovernor()
    governor.start()
    sum(range(200_000))
    assert governor.tick() >= 0.1
    assert governor.share > 0
