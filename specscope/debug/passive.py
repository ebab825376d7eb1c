"""A Control over engines elsewhere: they can be watched, and take no commands."""

from __future__ import annotations

from collections import deque

from specscope.debug.answers import News, Notice
from specscope.debug.breakpoints import BreakpointInfo
from specscope.debug.forked import Forked
from specscope.debug.views import NodeView
from specscope.trace.record.params import SamplingParams

NOTICES = 100  # that wait to be shown


class Passive:
    """Refuses every command with a notice. What it shows, and when it ends, is left to subclasses."""

    obeys = False

    def __init__(self) -> None:
        self.news: deque[News] = deque(maxlen=NOTICES)  # notices alone: it is asked nothing
        self.points: tuple[BreakpointInfo, ...] = ()  # an engine elsewhere has no debugger here
        self.forked: Forked | None = None
        self.node_view: NodeView | None = None
        self.error = ""

    def _refuse(self) -> None:
        self.news.append(Notice("this engine runs elsewhere: it can be watched, but not controlled"))

    def pause(self) -> None:
        """Not possible from here."""
        self._refuse()

    def resume(self) -> None:
        """Not possible from here."""
        self._refuse()

    def step(self) -> None:
        """Not possible from here."""
        self._refuse()

    def debug(self, line: str) -> None:
        """Not possible from here; the viewer looks through the history instead."""
        self._refuse()

    def look(self, step: int, request: str, node: int | None) -> None:
        """Not possible from here."""
        self._refuse()

    def submit(self, prompt: str, params: SamplingParams | None = None) -> None:
        """Not possible from here."""
        self._refuse()

    def cancel(self, request: str) -> None:
        """Not possible from here."""
        self._refuse()
