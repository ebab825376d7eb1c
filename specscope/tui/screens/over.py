"""Over: a screen of panels over the main one, fed with the same looks, with its keys at the foot. Esc closes it."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.screen import ModalScreen

from specscope.tui.keys import KEYS
from specscope.tui.look import Look
from specscope.tui.text import fit
from specscope.tui.widgets.lines import Panel, Sheet

MOVING = (  # they show what they moved to
    *("pause", "forward", "back", "jump_forward", "jump_back", "first", "last", "go_to_step"),
    *("next_rejection", "previous_rejection", "next_request", "previous_request", "search", "copy", "debugger", "help"),
    *("filter", "sort", "sort_reverse"),
)


def keys_of(*names: str) -> list[BindingType]:
    """Keys of the main screen that work over it too."""
    keys = [key for key in KEYS if key.name in names]
    return [Binding(key.keys, f"app.{key.action}", key.command, show=False) for key in keys]


class Over(ModalScreen[None]):
    """Subclasses compose the panels; the app shows each look to all of them.

    Its own keys, as many as there is room for, stand at its foot.
    """

    HINTS: ClassVar[tuple[Hint, ...]] = ()
    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape,q", "dismiss", "Close", show=False), *keys_of(*MOVING)]

    def __init__(self, look: Look) -> None:
        super().__init__()
        self.last = look

    def compose(self) -> ComposeResult:
        """The subclass's panels, and the keys below them."""
        yield from self.parts()
        yield Hints(self.HINTS, "hints")

    def parts(self) -> ComposeResult:
        """The panels."""
        raise NotImplementedError

    def on_mount(self) -> None:
        """Show the current look once the panels have their sizes."""
        self.call_after_refresh(self.show, self.last)

    def show(self, look: Look) -> None:
        """A new look."""
        self.last = look
        for panel in self.query(Panel):
            panel.show(look)


@dataclass(frozen=True)
class Hint:
    """A key and a word for it."""

    rank: int  # how soon it goes where it is narrow: the highest first
    key: str  # as people know it
    word: str
    action: str
    # An engine takes commands; something was forked; requests with trees, or counts only; there may be several engines
    when: Literal["always", "asks", "forked", "trees", "counts", "several"] = "always"

    def shown(self, look: Look) -> bool:
        """Whether the key does anything here."""
        control = look.viewer.control
        if self.when == "forked":
            return control is not None and control.forked is not None
        if self.when == "trees":
            return not look.history.counts_only
        if self.when == "counts":
            return look.history.counts_only
        if self.when == "several":
            return look.history.counts_only and hasattr(control, "next_engine")
        return self.when == "always" or look.asks


class Hints(Panel, can_focus=False):
    """The keys; each can be clicked."""

    def __init__(self, hints: Sequence[Hint], id: str | None = None) -> None:
        super().__init__(id=id)
        self._hints = hints

    def key(self, look: Look) -> Hashable:
        """What space does, and whether there is an engine to give prompts to."""
        return look.viewer.live, look.viewer.paused, look.playing, [hint.shown(look) for hint in self._hints]

    def draw(self, look: Look, width: int, height: int) -> Sheet:
        """Keys and words, and where each begins and ends for the mouse."""
        space = (
            ("resume" if look.viewer.paused else "pause") if look.viewer.live else "stop" if look.playing else "play"
        )
        hints = [hint for hint in self._hints if hint.shown(look)]
        line = fit([(hint.rank, [(hint.key, "key"), (f" {hint.word or space}", "dim")]) for hint in hints], width - 2)
        spots, cell, by_key = [], 1, {hint.key: hint.action for hint in hints}
        for (text, ink), (word, _) in zip(line, [*line[1:], ("", "dim")], strict=True):
            if ink == "key":
                spots.append((cell, cell + len(text + word), by_key[text]))
            cell += len(text)
        return Sheet([[(" ", "text"), *line]], actions={0: spots})


MAIN: tuple[Hint, ...] = (
    Hint(0, "space", "", "app.pause"),
    Hint(1, ", .", "step", "app.forward"),
    Hint(4, "n", "rejection", "app.rejection(1)", "trees"),
    Hint(3, "d", "decisions", "app.step", "trees"),
    Hint(6, "r", "request", "app.request", "trees"),
    Hint(5, "a", "analysis", "app.analysis", "trees"),
    Hint(3, "s", "scope", "app.scope", "counts"),
    Hint(4, "e", "next engine", "app.next_engine", "several"),
    Hint(8, ":", "debug", "app.console"),
    Hint(8, "b", "breakpoints", "app.breakpoints", "trees"),
    Hint(10, "v", "engine", "app.engine"),
    Hint(8, "f", "fork", "app.fork", "forked"),
    Hint(10, "/", "filter", "app.filter", "trees"),
    Hint(11, "o", "sort", "app.sort(1)", "trees"),
    Hint(11, "i", "prompt", "app.ask_prompt", "asks"),
    Hint(12, "x", "cancel", "app.cancel", "asks"),
    Hint(13, "g", "go to", "app.ask_step"),
    Hint(14, "s", "scope", "app.scope", "trees"),
    Hint(16, "t", "theme", "app.next_theme"),
    Hint(2, "?", "help", "app.help"),
    Hint(9, "q", "quit", "app.quit"),
)
