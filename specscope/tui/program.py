"""The screen as a program: whatever signal ends it, the terminal is restored."""

from __future__ import annotations

import asyncio
import signal
import sys

from specscope.debug.viewer import Viewer
from specscope.interrupt import handled_by
from specscope.lifetime import Lifetime
from specscope.tui.app import ScopeApp
from specscope.tui.keys import ACTIONS
from specscope.tui.settings import read_settings


class Program(ScopeApp):
    """ScopeApp, where it is all that the process runs."""

    def __init__(self, viewer: Viewer, lifetime: Lifetime, *, title: str, reference: str, start: str) -> None:
        super().__init__(viewer, title=title, settings=read_settings(ACTIONS), reference=reference, start=start)
        self._lifetime = lifetime
        self._own_loop: asyncio.AbstractEventLoop | None = None

    def _begin(self) -> None:
        super()._begin()
        self._own_loop = asyncio.get_running_loop()

    def end_by(self, number: signal.Signals) -> None:
        """A signal's handler: end as the key for it does. After SIGHUP the terminal may take nothing any more."""
        if number is signal.SIGHUP:
            self._lifetime.hurry()
            if (reading := getattr(self._driver, "exit_event", None)) is not None:
                reading.set()  # else Textual's reader spins on a terminal that is gone
        if self._own_loop is None:
            raise SystemExit(128 + number)
        if not self._own_loop.is_closed():
            self._own_loop.call_soon_threadsafe(self.exit, None, 128 + number)


def run_app(viewer: Viewer, lifetime: Lifetime, *, title: str = "", reference: str = "", start: str = "") -> None:
    """Show a viewer until the user leaves, or a signal ends it: SystemExit then.

    Ending its engine is left to the caller. Raises UserError.
    """
    app = Program(viewer, lifetime, title=title, reference=reference, start=start)
    # Not asyncio's own handlers: when its loop ends it leaves the signals' defaults, and the next one kills.
    with handled_by(app.end_by):
        app.run()
    if app.return_code:
        sys.exit(app.return_code)
