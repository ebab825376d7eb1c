"""The help screen: keys, colours, and what the figures mean."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from textual import events
from textual.app import ComposeResult
from textual.screen import ModalScreen

from specscope.trace.words import NODE as NODE_FIELDS
from specscope.trace.words import label as field_label
from specscope.tui.keys import COLOURS, FIGURES, KEYS, MARKS, RATES, hidden
from specscope.tui.screens.over import Over
from specscope.tui.text import Ink, Line, labelled
from specscope.tui.widgets.decision import beside
from specscope.tui.widgets.lines import Lines, Sheet

Row = tuple[str, Ink, str]
SIDE_BY_SIDE = 100  # cells
LABELS, GAP = (7, 10), 3
Part = tuple[str, Sequence[Row]]  # its name, and its rows
Page = Callable[[int], list[Line]]  # laid out for a width in cells
NODE: Part = ("Figures of a node", [(field_label(name), "strong", NODE_FIELDS[name].about) for name in FIGURES])


def help_lines(width: int) -> list[Line]:
    """The main screen's page."""
    keys: list[Row] = [(key.label, "key", key.help) for key in KEYS]
    keys += [
        ("Tab", "key", "next panel; the arrow keys scroll it"),
        ("Enter", "key", "go deeper: request, step, distributions"),
        ("mouse", "key", "click a row, a node or the time line: go there"),
        ("Ctrl+P", "key", "command palette"),
    ]
    run: Part = ("Figures of a run", [(name, "strong", text) for name, text in RATES])
    return two_columns(width, [("Keys", keys)], [("Verdicts", MARKS), ("Tokens", COLOURS), NODE, run])


def keys_of(screen: type[Over]) -> list[Row]:
    """The keys that a screen declares, as rows of its page of help."""
    named = [(key.label, key.help or key.command or key.word) for key in screen.KEYS if key.label]
    return [(label, "key", text[:1].lower() + text[1:]) for label, text in named]


def two_columns(
    width: int, first: Sequence[Part], second: Sequence[Part], labels: tuple[int, int] = LABELS
) -> list[Line]:
    """Both columns, with labels of these widths, beside each other where there is room, else below each other."""
    both = width >= SIDE_BY_SIDE
    wide = (width - GAP) // 2 if both else width
    columns = [_column(parts, label_width, wide) for parts, label_width in zip((first, second), labels, strict=True)]
    return beside(columns, wide, GAP) if both else [*columns[0], [], *columns[1]]


def _column(parts: Sequence[Part], label_width: int, width: int) -> list[Line]:
    lines: list[Line] = []
    for name, rows in parts:
        lines += [[]] if lines else []
        lines.append([(name, "accent")])
        lines += [line for text, ink, what in rows for line in labelled(text, ink, what, "text", label_width, width)]
    return lines


class HelpLines(Lines):
    def __init__(self, name: str, page: Page) -> None:
        super().__init__(name)
        self._page = page

    def on_resize(self, event: events.Resize) -> None:
        title: Line = [("Help", "strong"), ("  ? or Esc closes", "dim")]
        self.put(Sheet(self._page(self.area.width), title), self.app.current_theme.dark)


class HelpScreen(ModalScreen[None]):
    BINDINGS = hidden(**{"escape,question_mark,q": "dismiss"})

    def __init__(self, page: Page) -> None:
        super().__init__()
        self._page = page

    def compose(self) -> ComposeResult:
        yield HelpLines("help", self._page)
