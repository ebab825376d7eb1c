"""CompareApp: the screens of `specscope compare --tui`, and their help page."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial

from textual.app import SystemCommand
from textual.screen import Screen

from specscope.debug.viewer import Viewer
from specscope.lifetime import Lifetime
from specscope.trace.history.history import History
from specscope.tui.compared import Compared, KnownCause
from specscope.tui.look import Look
from specscope.tui.screens.compare_view import CompareScreen
from specscope.tui.screens.dialogs import Lists
from specscope.tui.screens.help import COLOURS, MARKS, NODE, HelpScreen, Part, Row, two_columns
from specscope.tui.screens.over import Over
from specscope.tui.settings import Settings, read_settings
from specscope.tui.shell import Shell, run_to_the_end
from specscope.tui.text import Line

PAIRS: tuple[Row, ...] = (
    ("↑ ↓", "key", "pick a pair of requests"),
    ("Enter", "key", "open the pair where its outputs part"),
    ("n N", "key", "next, previous pair that parts"),
    ("c", "key", "what changed most: requests, labels, depths"),
    ("/", "key", "filter the pairs: request, cause or prompt"),
    ("o O", "key", "sort by the next column; reverse"),
)
PARTING: tuple[Row, ...] = (
    ("↑ ↓", "key", "pick a place in the output; the trees follow"),
    ("PgUp", "key", "ten places up"),
    ("PgDn", "key", "ten places down"),
    ("p", "key", "go to where the outputs part"),
    ("d", "key", "go to the first decision that differs"),
    ("n N", "key", "next, previous pair that parts"),
    ("Esc", "key", "back to the pairs"),
)
ANYWHERE: tuple[Row, ...] = (
    ("Tab", "key", "next panel; the arrow keys scroll it"),
    ("t", "key", "theme: light or dark"),
    ("?", "key", "this page"),
    ("q", "key", "quit"),
    ("q", "key", "close where a pair is open"),
)
COLUMNS: tuple[Row, ...] = (
    ("τ A, τ B", "strong", "mean acceptance length of the request in each capture"),
    ("change", "strong", "τ B less τ A"),
    ("parts at", "strong", "output tokens before the first that differs"),
)
MARKS_HERE: tuple[Row, ...] = (*MARKS[:-2], ("»", "warn", "the step in which the outputs part; a final token"))


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
        yield from self.commands_of(screen)

    def _look(self) -> Look:
        return Look(self.viewer, dark=self.current_theme.dark)

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
        self.push_screen(HelpScreen(partial(compare_help_lines, causes=self._compared.causes)))


def run_compare(compared: Compared, lifetime: Lifetime) -> None:
    """Show the comparison until the user leaves, or a signal ends it with SystemExit. Raises UserError."""
    run_to_the_end(CompareApp(compared, read_settings()), lifetime)


def compare_help_lines(width: int, causes: Sequence[KnownCause]) -> list[Line]:
    """The help page for a width in cells: what can make two outputs part, and the keys."""
    keys: list[Part] = [("Keys: pairs", PAIRS), ("Keys: one pair", PARTING), ("Keys: everywhere", ANYWHERE)]
    why: list[Row] = [(cause.name, "dim" if cause.harmless else "rejected", cause.about) for cause in causes]
    means: list[Part] = [("Columns", COLUMNS), ("Causes", why), ("Verdicts", MARKS_HERE), ("Tokens", COLOURS), NODE]
    return two_columns(width, keys, means, labels=(7, 12))
