"""The bus: nothing lost where nothing may be, drops counted where they may."""

import threading
import time

import pytest

from specscope.trace.wire.outputs import Bus
from tests.trace.samples import record, records
from tests.waiting import HANG_SECONDS, until

QUIET_SECONDS = 1.5


def steps(count):
    return [record(i, ()) for i in range(count)]


class Gathering:
    """A sink that gathers what it is given until it is flushed."""

    def __init__(self):
        self.waiting, self.out, self.flushes = [], [], 0

    def __call__(self, item):
        self.waiting.append(item.step)

    def flush(self):
        self.flushes += 1
        self.out += self.waiting
        self.waiting = []


def test_a_lossless_sink_gets_everything_and_the_wait_is_counted():
    bus, seen, gate = Bus(), [], threading.Event()

    def slow(item):
        gate.wait(HANG_SECONDS)
        seen.append(item.step)

    def open_late():
        until(lambda: len(published) >= 3)  # the next one, or the one after it, waits for room
        time.sleep(0.2)
        gate.set()

    subscription, published = bus.subscribe(slow, lossless=True, limit=4), []
    opener = threading.Thread(target=open_late)
    opener.start()
    for item in steps(50):
        bus.publish(item)
        published.append(item)
    bus.close()
    opener.join()
    assert seen == list(range(50))
    assert subscription.lost == 0
    assert subscription.waited_ns > 0


def test_a_lossy_sink_drops_the_oldest_and_never_blocks():
    bus, seen, gate = Bus(), [], threading.Event()

    def stuck(item):
        gate.wait(HANG_SECONDS)
        seen.append(item.step)

    subscription = bus.subscribe(stuck, limit=4)
    for item in steps(50):
        bus.publish(item)
    lost = bus.lost
    gate.set()
    bus.close()
    assert lost > 0
    assert subscription.waited_ns == 0
    assert len(seen) + lost == 50
    assert seen[-1] == 49
    assert seen == sorted(seen)


def full(*_):
    raise OSError("disk full")


class FullLater(Gathering):
    flush = full


@pytest.mark.parametrize("sink", [full, FullLater()], ids=["a record", "a flush"])
def test_a_lossless_sink_that_fails_stops_the_publisher(sink):
    bus = Bus()
    subscription = bus.subscribe(sink, lossless=True)
    bus.publish(record(0, ()))
    until(lambda: subscription.error is not None)
    with pytest.raises(OSError, match="disk full"):
        bus.publish(record(1, ()))
    with pytest.raises(OSError, match="disk full"):
        bus.close()


def test_a_lossy_sink_that_fails_disturbs_nobody():
    bus, seen = Bus(), []

    def broken(item):
        raise ValueError

    bus.subscribe(broken)
    bus.subscribe(lambda item: seen.append(item.step))
    for item in steps(3):
        bus.publish(item)
    bus.close()
    assert seen == [0, 1, 2]


def test_what_a_sink_gathers_goes_out_when_the_engine_rests_and_only_then(monkeypatch):
    """It rests where no record comes for a while: for longer, here, than a busy machine holds one up."""
    monkeypatch.setattr("specscope.trace.wire.outputs.QUIET_SECONDS", QUIET_SECONDS)
    bus, sink = Bus(), Gathering()
    bus.subscribe(sink)
    for round_, items in enumerate([steps(50)[:20], steps(50)[20:]]):
        for item in items:
            bus.publish(item)
            time.sleep(0.01)
        assert len(sink.out) < 20 * (round_ + 1)  # while records come they are gathered
        until(lambda round_=round_: len(sink.out) == (20, 50)[round_])
    time.sleep(2 * QUIET_SECONDS)
    assert sink.flushes == 2  # where there is nothing, nothing goes out
    bus.close()


def test_a_prompt_sink_keeps_nothing_back(monkeypatch):
    """However long the others would gather."""
    monkeypatch.setattr("specscope.trace.wire.outputs.QUIET_SECONDS", 3 * HANG_SECONDS)
    bus, sink = Bus(), Gathering()
    bus.subscribe(sink, prompt=True)
    bus.publish(record(0, ()))
    until(lambda: sink.out == [0])
    bus.close()


def test_a_prompt_sink_is_woken_by_the_end_of_a_request(monkeypatch):
    """Its own pace is slower than any answer here; the end of a request waits for nothing."""
    monkeypatch.setattr("specscope.trace.wire.outputs.PROMPT_SECONDS", 3 * HANG_SECONDS)
    bus, sink = Bus(), Gathering()
    bus.subscribe(sink, prompt=True)
    *others, last = records()
    for item in others:
        bus.publish(item)
    assert sink.out == []
    bus.publish(last)
    until(lambda: sink.out == [item.step for item in (*others, last)])
    bus.close()
