import logging

from specscope.trace.inside.sinks import Losses
from specscope.trace.wire.bus import Bus
from tests.vllm.stand import Engine, params


def record():
    engine = Engine()
    engine.step({"a": []}, new={"a": ([1, 1], params())})
    return engine.rest()[0]


def test_losses_are_told_when_they_begin_and_when_they_have_doubled(caplog):
    class Sink:
        failed = 0

        def __call__(self, step):
            Sink.failed += 1

    bus, one = Bus(), record()
    bus.subscribe(Sink())
    losses = Losses(bus)
    with caplog.at_level(logging.WARNING):
        for _ in range(10):
            losses.publish(one)
            bus.flush()
    assert losses.count == 10
    counts = [int(line.split()[1]) for line in (r.getMessage() for r in caplog.records)]
    assert counts == [1, 2, 4, 8]
    bus.close()


def test_a_sink_that_breaks_is_told_once_and_the_others_go_on(caplog):
    def broken(step):
        raise OSError("No space left on device")

    bus, one, heard = Bus(), record(), []
    bus.subscribe(broken)
    bus.subscribe(heard.append)
    losses = Losses(bus)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            losses.publish(one)
            bus.flush()
    assert len(heard) == 3
    assert [r.getMessage() for r in caplog.records] == [
        "specscope: nothing more is recorded there: No space left on device"
    ]
    bus.close()
