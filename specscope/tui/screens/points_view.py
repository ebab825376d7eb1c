"""The breakpoints: what a run stops at, how often it did, and keys to add and delete."""

from __future__ import annotations

from collections.abc import Hashable
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Container

from specscope.debug.breakpoints import BreakpointInfo
from specscope.debug.events import EventKind
from specscope.trace.words import NODE, STEP
from specscope.tui.look import Look
from specscope.tui.screens.over import Hint, Over
from specscope.tui.text import Ink, Line, clean, cut, fit, folded, labelled, left, paragraph, right
from specscope.tui.widgets.lines import Panel, Sheet
from specscope.tui.widgets.listing import PickPanel

EXAMPLES = (
    ("reject if depth == 1 and p < 0.1 and q > 0.5", "the drafter's first token was sure, and wrong"),
    ("step if tau < 1.5", "a request's mean acceptance length is low"),
    ('emit if "def" in text', "a step's output contains a text"),
    ("preempt", "a request lost its KV blocks"),
)
NUMBER, HITS = 4, 8
LEFT = NUMBER + HITS + 2  # cells before the text


class PointsPanel(PickPanel):
    """One line per breakpoint, its commands below it; the picked one is highlighted."""

    COLUMNS: ClassVar[tuple[str, ...]] = ("n", "hits", "stops at")

    def __init__(self, fields: FieldsPanel, id: str | None = None) -> None:
        super().__init__(id=id)
        self._fields = fields

    def key(self, look: Look) -> Hashable:
        """The breakpoints, and which is picked."""
        return look.viewer.points, self.picked, self.order, self._fields.display

    def draw(self, look: Look, width: int, height: int) -> Sheet:
        """The table, or how to set the first one."""
        points = self.shown = self.arranged(look.viewer.points, _value, lambda point: f"{point.number} {point.text}")
        every = len(look.viewer.points)
        count = f"{len(points)} of {every}" if self.order.words else str(every)
        title = fit([(0, [("Breakpoints", "strong")]), (1, [(count, "dim")]), (2, self.said())], width - 2)
        if not every:
            return Sheet(_none(width, alone=not self._fields.display), title)
        self.picked = max(min(self.picked, len(points) - 1), 0)
        heads = (("n", right("n", NUMBER)), ("hits", right("hits", HITS - 2)), ("stops at", left("stops at", 10)))
        lines: list[Line] = [self.head(heads)]
        self.rows, cursor = [], 0
        for index, point in enumerate(points):
            if index == self.picked:
                cursor = len(lines)
            room = max(width - LEFT, 12)
            first, *more = folded(point.text, room)
            line: list[tuple[str, Ink]] = [(right(str(point.number), NUMBER), "dim")]
            lines.append(
                [*line, (right(f"{point.hits:,}", HITS), "strong" if point.hits else "faint"), ("  " + first, "text")]
            )
            lines += [[(" " * LEFT + row, "text")] for row in more]
            self.rows += [index] * (len(lines) - 1 - len(self.rows))
            for command in point.commands:
                lines.append([(" " * (LEFT + 2), "text"), (cut(clean(command), width - LEFT - 2), "dim")])
                self.rows.append(index)
        return Sheet(lines, title, cursor=cursor, keep=cursor, head=1)


def _value(point: BreakpointInfo, column: str) -> float | str:
    """What a breakpoint is sorted by."""
    return {"n": point.number, "hits": point.hits}.get(column, point.text)


def _none(width: int, *, alone: bool) -> list[Line]:
    """How to set the first breakpoint. `alone`: whether the fields for conditions are shown nowhere else."""
    lines = [*paragraph("No breakpoints yet. Press a and type where to stop:", width, "text"), []]
    for example, what in EXAMPLES:
        lines += [[("  " + cut(example, width - 2), "accent")], [("      " + cut(what, width - 6), "dim")]]
    if not alone:
        return lines
    kinds = ", ".join(kind.value for kind in EventKind)
    lines += [[], *paragraph(f"Events: {kinds}", width, "dim")]
    return [*lines, [(cut("Fields for conditions: type :info names", width), "dim")]]


class FieldsPanel(Panel):
    """The fields that a condition can use, beside the list where there is room."""

    def key(self, look: Look) -> Hashable:
        """Always the same."""
        return None

    def draw(self, look: Look, width: int, height: int) -> Sheet:
        """Events, then the fields."""
        wide = max(map(len, NODE)) + 2
        lines: list[Line] = [[("Events", "accent")]]
        lines += paragraph(", ".join(kind.value for kind in EventKind), width, "text")
        at_nodes = {name: field for name, field in NODE.items() if name not in STEP}
        for head, fields in (("Fields", STEP), ("Fields at reject and accept", at_nodes)):
            lines += [[], [(head, "accent")]]
            for name, field in fields.items():
                lines += labelled(name, "strong", field.about, "dim", wide, width)
        return Sheet(lines, [("Conditions", "strong")])


class PointsScreen(Over):
    """The breakpoints of the debugger behind `:`."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("b", "dismiss", "Close", show=False),
        Binding("a", "app.ask_breakpoint", "Add a breakpoint", show=False),
        Binding("x,delete", "delete", "Delete it", show=False),
    ]

    HINTS = (
        Hint(0, "a", "add", "app.ask_breakpoint"),
        Hint(2, "x", "delete", "screen.delete"),
        Hint(4, "⏎", "continue", "screen.go"),
        Hint(5, "/", "filter", "app.filter"),
        Hint(6, "o", "sort", "app.sort(1)"),
        Hint(7, ":", "debug", "app.console"),
        Hint(8, "?", "help", "app.help"),
        Hint(3, "Esc", "close", "screen.dismiss"),
    )

    def parts(self) -> ComposeResult:
        """The list; beside it what conditions can use, where there is room."""
        fields = FieldsPanel("fields")
        with Container(id="of-points"):
            yield PointsPanel(fields, "points")
            yield fields

    def on_mount(self) -> None:
        """Arrows pick a breakpoint."""
        super().on_mount()
        self.query_one(PointsPanel).focus()

    def action_pick(self, way: int) -> None:
        """Pick another breakpoint."""
        self.query_one(PointsPanel).pick(way)

    def action_delete(self) -> None:
        """Delete it."""
        if point := self._point():
            self._tell(f"delete {point.number}")

    def action_go(self) -> None:
        """Close, and continue to the next stop."""
        self._tell("continue")
        self.dismiss()

    def _point(self) -> BreakpointInfo | None:
        """The picked breakpoint."""
        return self.query_one(PointsPanel).item

    def _tell(self, line: str) -> None:
        self.app.run_worker(self.app.run_action(f"debug_line({line!r})"))
