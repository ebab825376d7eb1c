"""The help screen: keys, colours, and what the figures mean."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from textual import events
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.screen import ModalScreen

from specscope.tui.keys import KEYS, label
from specscope.tui.text import Ink, Line, left
from specscope.tui.widgets.lines import Lines, Sheet

MARKS: tuple[tuple[str, Ink, str], ...] = (
    ("✓", "accepted-strong", "accepted: its coin fell below a"),
    ("✗", "rejected", "rejected: its coin did not"),
    ("·", "faint", "untried: it was never asked about"),
    ("≈", "warn", "near tie: rounding could flip it"),
    ("»", "strong", "the final token; in a fork, where it parts"),
    ("▮▯", "accepted-strong", "how deep it was accepted, of the tree's depth"),
)
COLOURS: tuple[tuple[str, Ink, str], ...] = (
    ("accepted", "accepted", "drafted and accepted"),
    ("recovered", "recovered", "drawn from what a rejection left"),
    ("bonus", "bonus", "drawn after a path accepted to its end"),
    ("target", "target", "drawn where nothing was drafted"),
)
FIGURES: tuple[tuple[str, str], ...] = (
    ("p", "the target's probability of the token"),
    ("q", "the drafter's, as drawn; 1 if deterministic"),
    ("tried", "p and q at the trial, after elder siblings"),
    ("coin", "the number in (0, 1) that decided"),
    ("a", "chance to accept: min(1, p tried / q tried)"),
    ("residual", "mass left by a rejection, unnormalised"),
    ("τ", "mean acceptance length: 1 + accepted / drafts"),
    ("accepted", "accepted / drafted nodes"),
    ("rate", "accepted at depth d / drafts that reached d"),
    ("cond", "likewise, given that depth d was tried"),
)


def help_lines(width: int, keymap: Mapping[str, str]) -> list[Line]:
    """The page, in two columns where there is room."""
    keys: list[Line] = [[("Keys", "accent")]]
    keys += [[(left(label(key, keymap), 7), "key"), (key.help, "text")] for key in KEYS]
    keys += [[(left("Tab", 7), "key"), ("next panel; arrows scroll it", "text")]]
    keys += [[(left("Ctrl+P", 7), "key"), ("commands", "text")]]
    words: list[Line] = [[("Verdicts", "accent")]]
    words += [[(left(mark, 10), ink), (text, "text")] for mark, ink, text in MARKS]
    words += [[], [("Tokens", "accent")]]
    words += [[(left(name, 10), ink), (text, "text")] for name, ink, text in COLOURS]
    words += [[], [("Figures", "accent")]]
    words += [[(left(name, 10), "strong"), (text, "text")] for name, text in FIGURES]
    if width < 110:
        return [*keys, [], *words]
    rows = max(len(keys), len(words))
    keys += [[]] * (rows - len(keys))
    words += [[]] * (rows - len(words))
    return [[*_to(line, 57), *word] for line, word in zip(keys, words, strict=True)]


def _to(line: Line, width: int) -> list[tuple[str, Ink]]:
    used = sum(len(text) for text, _ in line)
    return [*line, (" " * (width - used), "text")]


class HelpLines(Lines):
    """The text of the help screen."""

    def __init__(self, name: str, keymap: Mapping[str, str]) -> None:
        super().__init__(name)
        self.keymap = keymap

    def on_resize(self, event: events.Resize) -> None:
        """Lay it out for the width."""
        title: Line = [("Help", "strong"), ("  ? or Esc closes", "dim")]
        self.put(Sheet(help_lines(self.area.width, self.keymap), title), self.app.current_theme.dark)


class HelpScreen(ModalScreen[None]):
    """Help over the main screen."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,question_mark,q", "dismiss", "Close", show=False),
    ]

    def __init__(self, keymap: Mapping[str, str]) -> None:
        super().__init__()
        self.keymap = keymap

    def compose(self) -> ComposeResult:
        """One scrolling panel."""
        yield HelpLines("help", self.keymap)
