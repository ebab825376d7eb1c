"""The device's clock: read one step late. Without a GPU, moments are numbers."""

import pytest
import torch

from specscope.engine.phases import DeviceClock


class Moment:
    """A moment that has passed only when it is told so, as on a device."""

    def __init__(self, at):
        self.at, self.passed = at, False

    def synchronize(self):
        assert self.passed, "waited for"

    def elapsed_time(self, later):
        assert self.passed, "read too early"
        assert later.passed, "read too early"
        return (later.at - self.at) / 1e6


class Counting(DeviceClock):
    def __init__(self):
        super().__init__()
        self.moments = []

    def _make(self):
        self.moments.append(Moment(10 * len(self.moments) ** 2))
        return self.moments[-1]


def test_each_step_tells_what_the_one_before_took():
    clock, told = Counting(), []
    for _ in range(3):
        for _ in range(2):
            clock.mark()
        told.append(clock.turn())
        for moment in clock.moments:
            moment.passed = True
    assert told == [(), (10, 30), (70, 90)]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_it_measures():
    clock = DeviceClock()
    clock.mark()
    torch.ones(1 << 26, device="cuda").sum()
    clock.turn()
    (took,) = clock.turn() or (0,)
    assert took > 0
