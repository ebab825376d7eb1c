"""Lines: a scrolling widget that draws ready-made lines, and redraws only those that changed.

Textual's own DataTable, Tree, Sparkline and Footer cost 6, 3.5, 2 and 23 times as much a frame.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, ClassVar, Literal

from rich.segment import Segment
from rich.style import Style
from textual import events
from textual.geometry import Region, Size
from textual.message import Message
from textual.scroll_view import ScrollView
from textual.strip import Strip

from specscope.trace.history.history import History
from specscope.tui.keys import hidden
from specscope.tui.look import Look
from specscope.tui.palette import style, to_text
from specscope.tui.text import Ink, Line, clean


@dataclass
class Goto(Message):
    """A place in the run was asked for: a request, its step at a position, a node there."""

    position: int | None = None
    request: str | None = None
    node: int | None = None  # its decisions are opened; the count of the nodes for the final token
    follow: bool = False  # whether to follow the run where that is its end

    @staticmethod
    def found(history: History, text: str) -> Goto:
        """REQUEST[@STEP[/NODE]] of a history. Raises UserError."""
        request, place = history.find(text)
        return Goto(None if place.index is None else request.at(place.index), request.id, place.node)


@dataclass
class Sheet:
    """What a panel shows."""

    lines: list[Line] = field(default_factory=list)
    title: Line = ()
    cursor: int = -1  # a line drawn on a band of its own
    keep: int = -1  # a line to be kept in view
    head: int = 0  # lines at the top that do not scroll
    actions: dict[int, list[tuple[int, int, str]]] = field(default_factory=dict)  # line -> (from, to, action)


class Lines(ScrollView, can_focus=True, inherit_bindings=False):
    """A scroll view over a sheet. Its own line API: no layout, no markup, no children."""

    ALLOW_SELECT = False
    BINDINGS = hidden(up="scroll_up", down="scroll_down")

    def __init__(self, id: str | None = None) -> None:
        super().__init__(id=id)
        self.sheet = Sheet()
        self.dark = True
        self._height = 0  # of the area, when the sheet was put
        self._inks: dict[tuple[str, bool, bool, str], Style] = {}

    @property
    def area(self) -> Size:
        """The room for text: borders, padding and the scroll bar's place left out."""
        return self.scrollable_content_region.size

    def put(self, sheet: Sheet, dark: bool) -> None:
        old, self.sheet = self.sheet, sheet
        changed_colours = dark != self.dark
        self.dark = dark
        if changed_colours or sheet.title != old.title:
            self.border_title = to_text(sheet.title, dark) if sheet.title else None
        size = Size(self.area.width, max(len(sheet.lines), self.area.height))
        if size != self.virtual_size:
            self.virtual_size = size
        fits = size.height <= self.area.height
        if self.show_vertical_scrollbar and fits:  # Textual asks only when a size changes, and may ask too early
            self.show_vertical_scrollbar = False
        height, self._height = self._height, self.area.height
        if sheet.keep >= 0 and (sheet.keep != old.keep or len(sheet.lines) != len(old.lines) or height != self._height):
            self._keep(sheet.keep)
        if changed_colours or sheet.head != old.head or len(sheet.lines) != len(old.lines):
            self.refresh()
            return
        for y, line in enumerate(sheet.lines):
            if line != old.lines[y] or (y == sheet.cursor) != (y == old.cursor):
                row = y if y < sheet.head else y - self.scroll_offset.y
                self.refresh(Region(0, row, self.size.width, 1))

    def _keep(self, line: int) -> None:
        """Scroll as little as brings a line into view."""
        height, top, head = self.area.height, self.scroll_offset.y, self.sheet.head
        if line < top + head or head >= height:
            top = line - head
        elif line >= top + height:
            top = line - height + 1
        self.scroll_to(y=max(0, top), animate=False, immediate=True, force=True)

    def line_at(self, y: int) -> int:
        """The line of the sheet that is shown in row `y`."""
        return y if y < self.sheet.head else y + self.scroll_offset.y

    def notify_style_update(self) -> None:
        """The style sheet gave other colours: those that were worked out are of no use any more."""
        super().notify_style_update()
        self._inks.clear()

    def _style(self, ink: Ink | Literal[""], band: bool) -> Style:
        """An ink on the widget's background, "" for the background alone; on the band where `band` is.

        Worked out once: to ask Textual for the background of every row took a seventh of a frame.
        """
        key = (ink, band, self.dark, self.app.theme)
        if key not in self._inks:
            base = self.rich_style
            if band:
                base += Style(bgcolor=self.app.theme_variables.get("row"))
            self._inks[key] = base + style(ink, self.dark) if ink else base
        return self._inks[key]

    def render_line(self, y: int) -> Strip:
        """One row of the widget."""
        width, number = self.size.width, self.line_at(y)
        band = number == self.sheet.cursor
        base = self._style("", band)
        if number >= len(self.sheet.lines):
            return Strip.blank(width, base)
        segments = [Segment(text, self._style(ink, band)) for text, ink in self.sheet.lines[number]]
        strip = Strip(segments).adjust_cell_length(width, base)
        for begin, end, action in self.sheet.actions.get(number, ()):
            parts = [strip.crop(0, begin), strip.crop(begin, end), strip.crop(end, width)]
            parts[1] = parts[1].apply_style(Style.from_meta({"@click": action}))
            strip = Strip.join(parts)
        return strip


class Panel(Lines):
    """Subclasses say what their picture depends on and what it is (`draw`)."""

    # Of the panel: everything that the drawing depends on, besides size and colours. Cheap: asked at every look
    OF: ClassVar[attrgetter[Any]] = attrgetter("id")

    def __init__(self, id: str | None = None) -> None:
        super().__init__(id=id)
        self.look: Look | None = None
        self._shown: Hashable = None

    def draw(self, look: Look, width: int, height: int) -> Sheet:
        """The sheet for a content area of this size."""
        raise NotImplementedError

    def show(self, look: Look) -> None:
        """Take a new look, and redraw if the picture changed. Unreadable records give a line, never a crash."""
        self.look = look
        area = self.area
        if not area.width or not area.height:
            return
        try:
            # Another engine's history, or one of which steps were taken away, may stand at the same position.
            key = (self.OF(self), area, look.dark, id(look.history), look.history.rewinds)
            if key == self._shown:
                return
            sheet = self.draw(look, area.width, area.height)
            self._shown = key
        except Exception as error:  # the screen outlives any record
            self._shown = None
            sheet = Sheet([[(clean(f"cannot draw this: {type(error).__name__}: {error}"), "rejected")]])
        self.put(sheet, look.dark)

    def on_resize(self, event: events.Resize) -> None:
        if self.look is not None:
            self.show(self.look)


class FixedPanel(Panel):
    """Shows the same at every look: the sheet for a width in cells."""

    def __init__(self, sheet: Callable[[int], Sheet], id: str | None = None) -> None:
        super().__init__(id=id)
        self._sheet = sheet

    def draw(self, look: Look, width: int, height: int) -> Sheet:
        return self._sheet(width)
