"""A Watch as a screen's Control."""

from __future__ import annotations

import time

from specscope.debug.answers import Notice
from specscope.remote.engines import Engines
from specscope.trace.history.history import History
from specscope.watch.watching import Watch


class Watched(Engines):
    """Each engine has a history; one of these is on the screen."""

    counts_only = True  # how the screen is laid out before anything has been reported

    def __init__(self, watch: Watch, seconds: float | None = None) -> None:
        """`seconds`: how long it watches; None: until the screen is closed."""
        super().__init__()
        self._until = None if seconds is None else time.monotonic() + seconds
        self.watch = watch

    def poll(self, history: History) -> bool:
        """Take in what is new; True where there was anything."""
        if self._until is not None and time.monotonic() > self._until:
            self.watch.end()
        changed, gone = bool(self.watch.news), history.gone
        for news in self.watch.take():
            if news.run is None or news.record is None:
                self.news.append(Notice(news.text))
                continue
            run = self.history(news.run.info.run_id, news.run.name, history)
            run.run = news.run.info
            run.append(news.record)
        if changed:
            self.trim(history, gone)
        if self.watch.errors and not self.error:
            self.error, changed = "; ".join(map(str, self.watch.errors)), True
        return changed

    @property
    def status(self) -> str:
        """As of every engine elsewhere; `ended` when no source has more."""
        return "ended" if self.watch.done and not self.watch.news else super().status

    @property
    def progress(self) -> str:
        """What is waited for."""
        return "watching " + ", ".join(source.name for source in self.watch.sources)

    def close(self) -> None:
        """The outputs are the caller's."""
