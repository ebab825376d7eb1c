"""The breakpoints: what a run stops at, how often it did, and keys to add, switch and take away."""

from __future__ import annotations

from collections.abc import Hashable
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType

from specscope.debug.breakpoints import BreakpointInfo
from specscope.debug.events import EventKind
from specscope.tui.look import Look
from specscope.tui.screens.over import Over
from specscope.tui.text import Ink, Line, clean, cut, fit, left, right
from specscope.tui.widgets.hints import Hint
from specscope.tui.widgets.lines import Sheet
from specscope.tui.widgets.listing import PickPanel

EXAMPLES = (
    ("reject if depth == 1 and p < 0.1 and q > 0.5", "the drafter's first token was sure, and wrong"),
    ("step if tau < 1.5", "a request's mean acceptance length is low"),
    ('emit if "def" in text', "a step's output contains a text"),
    ("preempt", "a request lost its KV blocks"),
)
NUMBER, HITS = 4, 8


class PointsPanel(PickPanel):
    """A line a breakpoint, its commands below it; the band is on the picked one."""

    COLUMNS: ClassVar[tuple[str, ...]] = ("n", "hits", "stops at")

    def key(self, look: Look) -> Hashable:
        """The breakpoints, and which is picked."""
        return look.viewer.points, self.picked, self.order

    def draw(self, look: Look, width: int, height: int) -> Sheet:
        """The table, or how to set the first one."""
        points = self.shown = self.arranged(look.viewer.points, _value, lambda point: f"{point.number} {point.text}")
        every = len(look.viewer.points)
        count = f"{len(points)} of {every}" if self.order.words else str(every)
        title = fit([(0, [("Breakpoints", "strong")]), (1, [(count, "dim")]), (2, self.said())], width - 2)
        if not every:
            return Sheet(_none(width), title)
        self.picked = max(min(self.picked, len(points) - 1), 0)
        heads = (("n", right("n", NUMBER)), ("hits", right("hits", HITS - 2)), ("stops at", left("stops at", 10)))
        lines: list[Line] = [self.head(heads)]
        self.rows, cursor = [], 0
        for at, point in enumerate(points):
            if at == self.picked:
                cursor = len(lines)
            ink: Ink = "text" if point.enabled else "faint"
            notes = [*([] if point.enabled else ["off"]), *([f"ignores {point.ignore}"] if point.ignore else [])]
            text = cut(clean(point.text), width - NUMBER - HITS - 2 - sum(len(note) + 3 for note in notes))
            line: list[tuple[str, Ink]] = [(right(str(point.number), NUMBER), "dim")]
            line += [(right(f"{point.hits:,}", HITS), "strong" if point.hits else "faint"), ("  " + text, ink)]
            lines.append([*line, *((f" · {note}", "warn") for note in notes)])
            self.rows.append(at)
            for command in point.commands:
                lines.append([(" " * (NUMBER + HITS + 4), "text"), (cut(clean(command), width - 16), "dim")])
                self.rows.append(at)
        return Sheet(lines, title, cursor=cursor, keep=cursor, head=1)


def _value(point: BreakpointInfo, column: str) -> float | str:
    """What a breakpoint is sorted by."""
    return {"n": point.number, "hits": point.hits}.get(column, point.text)


def _none(width: int) -> list[Line]:
    lines: list[Line] = [[("There are no breakpoints. Press a and type where to stop:", "text")], []]
    for example, what in EXAMPLES:
        lines += [[("  " + cut(example, width - 2), "accent")], [("      " + cut(what, width - 6), "dim")]]
    kinds = ", ".join(kind.value for kind in EventKind)
    lines += [[], [(cut(f"Events: {kinds}", width), "dim")]]
    return [*lines, [(cut("The names for conditions: type :info names", width), "dim")]]


class PointsScreen(Over):
    """The breakpoints of the debugger that `:` speaks to."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("b", "dismiss", "Close", show=False),
        Binding("a", "app.ask_breakpoint", "Add a breakpoint", show=False),
        Binding("space", "switch", "Switch it on or off", show=False),
        Binding("x,delete", "delete", "Delete it", show=False),
    ]

    HINTS = (
        Hint(0, "a", "add", "app.ask_breakpoint"),
        Hint(1, "space", "on, off", "screen.switch"),
        Hint(2, "x", "delete", "screen.delete"),
        Hint(4, "⏎", "continue", "screen.go"),
        Hint(5, "/", "filter", "app.filter"),
        Hint(6, "o", "sort", "app.sort(1)"),
        Hint(7, ":", "debug", "app.console"),
        Hint(8, "?", "help", "app.help"),
        Hint(3, "Esc", "close", "screen.dismiss"),
    )

    def parts(self) -> ComposeResult:
        """One panel."""
        yield PointsPanel("points")

    def action_pick(self, way: int) -> None:
        """Another breakpoint."""
        self.query_one(PointsPanel).pick(way)

    def action_switch(self) -> None:
        """On or off."""
        if point := self._point():
            self._tell(f"{'disable' if point.enabled else 'enable'} {point.number}")

    def action_delete(self) -> None:
        """Take it away."""
        if point := self._point():
            self._tell(f"delete {point.number}")

    def action_go(self) -> None:
        """Close, and go on to the next stop."""
        self._tell("continue")
        self.dismiss()

    def _point(self) -> BreakpointInfo | None:
        """The picked breakpoint."""
        return self.query_one(PointsPanel).item

    def _tell(self, line: str) -> None:
        self.app.run_worker(self.app.run_action(f"debug_line({line!r})"))
