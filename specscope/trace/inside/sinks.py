"""Where what was recorded inside another engine goes: a capture, an endpoint, or both; and what of it was lost."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from specscope.trace.inside.hooking import log
from specscope.trace.inside.settings import PluginSettings
from specscope.trace.record.records import RunInfo, StepRecord
from specscope.trace.record.trace_sampling import TraceSampling
from specscope.trace.record.vocabulary import Vocabulary
from specscope.trace.wire.bus import Bus, Subscription

if TYPE_CHECKING:
    from specscope.trace.wire.capture import CaptureWriter
    from specscope.trace.wire.sending.export import SpanSink

QUEUED = 4096  # records that may wait to be written; more are lost, and counted


class Losses:
    """Publishes records to a bus, and logs losses: the first, and whenever they have doubled.

    As they happen: an engine may end a worker before it can say anything.
    """

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._told = 0
        self._told_undecided = 0
        self._broken: list[Subscription] = []

    @property
    def count(self) -> int:
        """Steps that were lost, and spans that were refused."""
        return self._bus.lost + sum(getattr(subscription.sink, "failed", 0) for subscription in self._bus.subscriptions)

    def publish(self, record: StepRecord) -> None:
        """Never waits, and never raises for a sink."""
        self._bus.publish(record)
        lost = self.count
        if lost and lost >= 2 * self._told:
            self._told = lost
            log.warning("specscope: %d steps or spans lost so far: the disk or the network is too slow, or gone", lost)
        undecided = sum(getattr(subscription.sink, "left_out_undecided", 0) for subscription in self._bus.subscriptions)
        if undecided and undecided >= 2 * self._told_undecided:
            self._told_undecided = undecided
            log.warning("specscope: %d requests left out before their end: raise SPECSCOPE_KEEP_BUFFER", undecided)
        for subscription in self._bus.subscriptions:
            if subscription.error is not None and subscription not in self._broken:
                self._broken.append(subscription)
                log.warning("specscope: nothing more is recorded there: %s", subscription.error)


def sinks(
    settings: PluginSettings, bus: Bus, run: RunInfo, vocabulary: Vocabulary, ranks: tuple[int, ...]
) -> list[Callable[[], None]]:
    """What closes them. `ranks`: this worker's; a capture of any but the first has them in its name."""
    # Imported here: an engine's processes import this at their start, and most record nothing
    from specscope.trace.files import Existing
    from specscope.trace.wire.capture import CaptureWriter
    from specscope.trace.wire.sending.export import SpanSink, make_sender

    closers: list[Callable[[], None]] = []
    sampling = settings.sampling()
    sampled_run = dataclasses.replace(run, sampling=sampling.text)
    if sampling.is_on and settings.endpoint is None and not settings.sample_capture:
        log.warning("specscope: the capture is whole: SPECSCOPE_SAMPLE_CAPTURE=1 leaves requests out of it")
    if settings.capture is not None:
        capture_run, asked = (sampled_run, sampling) if settings.sample_capture else (run, TraceSampling())
        path = of_ranks(settings.capture, ranks)
        writer = CaptureWriter(path, capture_run, vocabulary, existing=Existing.NEW_NAME, on_full=_warn)
        if writer.renamed:
            _warn(writer.renamed)
        closers += [_subscribed(bus, writer, run, asked), lambda: _warn(*writer.losses())]
    if settings.endpoint is not None:
        sender = make_sender(settings.endpoint, settings.protocol)
        spans = SpanSink(sender, sampled_run, vocabulary, settings.level())
        closers += [_subscribed(bus, spans, run, sampling), lambda: _warn(*spans.losses())]
    return closers


def _warn(*lines: str) -> None:
    for line in lines:
        log.warning("specscope: %s", line)


def _subscribed(bus: Bus, sink: CaptureWriter | SpanSink, run: RunInfo, sampling: TraceSampling) -> Callable[[], None]:
    """Subscribe a sink, behind trace sampling where that is asked for; what closes it, and says what was kept."""
    from specscope.trace.wire.sampling_sink import SamplingSink

    stage = SamplingSink(sink, run, sampling) if sampling.is_on else sink
    bus.subscribe(stage, limit=QUEUED)

    def close() -> None:
        stage.close()
        if isinstance(stage, SamplingSink):
            log.warning("specscope: %s", stage.decisions.text())

    return close


def of_ranks(path: str, ranks: tuple[int, ...]) -> Path:
    """A file of any rank but the first has its numbers in its name."""
    return Path(path).with_stem("-".join([Path(path).stem, *(str(rank) for rank in ranks if rank)]))
