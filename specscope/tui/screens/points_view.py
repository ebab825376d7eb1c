"""The breakpoints: what a run stops at, how often it did, and keys to add and delete."""

from __future__ import annotations

from dataclasses import dataclass
from operator import attrgetter

from textual.app import ComposeResult
from textual.message import Message

from specscope.debug.breakpoints import BreakpointInfo, EventKind
from specscope.tui.keys import Key, foot
from specscope.tui.look import Look
from specscope.tui.screens.over import Over, close
from specscope.tui.text import Line, cut, folded, paragraph
from specscope.tui.widgets.lines import Sheet
from specscope.tui.widgets.listing import ListColumn, PickPanel

EXAMPLES = (
    ("reject if depth == 1 and p < 0.1 and q > 0.5", "the drafter was sure of its first token and wrong"),
    ("step if tau < 1.5", "a request's mean acceptance length is low"),
    ('emit if "def" in text', "a step's output contains a text"),
    ("preempt", "a request lost its KV blocks"),
)
NUMBER, HITS = 4, 8
LEFT = NUMBER + HITS + 2  # cells before the text


class PointsPanel(PickPanel):
    """One line per breakpoint; the picked one is highlighted."""

    OF = attrgetter("look.viewer.points", "picked", "order")

    def draw(self, look: Look, width: int, height: int) -> Sheet:
        """The table, or how to set the first one."""
        room = max(width - LEFT, 12)
        columns: list[ListColumn[BreakpointInfo]] = [
            ListColumn("n", NUMBER, lambda point: (str(point.number), "dim"), lambda point: point.number, True),
            ListColumn(
                *("hits", HITS - 2, lambda point: (f"{point.hits:,}", "strong" if point.hits else "faint")),
                *(lambda point: point.hits, True),
            ),
            ListColumn("stops at", -1, lambda point: (folded(point.text, room)[0], "text"), lambda point: point.text),
        ]

        def below(point: BreakpointInfo) -> list[Line]:
            return [[(" " * LEFT + row, "text")] for row in folded(point.text, room)[1:]]

        points = look.viewer.points
        text = lambda point: f"{point.number} {point.text}"  # noqa: E731
        sheet = self.table("Breakpoints", points, columns, text, width, below=below)
        return sheet if points else Sheet(_none(width), sheet.title)


def _none(width: int) -> list[Line]:
    """How to set the first breakpoint."""
    lines = [*paragraph("No breakpoints yet. Press a and type where to stop:", width, "text"), []]
    for example, what in EXAMPLES:
        lines += [[("  " + cut(example, width - 2), "accent")], [("      " + cut(what, width - 6), "dim")]]
    kinds = ", ".join(kind.value for kind in EventKind)
    lines += [[], *paragraph(f"Events: {kinds}", width, "dim")]
    return [*lines, [(cut("Fields for conditions: type :info names", width), "dim")]]


@dataclass
class Typed(Message):
    line: str


class PointsScreen(Over):
    FIRST = PointsPanel
    KEYS = (
        Key("a", "app.ask_breakpoint", "Add a breakpoint", "a", "add", 0),
        Key("x,delete", "screen.delete", "Delete it", "x", "delete", 2),
        Key("", "screen.go", "", "⏎", "continue", 4),
        *foot(filter=5, sort=6, debug=7, help=8),
        close(3, "escape,q,b"),
    )

    def parts(self) -> ComposeResult:
        yield PointsPanel("points")

    def action_delete(self) -> None:
        point = self.query_one(PointsPanel).item
        if point is not None:
            self.post_message(Typed(f"delete {point.number}"))

    def action_go(self) -> None:
        self.post_message(Typed("continue"))
        self.dismiss()
