"""CompareApp: the screens of `specscope compare --tui`."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

from textual.app import SystemCommand
from textual.binding import Binding
from textual.screen import Screen

from specscope.debug.viewer import Viewer
from specscope.lifetime import Lifetime
from specscope.trace.history.history import History
from specscope.tui.compared import Compared
from specscope.tui.keys import ACTIONS
from specscope.tui.look import Look
from specscope.tui.screens.compare_help import compare_help_lines
from specscope.tui.screens.compare_view import CompareScreen
from specscope.tui.screens.dialogs import Lists
from specscope.tui.screens.help import HelpScreen
from specscope.tui.screens.over import Over
from specscope.tui.settings import Settings, read_settings
from specscope.tui.shell import Shell
from specscope.tui.signals import run_to_the_end

KEY_NAMES = {"escape": "Esc", "enter": "Enter", "question_mark": "?", "slash": "/"}  # as people know them


class CompareApp(Shell):
    """Shows one comparison."""

    TITLE = "specscope compare"

    def __init__(self, compared: Compared, settings: Settings | None = None) -> None:
        super().__init__(settings)
        self._compared = compared
        self.viewer = Viewer(History(vocabulary=compared.vocabularies[0]))
        self.take_actions(Lists(self, self.say))

    def own_commands(self, screen: Screen[object]) -> Iterable[SystemCommand]:
        """The keys of the screen on top."""
        keys = [binding for binding in screen.BINDINGS if isinstance(binding, Binding)]
        for action, binding in {binding.action: binding for binding in keys}.items():  # of two keys the last
            if not action.startswith("app.focus"):
                key = self.settings.keys.get(binding.id or "", binding.key).split(",")[0]
                text = f"key {KEY_NAMES.get(key, key)}"
                yield SystemCommand(binding.description, text, self.runner(action, screen))

    def _look(self) -> Look:
        return Look(self.viewer, dark=self.current_theme.dark, keymap=self.settings.keys)

    def on_mount(self) -> None:
        """The one screen."""
        self.ready()
        self.push_screen(CompareScreen(self._look(), self._compared))
        self.theme_changed_signal.subscribe(self, lambda _: self.look())

    def look(self) -> None:
        """Draw everything anew."""
        for screen in self.screen_stack:
            if isinstance(screen, Over):
                screen.show(self._look())

    def action_help(self) -> None:
        """Keys and what the columns mean."""
        page = partial(compare_help_lines, causes=self._compared.causes, keymap=self.settings.keys)
        self.push_screen(HelpScreen(page))


def run_compare(compared: Compared, lifetime: Lifetime) -> None:
    """Show it until the user leaves, or a signal ends it: SystemExit then. Raises UserError."""
    run_to_the_end(CompareApp(compared, read_settings(ACTIONS)), lifetime)
