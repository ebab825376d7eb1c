"""A Watch as a screen's Control: it takes no commands, and shows one of several engines."""

from __future__ import annotations

import time

from specscope.debug.answers import Notice
from specscope.debug.viewer import Passive, Viewer
from specscope.trace.history.history import KEPT, KEPT_BYTES, History
from specscope.watch.watching import EngineRun, Watch


class Watched(Passive):
    """Each engine has a history; one of these is on the screen."""

    counts_only = True  # how the screen is laid out before anything has been reported

    def __init__(self, watch: Watch, seconds: float | None = None) -> None:
        """`seconds`: how long it watches; None: until the screen is closed."""
        super().__init__()
        self._until = None if seconds is None else time.monotonic() + seconds
        self.viewer: Viewer | None = None
        self.watch = watch
        self.histories: dict[str, History] = {}  # by run
        self._shown = ""

    def poll(self, history: History) -> bool:
        """Take in what is new; True where there was anything."""
        if self._until is not None and time.monotonic() > self._until:
            self.watch.end()
        changed = bool(self.watch.news)
        for news in self.watch.take():
            if news.run is None or news.record is None:
                self.news.append(Notice(news.text))
            else:
                self._history(news.run, history).append(news.record)
        if self.watch.errors and not self.error:
            self.error = "; ".join(map(str, self.watch.errors))
            changed = True
        return changed

    def _history(self, run: EngineRun, history: History) -> History:
        name = run.info.run_id
        if name not in self.histories:
            first = not self.histories
            self.histories[name] = history if first else History()
            self.histories[name].run, self.histories[name].limit = run.info, KEPT
            for each in self.histories.values():
                each.limit_bytes = KEPT_BYTES // len(self.histories)
            self._shown = self._shown or name
            if not first:
                self.news.append(Notice(f"another engine: {run.name} (e shows the next)"))
        return self.histories[name]

    def next_engine(self) -> None:
        """Put the next engine on the screen."""
        names = list(self.histories)
        if len(names) < 2 or self.viewer is None:
            self.news.append(Notice("there is only one engine" if names else "no engine has told anything yet"))
            return
        self._shown = names[(names.index(self._shown) + 1) % len(names)]
        self.viewer.show(self.histories[self._shown])

    @property
    def status(self) -> str:
        """`loading` until something is reported, then `attached`, and `ended` when no source has more."""
        if self.watch.done and not self.watch.news:
            return "ended"
        return "attached" if self.histories else "loading"

    @property
    def progress(self) -> str:
        """What is waited for."""
        return "watching " + ", ".join(source.name for source in self.watch.sources)

    def close(self) -> None:
        """The outputs are the caller's."""
