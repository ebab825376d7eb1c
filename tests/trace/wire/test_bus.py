"""The bus: nothing lost where nothing may be, drops counted where they may."""

import threading
from types import SimpleNamespace

import pytest

from specscope.trace.wire.outputs import Bus
from tests.trace.samples import record, records
from tests.waiting import HANG_SECONDS, ends, until


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
        until(lambda: subscription._idle._waiters)
        gate.set()

    subscription = bus.subscribe(slow, lossless=True, limit=4)
    opener = threading.Thread(target=open_late)
    opener.start()
    for item in steps(50):
        bus.publish(item)
        assert len(subscription._queue) <= 4
    bus.close()
    opener.join()
    assert seen == list(range(50))
    assert subscription.lost == 0


@pytest.mark.parametrize("lossless", [True, False])
def test_a_subscription_that_was_closed_holds_nobody_up_and_keeps_nothing(lossless):
    bus, seen = Bus(), []
    subscription = bus.subscribe(seen.append, lossless=lossless, limit=4)
    first, *others = steps(9)
    bus.publish(first)
    subscription.close()
    for item in others:
        ends(bus.publish, item)
    assert (seen, len(subscription._queue), subscription.lost) == ([first], 0, 0)


def test_a_lossy_sink_drops_the_oldest_and_never_blocks():
    bus, seen, gate = Bus(), [], threading.Event()

    def stuck(item):
        gate.wait(HANG_SECONDS)
        seen.append(item.step)

    bus.subscribe(stuck, limit=4)
    for item in steps(50):
        bus.publish(item)
    lost = bus.lost
    gate.set()
    bus.close()
    assert lost > 0
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


def test_what_a_sink_gathers_goes_out_when_the_engine_rests_and_only_then(monkeypatch):
    """It rests where no record comes for a while."""
    now = SimpleNamespace(ns=1)
    monkeypatch.setattr("specscope.trace.wire.outputs.time", SimpleNamespace(monotonic_ns=lambda: now.ns))
    bus, sink = Bus(), Gathering()
    subscription = bus.subscribe(sink)
    for items in (steps(50)[:20], steps(50)[20:]):
        before, wanted = len(sink.out), len(sink.out) + len(items)
        for item in items:
            bus.publish(item)
        bus.flush()
        assert len(sink.out) == before  # while records come they are gathered
        now.ns += 10**9
        until(lambda wanted=wanted: len(sink.out) == wanted)
    for _ in range(2):
        now.ns += 10**9
        subscription._wake.set()
        until(lambda: not subscription._wake.is_set())
    assert sink.flushes == 2  # where there is nothing, nothing goes out
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
