"""A screen that is all that its process runs: whatever signal ends it, the terminal is restored."""

from __future__ import annotations

import asyncio
import signal
import sys

from textual.app import App

from specscope.interrupt import handled_by
from specscope.lifetime import Lifetime


class EndsBySignal(App[None]):
    """Put before an app's own class. It calls `hear_signals` once its loop runs."""

    _lifetime: Lifetime
    _own_loop: asyncio.AbstractEventLoop | None = None

    def hear_signals(self) -> None:
        """From here on a signal can be told to the loop."""
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


def run_to_the_end(app: EndsBySignal) -> None:
    """Show it until the user leaves, or a signal ends it: SystemExit then."""
    # Not asyncio's own handlers: when its loop ends it leaves the signals' defaults, and the next one kills.
    with handled_by(app.end_by):
        app.run()
    if app.return_code:
        sys.exit(app.return_code)
