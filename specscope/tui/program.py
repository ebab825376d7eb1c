"""The screen as a program."""

from __future__ import annotations

from specscope.debug.viewer import Viewer
from specscope.lifetime import Lifetime
from specscope.tui.app import ScopeApp
from specscope.tui.keys import ACTIONS
from specscope.tui.settings import read_settings
from specscope.tui.signals import EndsBySignal, run_to_the_end


class Program(EndsBySignal, ScopeApp):
    """ScopeApp, where it is all that the process runs."""

    def __init__(self, viewer: Viewer, lifetime: Lifetime, *, title: str, reference: str, start: str) -> None:
        super().__init__(viewer, title=title, settings=read_settings(ACTIONS), reference=reference, start=start)
        self._lifetime = lifetime

    def _begin(self) -> None:
        super()._begin()
        self.hear_signals()


def run_app(viewer: Viewer, lifetime: Lifetime, *, title: str = "", reference: str = "", start: str = "") -> None:
    """Show a viewer until the user leaves, or a signal ends it: SystemExit then.

    Ending its engine is left to the caller. Raises UserError.
    """
    run_to_the_end(Program(viewer, lifetime, title=title, reference=reference, start=start))
