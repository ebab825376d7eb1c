"""CompareApp: the screens of `specscope compare --tui`."""

from __future__ import annotations

from functools import partial

from specscope.debug.viewer import Viewer
from specscope.lifetime import Lifetime
from specscope.trace.history import History
from specscope.tui.compared import Compared
from specscope.tui.keys import ACTIONS
from specscope.tui.look import Look
from specscope.tui.palette import DARK, LIGHT
from specscope.tui.screens.compare_help import compare_help_lines
from specscope.tui.screens.compare_view import CompareScreen
from specscope.tui.screens.dialogs import Questions
from specscope.tui.screens.help import HelpScreen
from specscope.tui.screens.over import Over
from specscope.tui.settings import Settings, read_settings
from specscope.tui.signals import EndsBySignal, run_to_the_end
from specscope.tui.widgets.ledger import Ledger


class CompareApp(Questions):
    """Shows one comparison."""

    TITLE = "specscope compare"
    CSS_PATH = "scope.tcss"
    HORIZONTAL_BREAKPOINTS = [(0, "-narrow"), (80, "-mid"), (110, "-wide"), (160, "-huge")]  # noqa: RUF012
    VERTICAL_BREAKPOINTS = [(0, "-short"), (32, "-tall")]  # noqa: RUF012

    def __init__(self, compared: Compared, settings: Settings | None = None) -> None:
        super().__init__()
        self._compared = compared
        self.settings = settings or Settings()
        self.viewer = Viewer(History(vocabulary=compared.vocabularies[0]))
        self.animation_level = "none"
        for theme in (DARK, LIGHT):
            self.register_theme(theme)
        self.theme = LIGHT.name if self.settings.theme == "light" else DARK.name

    def get_theme_variable_defaults(self) -> dict[str, str]:
        """Our own colours, for themes that are not ours."""
        return dict((DARK if self.current_theme.dark else LIGHT).variables)

    def _look(self) -> Look:
        return Look(self.viewer, Ledger(self.viewer.history), dark=self.current_theme.dark)

    def on_mount(self) -> None:
        """The one screen."""
        self.push_screen(CompareScreen(self._look(), self._compared))
        self.theme_changed_signal.subscribe(self, lambda _: self.look())

    def look(self) -> None:
        """Draw everything anew."""
        for screen in self.screen_stack:
            if isinstance(screen, Over):
                screen.show(self._look())

    def _say(self, text: str) -> None:
        self.notify(text, markup=False)

    def action_help(self) -> None:
        """Keys and what the columns mean."""
        self.push_screen(HelpScreen(partial(compare_help_lines, causes=self._compared.causes)))

    def action_next_theme(self) -> None:
        """Light or dark."""
        self.theme = LIGHT.name if self.current_theme.dark else DARK.name


class CompareProgram(EndsBySignal, CompareApp):
    """CompareApp, where it is all that the process runs."""

    def __init__(self, compared: Compared, settings: Settings, lifetime: Lifetime) -> None:
        super().__init__(compared, settings)
        self._lifetime = lifetime

    def on_mount(self) -> None:
        """Its loop runs."""
        self.hear_signals()


def run_compare(compared: Compared, lifetime: Lifetime) -> None:
    """Show it until the user leaves, or a signal ends it: SystemExit then. Raises UserError."""
    run_to_the_end(CompareProgram(compared, read_settings(ACTIONS), lifetime))
