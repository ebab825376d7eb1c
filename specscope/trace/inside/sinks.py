"""Where what was recorded inside another engine goes, what of it was lost, and the line that says so at its start."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from specscope.errors import UserError
from specscope.trace.inside.hooking import log
from specscope.trace.inside.settings import PluginSettings
from specscope.trace.record.records import RunInfo, StepRecord
from specscope.trace.record.vocabulary import Vocabulary
from specscope.trace.wire.outputs import Bus, Subscription
from specscope.trace.wire.sampling import sampling_text

QUEUED = 4096  # records that may wait to be written; more are lost, and counted


@dataclass
class Sinks:
    """The sinks of a bus."""

    places: list[str] = field(default_factory=list)  # in words
    lacking: list[str] = field(default_factory=list)  # what could not be opened, and why
    closers: list[Callable[[], object]] = field(default_factory=list)  # to be called when the bus is closed


def sinks(settings: PluginSettings, bus: Bus, run: RunInfo, vocabulary: Vocabulary, ranks: tuple[int, ...]) -> Sinks:
    """Open what is asked for. `ranks`: this worker's; a capture of any but the first has them in its name."""
    opened = Sinks()
    for what, asked, open_sink in (
        ("the capture", settings.capture, _capture),
        ("spans", settings.endpoint, _spans),
    ):
        if asked is None:
            continue
        try:
            open_sink(opened, settings, bus, run, vocabulary, ranks)
        except UserError as error:
            opened.lacking.append(f"{what} ({error})")
    if settings.ratio() is not None and settings.endpoint is None:
        log.warning("specscope: the capture is whole: SPECSCOPE_SAMPLE is about spans that are sent")
    return opened


def _capture(
    opened: Sinks, settings: PluginSettings, bus: Bus, run: RunInfo, vocabulary: Vocabulary, ranks: tuple[int, ...]
) -> None:
    from specscope.trace.files import Existing
    from specscope.trace.wire.capture import CaptureWriter

    asked = of_ranks(str(settings.capture), ranks)
    writer = CaptureWriter(asked, run, vocabulary, existing=Existing.NEW_NAME, on_full=warn)
    opened.places.append(f"writing to {writer.path}" + (f" ({asked} exists)" if writer.path != asked else ""))
    # An engine's server kills its workers as soon as it is told to end
    bus.subscribe(writer, limit=QUEUED, prompt=True)
    opened.closers += [writer.close, lambda: warn(*writer.losses())]


def _spans(
    opened: Sinks, settings: PluginSettings, bus: Bus, run: RunInfo, vocabulary: Vocabulary, ranks: tuple[int, ...]
) -> None:
    from specscope.trace.wire.sending import Sender, SpanSink

    ratio, sender = settings.ratio(), Sender(settings.endpoint, settings.protocol)
    spans = SpanSink(sender, run, vocabulary, settings.level(), ratio=ratio)
    whose = "spans" if ratio is None else f"spans of some requests ({sampling_text(ratio)})"
    opened.places.append(f"sending {whose} to {settings.endpoint}")
    bus.subscribe(spans, limit=QUEUED)
    opened.closers += [spans.close, lambda: warn(*filter(None, [spans.sampled]), *spans.losses())]


def of_ranks(path: str, ranks: tuple[int, ...]) -> Path:
    """A file of any rank but the first has its numbers in its name."""
    return Path(path).with_stem("-".join([Path(path).stem, *(str(rank) for rank in ranks if rank)]))


def start_line(engine: str, run: RunInfo, part: str, opened: Sinks, lacking: Sequence[str]) -> str:
    """What is watched, where it goes, and what of it cannot be had: one line for the log.

    `engine`: with its version; `part`: of it.
    """
    about = filter(None, [f"process {os.getpid()}", part, run.speculation.get("method"), f"evidence {run.evidence}"])
    where = ", ".join(opened.places) or "writing nowhere"
    return f"watching {engine} ({', '.join(about)}); {where}; lacking {', '.join(lacking) or 'nothing'}"


def warn(*lines: str) -> None:
    """Each on a line of the engine's log."""
    for line in lines:
        log.warning("specscope: %s", line)


class Losses:
    """Publishes records to a bus, and logs losses: the first, and whenever they have doubled.

    As they happen: an engine may end a worker before it can say anything.
    """

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._told = 0
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
        for subscription in self._bus.subscriptions:
            if subscription.error is not None and subscription not in self._broken:
                self._broken.append(subscription)
                log.warning("specscope: nothing more is recorded there: %s", subscription.error)
