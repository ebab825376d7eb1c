"""Where what was recorded inside another engine goes, what of it was lost, and the line that says so at its start."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from specscope.errors import UserError
from specscope.trace.inside.hooking import ErrorGuard, log
from specscope.trace.inside.recorder import vocabulary_of
from specscope.trace.inside.settings import PluginSettings
from specscope.trace.record.privacy import Privacy
from specscope.trace.record.records import RunInfo, StepRecord
from specscope.trace.record.vocabulary import Vocabulary
from specscope.trace.wire.outputs import Bus, OpenRequests, Subscription
from specscope.trace.wire.sampling import sampling_text

QUEUED = 4096  # records that may wait to be written; more are lost, and counted


class Outlet:
    """Takes records to the capture and the trace store that are asked for. It never waits for them.

    Losses are logged as they happen, the first, and whenever they have doubled: an engine may end a worker before it
    can say anything.
    """

    def __init__(
        self,
        settings: PluginSettings,
        run: RunInfo,
        tokenizer: Callable[[], Any],
        guard: ErrorGuard,
        ranks: tuple[int, ...],
    ) -> None:
        """`tokenizer` loads the target's. `ranks`: this worker's, in the name of a capture of any but the first."""
        self.places: list[str] = []  # in words
        self.lacking: list[str] = []  # what could not be opened, and why
        self.run, self.vocabulary = run, Vocabulary()  # what has no words can tell none
        if not run.privacy:
            self.vocabulary = vocabulary_of(tokenizer, lambda why: self.lacking.append(f"tokens' texts ({why})"))
        self._guard, self._bus, self._running = guard, Bus(), OpenRequests()
        self._closers: list[Callable[[], object]] = []
        self._told = 0
        self._broken: list[Subscription] = []
        self.also(self._running)
        for what, asked, open_sink in (
            ("the capture", settings.capture, self._open_capture),
            ("spans", settings.endpoint, self._open_spans),
        ):
            try:
                if asked is not None:
                    open_sink(settings, ranks)
            except UserError as error:
                self.lacking.append(f"{what} ({error})")
        if settings.ratio() is not None and settings.endpoint is None:
            log.warning("specscope: the capture holds every request: SPECSCOPE_SAMPLE applies to spans that are sent")

    def also(self, sink: Callable[[StepRecord], None], *, prompt: bool = False) -> None:
        """Take records there too."""
        self._bus.subscribe(sink, limit=QUEUED, prompt=prompt)

    def _open_capture(self, settings: PluginSettings, ranks: tuple[int, ...]) -> None:
        from specscope.trace.files import Existing
        from specscope.trace.wire.capture import CaptureWriter

        asked = of_ranks(str(settings.capture), ranks)
        writer = CaptureWriter(asked, self.run, self.vocabulary, existing=Existing.NEW_NAME, on_full=warn)
        self.places.append(f"writing to {writer.path}" + (f" ({asked} exists)" if writer.path != asked else ""))
        self.also(writer, prompt=True)  # an engine's server kills its workers as soon as it is told to end
        self._closers += [writer.close, lambda: warn(*writer.losses())]

    def _open_spans(self, settings: PluginSettings, ranks: tuple[int, ...]) -> None:
        from specscope.trace.wire.sending import Sender, SpanSink

        ratio, sender = settings.ratio(), Sender(settings.endpoint, settings.protocol)
        spans = SpanSink(sender, self.run, self.vocabulary, settings.level(), ratio=ratio)
        whose = "spans" if ratio is None else f"spans of some requests ({sampling_text(ratio)})"
        self.places.append(f"sending {whose} to {settings.endpoint}")
        self.also(spans)
        self._closers += [spans.close, lambda: warn(*filter(None, [spans.sampled]), *spans.losses())]

    @property
    def lost(self) -> int:
        """Steps that were lost, and spans that were refused."""
        return self._bus.lost + sum(getattr(subscription.sink, "failed", 0) for subscription in self._bus.subscriptions)

    def publish(self, record: StepRecord) -> None:
        """Never waits, and never raises for a sink."""
        self._bus.publish(record)
        lost = self.lost
        if lost and lost >= 2 * self._told:
            self._told = lost
            log.warning("specscope: %d steps or spans lost so far: the disk or network is too slow or gone", lost)
        for subscription in self._bus.subscriptions:
            if subscription.error is not None and subscription not in self._broken:
                self._broken.append(subscription)
                log.warning("specscope: recording ended there: %s", subscription.error)

    def announce(self, engine: str, part: str) -> None:
        """What is watched, where it goes, and what of it cannot be had: one line for the log.

        `engine`: with its version; `part`: of it.
        """
        run = self.run
        about = filter(
            None, [f"process {os.getpid()}", part, run.speculation.get("method"), f"evidence {run.evidence}"]
        )
        where = ", ".join(self.places) or "writing nowhere"
        lacks = {
            f"drafts ({engine.split()[0]} runs without a speculative config)": not run.speculation,
            "likeliest tokens, ranks and entropies (lean evidence)": run.evidence == "lean",
            f"texts ({run.privacy.remark})": run.privacy is Privacy.NO_TEXT,
            f"texts and token ids ({run.privacy.flag})": run.privacy is Privacy.NO_TOKENS,
        }
        lacking = [*(text for text, is_so in lacks.items() if is_so), *self.lacking]
        warn(f"watching {engine} ({', '.join(about)}); {where}; lacking {', '.join(lacking) or 'nothing'}")

    def flush(self) -> None:
        """Wait until everything published so far was handed over."""
        self._bus.flush()

    def close(self, *, copied: int = 0, steps: int = 0) -> None:
        """End what the engine has not ended, and close the sinks. `copied`: bytes from a device over all steps."""
        if copied:
            log.warning("specscope: %d bytes copied per step", copied // max(steps, 1))
        lost = self.lost
        self._guard.safely(self._bus.close, self._running.ends)
        for closer in self._closers:
            self._guard.safely(closer)
        if lost:
            log.warning("specscope: %d steps or spans were lost", lost)


def of_ranks(path: str, ranks: tuple[int, ...]) -> Path:
    """A file of any rank but the first has its numbers in its name."""
    return Path(path).with_stem("-".join([Path(path).stem, *(str(rank) for rank in ranks if rank)]))


def warn(*lines: str) -> None:
    """Each on a line of the engine's log."""
    for line in lines:
        log.warning("specscope: %s", line)
