"""AnswerApp: the screens about one answer, a comparison or a location, and their help page."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from textual.app import SystemCommand
from textual.screen import Screen

from specscope.debug.viewer import Viewer
from specscope.lifetime import Lifetime
from specscope.trace.history.history import History
from specscope.trace.record.vocabulary import Vocabulary
from specscope.tui.look import Look
from specscope.tui.screens.dialogs import Lists
from specscope.tui.screens.help import HelpScreen
from specscope.tui.screens.over import Over
from specscope.tui.settings import Settings, read_settings
from specscope.tui.shell import Shell, run_to_the_end
from specscope.tui.text import Line


class AnswerApp(Shell):
    """Shows one answer. `first` makes its first screen; `help_lines` gives the help page for a width in cells."""

    def __init__(
        self,
        title: str,
        vocabulary: Vocabulary,
        first: Callable[[Look], Over],
        help_lines: Callable[[int], list[Line]],
        settings: Settings | None = None,
    ) -> None:
        super().__init__(settings)
        self.title = title
        self.viewer = Viewer(History(vocabulary=vocabulary))
        self._first, self._help_lines = first, help_lines
        self.take_actions(Lists(self, self.say))

    def own_commands(self, screen: Screen[object]) -> Iterable[SystemCommand]:
        """The keys of the screen on top."""
        yield from self.commands_of(screen)

    def _look(self) -> Look:
        return Look(self.viewer, dark=self.current_theme.dark)

    def on_mount(self) -> None:
        """The one screen."""
        self.ready()
        self.push_screen(self._first(self._look()))
        self.theme_changed_signal.subscribe(self, lambda _: self.look())

    def look(self) -> None:
        """Draw everything anew."""
        for screen in self.screen_stack:
            if isinstance(screen, Over):
                screen.show(self._look())

    def action_help(self) -> None:
        """Keys, and what the columns and figures mean."""
        self.push_screen(HelpScreen(self._help_lines))


def run_answer(app: Callable[[Settings], AnswerApp], lifetime: Lifetime) -> None:
    """Show it until the user leaves, or a signal ends it with SystemExit. Raises UserError."""
    run_to_the_end(app(read_settings()), lifetime)
