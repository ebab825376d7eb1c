"""Watching: sources on threads of their own, and a run with its outputs for each engine that they report on."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from specscope.debug.answers import Notice
from specscope.errors import UserError
from specscope.remote.engines import Engines
from specscope.trace.history.history import History
from specscope.trace.history.interval import counts_run, interval_record
from specscope.trace.history.wording import plural
from specscope.trace.record.records import RunInfo, StepRecord
from specscope.trace.wire.outputs import Bus, Outputs
from specscope.watch.counts import ENGINES, ToldInterval
from specscope.watch.source import Source

WAITING = 2000  # records that may wait to be shown

OpenOutputs = Callable[[RunInfo, Bus, str, int], Outputs]


@dataclass
class EngineRun:
    """One engine of one source: its records are a run."""

    name: str  # in words
    info: RunInfo
    bus: Bus
    outputs: Outputs
    steps: int = 0


News = tuple[EngineRun, StepRecord] | str  # a record of an engine, or a notice


class Watch:
    """Runs the sources until they end or `stop` is called. What they report is taken from `news`."""

    def __init__(self, sources: Sequence[Source], open_outputs: OpenOutputs) -> None:
        self.sources = sources
        self.runs: dict[tuple[str, str, str], EngineRun] = {}  # by source, engine and model
        self.news: deque[News] = deque()
        self.errors: list[UserError] = []
        self.code = 0  # at the end: 1 where a capture lacks something
        self._refused = 0  # intervals of engines beyond the limit
        self._open: list[Outputs] = []
        self._open_outputs = open_outputs
        self._stop = threading.Event()
        self._lock = threading.Lock()  # guards the runs
        # Files that end are read one after the other, so that the captures are in their order
        lanes = [[source for source in sources if not source.endless]]
        lanes += [[source] for source in sources if source.endless]
        self._threads = [
            threading.Thread(target=self._run, args=(lane,), name="specscope-watch", daemon=True) for lane in lanes
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    @property
    def done(self) -> bool:
        return all(thread.ident is not None and not thread.is_alive() for thread in self._threads)

    def _run(self, lane: Sequence[Source]) -> None:
        for source in lane:
            try:
                for item in source.run(self._stop):
                    self._take(source, item)
            except UserError as error:
                self.errors.append(error)
            except Exception as error:  # of a sink: a screen shows it, and the others go on
                self.errors.append(UserError(f"{source.name}: {type(error).__name__}: {error}"))

    def _take(self, source: Source, item: ToldInterval | str) -> None:
        if isinstance(item, str):
            self.news.append(item)
            return
        while len(self.news) >= WAITING and not self._stop.wait(0.02):
            pass  # a file is read faster than it is shown
        with self._lock:
            run = None if self._stop.is_set() else self._run_of(source, item)
            if run is not None:
                record = interval_record(run.steps, item.start_ns, item.end_ns, item.aggregate)
                run.steps += 1
                run.bus.publish(record)
                self.news.append((run, record))

    def _run_of(self, source: Source, interval: ToldInterval) -> EngineRun | None:
        """The run of an interval's engine; None where there are too many engines."""
        engine = interval.aggregate.engine
        key = (source.name, engine, interval.model)
        if key not in self.runs:
            if len(self.runs) >= ENGINES:
                if not self._refused:
                    self.news.append(f"more than {ENGINES} engines: further ones are left out")
                self._refused += 1
                return None
            name = f"{source.name} engine {engine}" if engine else source.name
            info, bus = counts_run(interval.aggregate.source, interval.model), Bus()
            self._open.append(self._open_outputs(info, bus, engine or "0", len(self.runs)))
            self.runs[key] = EngineRun(name, info, bus, self._open[-1])
        return self.runs[key]

    def end(self) -> None:
        self._stop.set()

    def stop(self) -> list[str]:
        """End the sources and close every output; a line for each loss. Raises the first error of a capture."""
        self._stop.set()
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(5)
        losses: list[str] = []
        with contextlib.ExitStack() as stack, self._lock:
            while self._open:
                stack.callback(self._close, self._open.pop(), losses)
        return losses

    def _close(self, outputs: Outputs, losses: list[str]) -> None:
        losses += outputs.close()
        self.code |= outputs.code

    def take(self) -> Iterator[News]:
        while self.news:
            yield self.news.popleft()

    def faults(self) -> list[str]:
        lines = [f"{source.name}: {line}" for source in self.sources for line in source.faults.lines()]
        refused = f"{plural(self._refused, 'interval')} of more than {ENGINES} engines left out"
        return [*lines, refused] if self._refused else lines


class Watched(Engines):
    """Each engine has a history; one of these is on the screen."""

    counts_only = True

    def __init__(self, watch: Watch, seconds: float | None = None) -> None:
        """`seconds`: how long it watches; None: until the screen is closed."""
        super().__init__()
        self._until = None if seconds is None else time.monotonic() + seconds
        self.watch = watch

    def poll(self, history: History) -> None:
        if self._until is not None and time.monotonic() > self._until:
            self.watch.end()
        changed, gone = bool(self.watch.news), history.gone
        for news in self.watch.take():
            if isinstance(news, str):
                self.news.append(Notice(news))
                continue
            engine, record = news
            run = self.history(engine.info.run_id, engine.name, history)
            run.run = engine.info
            run.append(record)
        if changed:
            self.trim(history, gone)
        if self.watch.errors and not self.error:
            self.error = "; ".join(map(str, self.watch.errors))

    @property
    def status(self) -> str:
        """As of every engine elsewhere; `ended` when no source has more."""
        return "ended" if self.watch.done and not self.watch.news else super().status

    @property
    def progress(self) -> str:
        return "watching " + ", ".join(source.name for source in self.watch.sources)
