"""Over: a screen of panels laid over the main one, fed with the same looks. Esc closes it."""

from __future__ import annotations

from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.screen import ModalScreen

from specscope.tui.keys import KEYS
from specscope.tui.look import Look
from specscope.tui.widgets.hints import Hint, Hints
from specscope.tui.widgets.panel import Panel

MOVING = (  # they show what they moved to
    *("pause", "forward", "back", "jump_forward", "jump_back", "first", "last", "go_to_step"),
    *("next_rejection", "previous_rejection", "next_request", "previous_request", "search", "copy", "debugger", "help"),
    *("filter", "sort", "sort_reverse"),
)


def keys_of(*names: str) -> list[BindingType]:
    """Keys of the main screen that work over it too; where the settings bind them otherwise, so do they here."""
    keys = [key for key in KEYS if key.name in names]
    return [Binding(key.keys, f"app.{key.action}", key.command, show=False, id=key.name) for key in keys]


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
        """What is shown now, once the panels have their sizes."""
        self.call_after_refresh(self.show, self.last)

    def show(self, look: Look) -> None:
        """A new look."""
        self.last = look
        for panel in self.query(Panel):
            panel.show(look)
