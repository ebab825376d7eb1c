"""A screen that is all that its process runs: whatever signal ends it, the terminal is restored."""

from __future__ import annotations

import asyncio
import signal
import sys

from specscope.interrupt import handled_by
from specscope.lifetime import Lifetime
from specscope.tui.shell import Shell


class SignalEnd:
    """Ends an app by a signal as the key for it does."""

    def __init__(self, app: Shell, lifetime: Lifetime) -> None:
        self._app, self._lifetime = app, lifetime
        self._loop: asyncio.AbstractEventLoop | None = None
        app.ready = self._ready

    def _ready(self) -> None:
        """From here on a signal can be told to the app's loop."""
        self._loop = asyncio.get_running_loop()

    def __call__(self, number: signal.Signals) -> None:
        """A signal's handler. After SIGHUP the terminal may take nothing any more."""
        if number is signal.SIGHUP:
            self._lifetime.hurry()
            if (reading := getattr(self._app._driver, "exit_event", None)) is not None:
                reading.set()  # else Textual's reader spins on a terminal that is gone
        if self._loop is None:
            raise SystemExit(128 + number)
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._app.exit, None, 128 + number)


def run_to_the_end(app: Shell, lifetime: Lifetime) -> None:
    """Show it until the user leaves, or a signal ends it: SystemExit then."""
    # Not asyncio's own handlers: when its loop ends it leaves the signals' defaults, and the next one kills.
    with handled_by(SignalEnd(app, lifetime)):
        app.run()
    if app.return_code:
        sys.exit(app.return_code)
