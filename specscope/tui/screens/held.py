"""One operation of a walk: the error of every row and head, and the picked row in figures."""

from __future__ import annotations

from collections.abc import Hashable
from typing import ClassVar

import numpy as np
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Container

from specscope.analyze.locate.text import error_text
from specscope.tui.look import Look
from specscope.tui.screens.over import Hint, Over, keys_of
from specscope.tui.text import Ink, Line, clean, fit, left, paragraph, right
from specscope.tui.widgets.errors import ErrorGrid, PickedOperation, ink_of, row_label, wrong_rows
from specscope.tui.widgets.lines import Panel, Sheet

FIGURE = 14  # cells of a head's figure


class OperationPanel(Panel):
    """What the operation is, and the errors of the picked row as figures."""

    def __init__(self, chosen: PickedOperation, grid: ErrorGrid, id: str | None = None) -> None:
        super().__init__(id=id)
        self._chosen, self._grid = chosen, grid

    def key(self, look: Look) -> Hashable:
        """The grid's key."""
        return self._grid.key(look)

    def draw(self, look: Look, width: int, height: int) -> Sheet:
        """Name, code and figures; then each head of the picked row."""
        held = self._chosen.held
        if held is None:
            return Sheet([], [("Operation", "strong")])
        operation = held.operation
        figures = f"error {error_text(held.error)}, {error_text(held.allowed)} allowed"
        lines: list[Line] = paragraph(f"{operation.name}: {figures}", width, "rejected" if held.differs else "text")
        lines += paragraph(operation.code, width, "dim") if operation.code else []
        row = self._grid.item
        if row is not None:
            position, token = row_label(self._chosen.walk, held, row, look)
            lines.append([("position ", "dim"), (position, "accent"), (f"  {token}", "text")])
            lines += _figures(held.errors[row].tolist(), held.allowed, width)
        return Sheet(lines, fit([(0, [(clean(operation.words), "strong")])], width - 2))


def _figures(errors: list[float], allowed: float, width: int) -> list[Line]:
    """`head 3 4.2e-01`, as many on a line as there is room for."""
    if len(errors) == 1:
        return [[("error ", "dim"), (error_text(errors[0]), ink_of(errors[0], allowed))]]
    across = max(width // FIGURE, 1)
    lines: list[Line] = []
    for first in range(0, len(errors), across):
        line: list[tuple[str, Ink]] = []
        for head, error in enumerate(errors[first : first + across], first):
            line += [(right(f"{head} ", 5), "faint"), (left(error_text(error), FIGURE - 5), ink_of(error, allowed))]
        lines.append(line)
    return lines


class HeldScreen(Over, inherit_bindings=False):
    """The grid, and the picked row below it."""

    SCOPED_CSS = False  # the classes of size are on the screen itself
    DEFAULT_CSS = """
    #of-held { height: 1fr; layout: grid; grid-size: 1; grid-rows: 1fr 7; }
    .-tall #of-held { grid-rows: 1fr 10; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,q", "dismiss", "Close", show=False),
        Binding("ctrl+c", "app.quit", "Quit", show=False),
        *keys_of("theme", "help", "filter", "sort", "sort_reverse"),
        Binding("n", "next(1)", "Next row that differs", show=False),
        Binding("N,upper_n", "next(-1)", "Previous row that differs", show=False),
        Binding("right", "turn(1)", "Next operation", show=False),
        Binding("left", "turn(-1)", "Previous operation", show=False),
        Binding("pageup", "pick(-10)", "Far above", show=False),
        Binding("pagedown", "pick(10)", "Far below", show=False),
        Binding("tab", "app.focus_next", "Next panel", show=False),
        Binding("shift+tab", "app.focus_previous", "Previous panel", show=False),
    ]
    HINTS = (
        Hint(0, "Esc", "back", "screen.dismiss"),
        Hint(1, "n", "next row that differs", "screen.next(1)"),
        Hint(4, "N", "previous", "screen.next(-1)"),
        Hint(2, "→", "next operation", "screen.turn(1)"),
        Hint(3, "←", "previous", "screen.turn(-1)"),
        Hint(6, "o", "sort", "app.sort(1)"),
        Hint(5, "?", "help", "app.help"),
    )

    def __init__(self, look: Look, chosen: PickedOperation) -> None:
        super().__init__(look)
        self._chosen = chosen

    def parts(self) -> ComposeResult:
        """Two panels."""
        grid = ErrorGrid(self._chosen, "rows")
        with Container(id="of-held"):
            yield grid
            yield OperationPanel(self._chosen, grid, "operation")

    def on_mount(self) -> None:
        """Arrows pick a row."""
        super().on_mount()
        self._grid.focus()

    @property
    def _grid(self) -> ErrorGrid:
        return self.query_one(ErrorGrid)

    def action_pick(self, way: int) -> None:
        """Pick another row."""
        self._grid.pick(way)
        self.show(self.last)

    def action_turn(self, way: int) -> None:
        """The next operation of the walk, at its first row that differs."""
        chosen = self._chosen
        chosen.place = min(max(chosen.place + way, 0), len(chosen.walk.operations) - 1)
        self._grid.first_wrong()
        self.show(self.last)

    def action_next(self, way: int) -> None:
        """The next row that differs, as they are listed, in a ring."""
        held, grid = self._chosen.held, self._grid
        wrong = np.zeros(0) if held is None else wrong_rows(held)
        count = len(grid.shown)
        ring = [(grid.picked + way * by) % count for by in range(1, count + 1)]
        row = next((row for row in ring if wrong[grid.shown[row]]), None)
        if row is None:
            self.notify("no row differs")
            return
        grid.pick(row - grid.picked)
        self.show(self.last)
