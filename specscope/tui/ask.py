"""A one-line question over the main screen: a step to go to, a prompt to run."""

from __future__ import annotations

from typing import ClassVar

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.screen import ModalScreen
from textual.widgets import Input

from specscope.tui.text import clean


class Ask(ModalScreen[str | None]):
    """Returns what was typed, or None where it was called off."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape", "dismiss(None)", "Cancel", show=False)]

    def __init__(self, question: str, placeholder: str = "", value: str = "") -> None:
        super().__init__()
        self._question, self._placeholder, self._value = question, placeholder, value

    def compose(self) -> ComposeResult:
        """The question is the title of its input."""
        box = Input(self._value, placeholder=self._placeholder)
        box.cursor_blink = False
        box.border_title = Text(clean(self._question))
        box.border_subtitle = Text("Enter confirms, Esc cancels")
        yield box

    def on_input_submitted(self, event: Input.Submitted) -> None:
        """Done."""
        self.dismiss(event.value)
