"""Panel: a part of the main screen. It draws itself from a Look, when what it shows has changed."""

from __future__ import annotations

from collections.abc import Hashable

from textual import events

from specscope.tui.look import Look
from specscope.tui.text import clean
from specscope.tui.widgets.lines import Lines, Sheet


class Panel(Lines):
    """Subclasses say what their picture depends on (`key`) and what it is (`draw`)."""

    def __init__(self, id: str | None = None) -> None:
        super().__init__(id=id)
        self.look: Look | None = None
        self._shown: Hashable = None

    def key(self, look: Look) -> Hashable:
        """Everything that the drawing depends on, besides size and colours. Cheap: asked at every look."""
        raise NotImplementedError

    def draw(self, look: Look, width: int, height: int) -> Sheet:
        """The sheet for a content area of this size."""
        raise NotImplementedError

    def show(self, look: Look) -> None:
        """Take a new look; draw where the picture changed. Unreadable records give a line, never a crash."""
        self.look = look
        area = self.area
        if not area.width or not area.height:
            return
        try:
            # Another engine's history, or one of which steps were taken away, may stand at the same position.
            key = (self.key(look), area, look.dark, id(look.history), look.history.rewinds)
            if key == self._shown:
                return
            sheet = self.draw(look, area.width, area.height)
            self._shown = key
        except Exception as error:  # the screen outlives any record
            self._shown = None
            sheet = Sheet([[(clean(f"cannot draw this: {type(error).__name__}: {error}"), "rejected")]])
        self.put(sheet, look.dark)

    def on_resize(self, event: events.Resize) -> None:
        """Draw for the new size."""
        if self.look is not None:
            self.show(self.look)
