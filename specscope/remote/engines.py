"""Runs of engines elsewhere, behind one screen: it shows one of them, and takes no commands."""

from __future__ import annotations

from collections import Counter

from specscope.debug.answers import Notice
from specscope.debug.viewer import Control, Viewer
from specscope.trace.history.history import KEPT, KEPT_BYTES, History
from specscope.trace.history.wording import plural

ENGINES = 64  # runs that are kept
MOST = KEPT  # steps of a run; a quarter of them goes when there are more
BYTES = KEPT_BYTES  # of all runs, roughly; the largest gives way


class Engines(Control):
    def __init__(self) -> None:
        super().__init__()
        self.viewer: Viewer | None = None
        self.runs: dict[str, History] = {}
        self.beside = Counter[str]()  # bytes of a run beside its steps, roughly
        self._shown = ""

    def on_screen(self) -> Viewer:
        self.viewer = Viewer(control=self)
        return self.viewer

    def history(self, name: str, words: str, shown: History) -> History:
        """A run's history; a new one is announced in these words. `shown`: the screen's, which the first run has."""
        if name not in self.runs:
            if self.runs:
                self.news.append(Notice(f"another engine: {words} (e shows the next)"))
            if len(self.runs) >= ENGINES:
                del self.runs[next(iter(self.runs))]
            self._shown = self._shown or name
            self.runs[name] = shown if self._shown == name else History()
            self.runs[name].limit, self.runs[name].limit_bytes = MOST, BYTES
        return self.runs[name]

    def trim(self, shown: History, gone: int) -> None:
        """Drop old steps where all runs together have no room. `gone`: how many `shown` had dropped before."""
        sizes = {name: history.nbytes + self.beside[name] for name, history in self.runs.items()}
        largest = max(sizes, key=sizes.__getitem__, default="")
        if sum(sizes.values()) > BYTES:
            steps = len(self.runs[largest].steps)
            if steps > 1:
                self.runs[largest].keep_last(steps * 3 // 4)
            elif largest != self._shown:
                del self.runs[largest]
        if shown.gone > gone:
            self.news.append(Notice(f"lost the oldest {plural(shown.gone - gone, 'step')}"))

    def next_engine(self) -> None:
        names = list(self.runs)
        if len(names) < 2 or self.viewer is None:
            self.news.append(Notice("there is only one engine" if names else "no engine has sent anything yet"))
            return
        self._shown = names[(names.index(self._shown) + 1) % len(names)] if self._shown in names else names[0]
        self.viewer.show(self.runs[self._shown])

    @property
    def status(self) -> str:
        """`loading` until something has come, then `attached`."""
        return "attached" if self.runs else "loading"
