"""An answer's table as a list: columns that fit, one row picked; and the picked row in full."""

from __future__ import annotations

from functools import partial
from operator import attrgetter

from specscope.analyze.findings import Reference
from specscope.analyze.table import Examples, Table
from specscope.tui.look import Look
from specscope.tui.text import Ink, Line, clean, cut, fit, line_width, paragraph
from specscope.tui.widgets.lines import Panel, Sheet
from specscope.tui.widgets.listing import GAP, ListColumn, PickPanel


class GridPanel(PickPanel):
    """The rows of an answer."""

    OF = attrgetter("_version", "asking", "picked", "order")

    def __init__(self, id: str | None = None) -> None:
        super().__init__(id=id)
        self.grid: Table | None = None  # before the first answer
        self.asking = ""  # what is said while there is no answer
        self.over = ""  # what the answer is over
        self._version = 0

    def put_answers(self, grid: Table, over: str) -> None:
        self.grid, self.over = grid, over
        self._version += 1

    def draw(self, look: Look, width: int, height: int) -> Sheet:
        grid = self.grid
        if grid is None:
            return Sheet([[(self.asking, "faint")]], [("Analysis", "strong")])
        room, names = dict(grid.fitted(width, len(GAP))), grid.columns
        columns = [
            ListColumn(
                *(names[place], room.get(place, 0), partial(_cell, grid, place), partial(_value, grid, place)),
                number=not grid.is_words(place),
            )
            for place in range(len(names))
        ]
        rows, text = range(len(grid.rows)), lambda row: " ".join(grid.rows[row])
        sheet = self.table(grid.title, rows, columns, text, width, (4, [(self.over, "dim")]))
        if grid.rows:
            return sheet
        return Sheet(
            [line for note in grid.notes or ("nothing",) for line in paragraph(note, width, "dim")], sheet.title
        )

    @property
    def example(self) -> Examples | None:
        """Where to look at the picked row; None where there is none."""
        return None if self.grid is None or self.item is None else self.grid.examples[self.item]


def _cell(grid: Table, place: int, row: int) -> tuple[str, Ink]:
    text, rank = clean(grid.rows[row][place]), grid.ranks.get(grid.columns[place], 0)
    return text, "dim" if rank > 2 else "text"


def _value(grid: Table, place: int, row: int) -> float | str | None:
    return grid.values[row][place]


class RowPanel(Panel):
    """The picked row: every figure, its examples, and what the columns mean."""

    OF = attrgetter("_rows.grid", "_rows.asking", "_rows.picked", "_rows.order")

    def __init__(self, rows: GridPanel, id: str | None = None) -> None:
        super().__init__(id=id)
        self._rows = rows

    def draw(self, look: Look, width: int, height: int) -> Sheet:
        """The examples first, then the row, then the words."""
        grid, example = self._rows.grid, self._rows.example
        if grid is None:
            return Sheet([], [("Row", "strong")])
        lines: list[Line] = []
        if example is not None:
            examples = (0, _example("⏎", "clearest", example.clearest)), (1, _example("f", "first", example.first))
            lines.append(fit(examples, width, "   "))
            lines += _cells(grid, self._rows.item or 0, width)
            lines += paragraph(grid.summary, width, "text")
            lines += [line for note in grid.notes for line in paragraph(note, width, "warn")]
            lines += paragraph(grid.note, width, "dim")
        return Sheet(lines, [("Row", "strong")])


def _example(key: str, name: str, reference: Reference) -> Line:
    return [(key, "key"), (f" {name} ", "dim"), (clean(str(reference)), "accent")]


def _cells(grid: Table, row: int, width: int) -> list[Line]:
    """`name value`, as many on a line as there is room for."""
    lines: list[list[tuple[str, Ink]]] = [[]]
    for name, cell in zip(grid.columns, grid.rows[row], strict=True):
        pair: Line = [(name + " ", "dim"), (cut(clean(cell), width - len(name) - 1), "text")]
        if lines[-1] and line_width(lines[-1]) + 3 + line_width(pair) > width:
            lines.append([])
        lines[-1] += [*([("   ", "dim")] if lines[-1] else ()), *pair]
    return [*lines]
