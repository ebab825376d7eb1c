"""The screens of `specscope diagnose --only locate --screen`, and their help page."""

from __future__ import annotations

from specscope.analyze.locate.located import Location
from specscope.trace.record.vocabulary import Vocabulary
from specscope.tui.answer import AnswerApp
from specscope.tui.screens.help import Part, Row, two_columns
from specscope.tui.screens.locate import LocateScreen
from specscope.tui.settings import Settings
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


def locate_app(location: Location, vocabulary: Vocabulary, settings: Settings | None = None) -> AnswerApp:
    """Shows one location."""
    return AnswerApp(
        "specscope diagnose", vocabulary, lambda look: LocateScreen(look, location), locate_help_lines, settings
    )


def locate_help_lines(width: int) -> list[Line]:
    """The help page for a width in cells."""
    keys: list[Part] = [("Keys: operations", OPERATIONS), ("Keys: one operation", ROWS), ("Keys: everywhere", ANYWHERE)]
    return two_columns(width, keys, [("Figures", MEANS), ("Colours", BARS)], labels=(7, 9))
