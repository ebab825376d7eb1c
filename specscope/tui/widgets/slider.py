"""The time slider: the screen's position in the run. Live, its right end follows the newest step."""

from __future__ import annotations

from operator import attrgetter
from typing import ClassVar

from textual import events
from textual.binding import Binding, BindingType

from specscope.tui.look import Look
from specscope.tui.text import Ink, Line, line_width
from specscope.tui.widgets.lines import Goto, Panel, Sheet


class Slider(Panel):
    """Click a place in the run; left and right step while it has the focus."""

    OF = attrgetter("look.position", "look.steps", "look.viewer.follow", "look.viewer.live", "has_focus")

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("left", "app.backward", "Step back", show=False),
        Binding("right", "app.forward", "Step forward", show=False),
    ]

    def __init__(self, id: str | None = None) -> None:
        super().__init__(id=id)
        self._track = (1, 1)  # first cell and cells of the track

    def draw(self, look: Look, width: int, height: int) -> Sheet:
        """Track, knob, and in words where it is."""
        words = _words(look)
        room = max(1, width - 4 - line_width(words))
        self._track = (1, room)
        cell = round(look.position / (look.steps - 1) * (room - 1)) if look.steps > 1 else room - 1
        cell = min(max(cell, 0), room - 1)
        knob: Ink = "accent" if self.has_focus or not look.viewer.follow else "text"
        if look.steps == 0:
            return Sheet([[(" ", "text"), ("─" * room, "rail"), ("  ", "text"), *words]])
        line: Line = [
            (" ", "text"),
            ("━" * cell, "bar"),
            ("●", knob),
            ("─" * (room - 1 - cell), "rail"),
            ("  ", "text"),
            *words,
        ]
        return Sheet([line])

    def on_focus(self) -> None:
        if self.look is not None:
            self.show(self.look)

    on_blur = on_focus

    def on_click(self, event: events.Click) -> None:
        begin, room = self._track
        if self.look is not None and self.look.steps:
            share = min(max((event.x - begin) / max(1, room - 1), 0), 1)
            self.post_message(Goto(round(share * (self.look.steps - 1)), follow=True))


def _words(look: Look) -> list[tuple[str, Ink]]:
    if not look.steps:
        return [("no steps", "faint")]
    last = f"{look.history.steps[-1].step:,}"
    record = look.record
    line: list[tuple[str, Ink]] = [
        (f"{record.step if record is not None else 0:,}".rjust(len(last)), "strong"),
        (f" / {last}", "dim"),
        (f"  {look.history.elapsed_at(look.position):.1f} s", "dim"),
    ]
    if look.viewer.live:
        line.append(("  following", "accepted") if look.viewer.follow else ("  looking back", "warn"))
    return line
