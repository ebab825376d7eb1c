"""Errors of operations as bars and grids, on a scale of powers of ten with what rounding explains marked."""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from specscope.analyze.locate.located import Floats, Held, Walk
from specscope.analyze.locate.text import error_text
from specscope.tui.look import Look
from specscope.tui.text import LEVELS, Ink, Line, cut, fit, left, right, show_token
from specscope.tui.widgets.lines import Sheet
from specscope.tui.widgets.listing import PickPanel

SMALLEST = -8.0  # the power of ten at which bars begin; they end at 1
ERROR = 7  # cells of an error
FAR = 100.0  # times what is allowed: from here on the difference is no rounding of any dtype
RAIL, LIMIT, FULL = "·", "│", "█"
POSITION, TOKEN, LONGEST_BAR = 7, 12, 40


def share_of(error: float) -> float:
    """Where an error lies on the scale, 0 to 1; what is no number lies at its end."""
    if not math.isfinite(error):
        return 1.0
    return min(max(1 - math.log10(error) / SMALLEST, 0.0), 1.0) if error > 0 else 0.0


def ink_of(error: float, allowed: float) -> Ink:
    """Green where rounding explains it, yellow a little above that, red beyond."""
    if error <= allowed:
        return "bar"
    return "warn" if error <= FAR * allowed else "rejected"


def error_bar(error: float, allowed: float, width: int) -> list[tuple[str, Ink]]:
    """A bar to the error, with a mark at what is allowed; red behind the mark."""
    filled = max(round(share_of(error) * width), int(error > 0))
    mark = min(round(share_of(allowed) * width), width - 1)
    if error <= allowed:
        filled = min(filled, mark)
        return [(FULL * filled, "bar"), (RAIL * (mark - filled), "rail"), (LIMIT, "dim"), _rail(width - mark - 1)]
    beyond = max(filled - mark - 1, 1)
    past = min(beyond, width - mark - 1)
    over = ink_of(error, allowed)
    return [(FULL * mark, "bar"), (LIMIT, over), (FULL * past, over), _rail(width - mark - 1 - past)]


def _rail(cells: int) -> tuple[str, Ink]:
    return RAIL * cells, "rail"


@dataclass
class PickedOperation:
    """The walk that is looked at, and the place of the picked operation in it. Screens that lie over one another share
    it."""

    walk: Walk
    place: int

    @property
    def held(self) -> Held | None:
        """The operation; None in a walk of none."""
        return self.walk.operations[self.place] if self.walk.operations else None


class ErrorGrid(PickPanel):
    """The errors of an operation: a row of the grid for each row that was compared, a column for each head."""

    COLUMNS = ("row", "error")

    def __init__(self, chosen: PickedOperation, id: str | None = None) -> None:
        super().__init__(id=id)
        self._chosen = chosen
        self.first_wrong()

    def put_chosen(self, chosen: PickedOperation) -> None:
        """Show this operation of this walk, at its first row that differs."""
        if chosen != self._chosen:
            self._chosen = chosen
            self.first_wrong()

    def key(self, look: Look) -> Hashable:
        """The operation, the picked row, and the order."""
        return id(self._chosen.walk), self._chosen.place, self.picked, self.order

    def first_wrong(self) -> None:
        """Pick the first row that is off by more than is allowed."""
        held = self._chosen.held
        wrong = [] if held is None else np.flatnonzero(wrong_rows(held)).tolist()
        self.picked = wrong[0] if wrong else 0

    def draw(self, look: Look, width: int, height: int) -> Sheet:
        """The rows; where an operation has no heads, a bar for each."""
        held, walk = self._chosen.held, self._chosen.walk
        if held is None or not len(held.errors):
            return Sheet([[("no errors of single rows were kept", "faint")]], [("Rows", "strong")])
        largest = held.errors.max(axis=1)
        labels = [row_label(walk, held, row, look) for row in range(len(held.errors))]

        def value(row: int, column: str) -> float:
            return float(largest[row]) if column == "error" else row

        shown = self.shown = self.arranged(range(len(held.errors)), value, lambda row: " ".join(labels[row]))
        self.rows, self.picked = list(range(len(shown))), max(min(self.picked, len(shown) - 1), 0)
        parts = held.errors.shape[1]
        room = max(width - POSITION - TOKEN - ERROR - 7, 1)
        columns = "each row's error" if parts == 1 else f"{parts} heads" + ("" if parts <= room else ", some merged")
        title = fit(
            [
                (0, [("Rows", "strong")]),
                (1, [(f"{held.differing:,} of {len(held.errors):,} differ", "rejected" if held.differs else "dim")]),
                (2, [(columns, "dim")]),
                (3, self.said()),
            ],
            width - 2,
        )
        cells = [("row", right("position", POSITION + 1)), ("", left("token", TOKEN)), ("error", right("error", ERROR))]
        head = [*self.head(cells), ("  ", "faint"), (cut(_numbers(parts, room), room), "faint")]
        lines: list[Line] = [head]
        for row in shown:
            position, token = labels[row]
            wrong = largest[row] > held.allowed
            lines.append(
                [
                    (right(position, POSITION + 1), "text" if wrong else "dim"),
                    ("  ", "dim"),
                    (left(token, TOKEN), "text" if wrong else "dim"),
                    ("  ", "dim"),
                    (right(error_text(float(largest[row])), ERROR), ink_of(float(largest[row]), held.allowed)),
                    ("  ", "dim"),
                    *_cells(held.errors[row], held.allowed, room),
                ]
            )
        return Sheet(lines, title, cursor=1 + self.picked, keep=1 + self.picked, head=1)


def wrong_rows(held: Held) -> NDArray[np.bool_]:
    """Which rows are off by more than is allowed [rows]; what is no number is."""
    if not len(held.errors):
        return np.zeros(0, np.bool_)
    return np.array([not (row <= held.allowed).all() for row in held.errors], np.bool_)


def row_label(walk: Walk, held: Held, row: int, look: Look) -> tuple[str, str]:
    """Position and token of a row; of keys that are read, their place alone."""
    if len(held.errors) != len(walk.rows):
        return f"{row:,}", ""
    fed = walk.rows[row]
    node = "" if fed.node is None else f"/{fed.node}"
    return f"{fed.position:,}{node}", show_token(look.vocabulary, fed.token)


def _width_of_part(parts: int, room: int) -> tuple[int, int]:
    """How many cells a head takes, its gap with it, and how many heads share one."""
    if parts > room:
        return 1, -(-parts // max(room, 1))
    return min(room // parts, 4), 1


def _numbers(parts: int, room: int) -> str:
    """The numbers of the heads above their columns, where they fit."""
    if parts == 1:
        return "1e-8" + " " * (min(room, LONGEST_BAR) - 5) + "1"
    wide, merged = _width_of_part(parts, room)
    if merged > 1 or wide < 2:
        return f"heads 0 to {parts - 1}"
    return "".join(left(str(part), wide) if part % (1 if wide > 2 else 2) == 0 else " " * wide for part in range(parts))


def _cells(errors: Floats, allowed: float, room: int) -> list[tuple[str, Ink]]:
    """A row of the grid: blocks as high as the error, coloured by what is allowed."""
    if len(errors) == 1:
        return error_bar(float(errors[0]), allowed, max(min(room, LONGEST_BAR), 1))
    wide, merged = _width_of_part(len(errors), room)
    cells: list[tuple[str, Ink]] = []
    for part in range(0, len(errors), merged):
        error = float(errors[part : part + merged].max())
        level = max(round(share_of(error) * (len(LEVELS) - 1)), 1)
        block = LEVELS[level] * max(wide - 1, 1)
        cells.append((left(block, wide), ink_of(error, allowed)))
    return cells
