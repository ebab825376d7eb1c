"""Losses: what does not reach its sinks is told as it happens; vLLM may end a worker before it can say anything."""

from __future__ import annotations

from specscope.trace.record.records import StepRecord
from specscope.trace.wire.bus import Bus, Subscription
from specscope.vllm.guard import log


class Losses:
    """Publishes records to a bus, and tells the log of losses: the first, and whenever they have doubled."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._told = 0
        self._told_undecided = 0
        self._broken: list[Subscription] = []

    @property
    def count(self) -> int:
        """Steps that were lost, and spans that were refused."""
        return self._bus.lost + sum(getattr(one.sink, "failed", 0) for one in self._bus.subscriptions)

    def publish(self, record: StepRecord) -> None:
        """Never waits, and never raises for a sink."""
        self._bus.publish(record)
        lost = self.count
        if lost and lost >= 2 * self._told:
            self._told = lost
            log.warning("specscope: %d steps or spans lost so far: the disk or the network is too slow, or gone", lost)
        undecided = sum(getattr(one.sink, "left_out_undecided", 0) for one in self._bus.subscriptions)
        if undecided and undecided >= 2 * self._told_undecided:
            self._told_undecided = undecided
            log.warning("specscope: %d requests left out before their end: raise SPECSCOPE_KEEP_BUFFER", undecided)
        for one in self._bus.subscriptions:
            if one.error is not None and one not in self._broken:
                self._broken.append(one)
                log.warning("specscope: nothing more is recorded there: %s", one.error)
