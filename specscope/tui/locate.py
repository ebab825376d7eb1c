"""LocateApp: the screens of `specscope locate --tui`, and their help page."""

from __future__ import annotations

from collections.abc import Iterable

from textual.app import SystemCommand
from textual.screen import Screen

from specscope.analyze.locate.located import Location
from specscope.debug.viewer import Viewer
from specscope.lifetime import Lifetime
from specscope.trace.history.history import History
from specscope.trace.record.vocabulary import Vocabulary
from specscope.tui.look import Look
from specscope.tui.screens.dialogs import Lists
from specscope.tui.screens.help import HelpScreen, Part, Row, two_columns
from specscope.tui.screens.locate import LocateScreen
from specscope.tui.screens.over import Over
from specscope.tui.settings import Settings, read_settings
from specscope.tui.shell import Shell, run_to_the_end
from specscope.tui.text import Line

OPERATIONS: tuple[Row, ...] = (
    ("↑ ↓", "key", "pick an operation"),
    ("Enter", "key", "open it: the error of every position and head"),
    ("n N", "key", "next, previous operation that differs"),
    ("→ ←", "key", "next, previous walk: target, drafter"),
)
ROWS: tuple[Row, ...] = (
    ("↑ ↓", "key", "pick a row: its heads are shown in figures"),
    ("n N", "key", "next, previous row that differs"),
    ("→ ←", "key", "next, previous operation"),
    ("Esc", "key", "back to the operations"),
)
ANYWHERE: tuple[Row, ...] = (
    ("/", "key", "filter the list"),
    ("o O", "key", "sort by the next column; reverse"),
    ("Tab", "key", "next panel; the arrow keys scroll it"),
    ("t", "key", "theme: light or dark"),
    ("?", "key", "this page"),
    ("q", "key", "quit"),
)
MEANS: tuple[Row, ...] = (
    ("error", "strong", "the largest of |ours - right| / |right| over rows and heads"),
    ("allowed", "strong", "the error that rounding explains"),
    ("rows off", "strong", "rows with a larger error, of those compared"),
    ("position", "strong", "of the row in the text; /3: of the tree's node 3"),
)
BARS: tuple[Row, ...] = (
    ("▂", "bar", "rounding explains it; bars are powers of ten, from 1e-8 to 1"),
    ("▄", "warn", "up to 100 times more than rounding explains"),
    ("█", "rejected", "more than that"),
    ("│", "dim", "what is allowed"),
    ("✗", "rejected", "differs; the first, in bold, is the place"),
)


class LocateApp(Shell):
    """Shows one location."""

    TITLE = "specscope locate"

    def __init__(self, location: Location, vocabulary: Vocabulary, settings: Settings | None = None) -> None:
        super().__init__(settings)
        self._location = location
        self.viewer = Viewer(History(vocabulary=vocabulary))
        self.take_actions(Lists(self, self.say))

    def own_commands(self, screen: Screen[object]) -> Iterable[SystemCommand]:
        """The keys of the screen on top."""
        yield from self.commands_of(screen)

    def _look(self) -> Look:
        return Look(self.viewer, dark=self.current_theme.dark)

    def on_mount(self) -> None:
        """The one screen."""
        self.ready()
        self.push_screen(LocateScreen(self._look(), self._location))
        self.theme_changed_signal.subscribe(self, lambda _: self.look())

    def look(self) -> None:
        """Draw everything anew."""
        for screen in self.screen_stack:
            if isinstance(screen, Over):
                screen.show(self._look())

    def action_help(self) -> None:
        """Keys and what the figures mean."""
        self.push_screen(HelpScreen(locate_help_lines))


def run_locate(location: Location, vocabulary: Vocabulary, lifetime: Lifetime) -> None:
    """Show the location until the user leaves, or a signal ends it with SystemExit. Raises UserError."""
    run_to_the_end(LocateApp(location, vocabulary, read_settings()), lifetime)


def locate_help_lines(width: int) -> list[Line]:
    """The help page for a width in cells."""
    keys: list[Part] = [("Keys: operations", OPERATIONS), ("Keys: one operation", ROWS), ("Keys: everywhere", ANYWHERE)]
    return two_columns(width, keys, [("Figures", MEANS), ("Colours", BARS)], labels=(7, 9))
