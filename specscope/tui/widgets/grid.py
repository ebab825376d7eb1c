"""An answer's table as a list: columns that fit, one row picked; and the picked row in full."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from rich.cells import cell_len

from specscope.analyze.findings import Reference
from specscope.analyze.questions.groups import Examples
from specscope.analyze.table import Table
from specscope.tui.look import Look
from specscope.tui.text import Ink, Line, clean, cut, fit, left, paragraph, right
from specscope.tui.widgets.lines import Panel, Sheet
from specscope.tui.widgets.listing import Order, PickPanel

GAP = "  "
BARS = "█▏▎▍▌▋▊▉"


class GridPanel(PickPanel):
    """The rows of one question. Each question keeps its order and its picked row."""

    def __init__(self, id: str | None = None) -> None:
        super().__init__(id=id)
        self.grids: tuple[Table, ...] = ()
        self.chosen = 0
        self.asking = ""  # what is said while there is no answer
        self.over = ""  # what the answer is over
        self.in_full: RowPanel | None = None  # shows the picked row
        self._version = 0
        self._kept: dict[int, tuple[Order, int]] = {}

    @property
    def grid(self) -> Table | None:
        """The question that is shown; None before the first answer."""
        return self.grids[self.chosen] if self.grids else None

    def columns(self) -> tuple[str, ...]:
        """The columns of the question that is shown."""
        return () if self.grid is None else self.grid.columns

    def choose(self, question: int) -> None:
        """Show another question."""
        self._kept[self.chosen] = self.order, self.picked
        self.chosen = question
        self.order, self.picked = self._kept.get(question, (Order(), 0))

    def put_answers(self, grids: tuple[Table, ...], over: str) -> None:
        """New answers."""
        self.grids, self.over = grids, over
        self._version += 1

    def show(self, look: Look) -> None:
        """A new look, or another row."""
        super().show(look)
        if self.in_full is not None:
            self.in_full.show(look)

    def key(self, look: Look) -> Hashable:
        """The answers, which one is shown, and how."""
        return self._version, self.chosen, self.asking, self.picked, self.order

    def draw(self, look: Look, width: int, height: int) -> Sheet:
        """The table, or why there is none."""
        grid = self.grid
        if grid is None:
            return Sheet([[(self.asking, "faint")]], [("Analysis", "strong")])
        shown = self.shown = self.arranged(range(len(grid.rows)), self._value, lambda row: " ".join(grid.rows[row]))
        self.picked = max(min(self.picked, len(shown) - 1), 0)
        self.rows = list(range(len(shown)))
        count = f"{len(shown):,} of {len(grid.rows):,}" if self.order.words else f"{len(grid.rows):,}"
        title = fit(
            [(0, [(grid.title, "strong")]), (2, [(count, "dim")]), (1, self.said()), (3, [(self.over, "dim")])],
            width - 2,
        )
        if not grid.rows:
            return Sheet([line for note in grid.notes or ("nothing",) for line in paragraph(note, width, "dim")], title)
        columns = grid.fitted(width, len(GAP))
        cells = [(grid.columns[column], _place(grid, column, grid.columns[column], w)) for column, w in columns]
        lines: list[Line] = [self.head(cells, GAP), *(_line(grid, row, columns) for row in shown)]
        return Sheet(lines, title, cursor=1 + self.picked, keep=1 + self.picked, head=1)

    @property
    def example(self) -> Examples | None:
        """Where to look at the picked row; None where there is none."""
        return None if self.grid is None or self.item is None else self.grid.examples[self.item]

    def _value(self, row: int, column: str) -> float | str:
        """The sort value of a row; an unknown value sorts as the highest."""
        grid = self.grid
        assert grid is not None
        place = self.columns().index(column) if column in self.columns() else 0
        value = grid.values[row][place]
        words = any(isinstance(values[place], str) for values in grid.values)
        return value if value is not None else ("\uffff" if words else float("inf"))


def _place(grid: Table, column: int, text: str, width: int) -> str:
    return left(text, width) if grid.is_words(column) else right(text, width)


def _line(grid: Table, row: int, columns: Sequence[tuple[int, int]]) -> Line:
    line: list[tuple[str, Ink]] = []
    for column, wide in columns:
        text, rank = clean(grid.rows[row][column]), grid.ranks.get(grid.columns[column], 0)
        ink: Ink = "bar" if text and text[0] in BARS else "dim" if rank > 2 else "text"
        line += [(GAP, "dim")] if line else []
        line.append((_place(grid, column, text, wide), ink))
    return line


class RowPanel(Panel):
    """The picked row: every figure, its examples, and what the columns mean."""

    def __init__(self, rows: GridPanel, id: str | None = None) -> None:
        super().__init__(id=id)
        self._rows = rows
        rows.in_full = self

    def key(self, look: Look) -> Hashable:
        """The list's key."""
        return self._rows.key(look)

    def draw(self, look: Look, width: int, height: int) -> Sheet:
        """The examples first, then the row, then the words."""
        grid, example = self._rows.grid, self._rows.example
        if grid is None:
            return Sheet([], [("Row", "strong")])
        lines: list[Line] = []
        if example is not None:
            lines.append(
                fit(
                    [
                        (0, _example("⏎", "clearest", example.clearest)),
                        (1, _example("f", "first", example.first)),
                    ],
                    width,
                    "   ",
                )
            )
            lines += _cells(grid, self._rows.item or 0, width)
            lines += paragraph(grid.summary, width, "text")
            lines += [line for note in grid.notes for line in paragraph(note, width, "warn")]
            lines += paragraph(grid.note, width, "dim")
        return Sheet(lines, [("Row", "strong")])


def _example(key: str, name: str, reference: Reference) -> Line:
    return [(key, "key"), (f" {name} ", "dim"), (clean(str(reference)), "accent")]


def _cells(grid: Table, row: int, width: int) -> list[Line]:
    """`name value`, as many on a line as there is room for."""
    lines: list[Line] = []
    line: list[tuple[str, Ink]] = []
    used = 0
    for name, cell in zip(grid.columns, grid.rows[row], strict=True):
        text = cut(clean(cell), width - len(name) - 1)
        if cell and cell[0] in BARS:
            continue  # drawn already
        wide = len(name) + 1 + cell_len(text)
        if line and used + 3 + wide > width:
            lines.append(line)
            line, used = [], 0
        line += [("   ", "dim")] if line else []
        used += wide + (3 if used else 0)
        line += [(name + " ", "dim"), (text, "text")]
    return [*lines, line]
