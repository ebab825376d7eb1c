"""Errors of operations as bars and grids, on a scale of powers of ten with what rounding explains marked."""

from __future__ import annotations

import math
from dataclasses import dataclass
from operator import attrgetter

from specscope.analyze.locate.located import Floats, Held, Walk
from specscope.analyze.locate.text import error_text
from specscope.tui.look import Look
from specscope.tui.text import LEVELS, Ink, Line, cut, left, show_token
from specscope.tui.widgets.lines import Sheet
from specscope.tui.widgets.listing import ListColumn, PickPanel

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

    OF = attrgetter("walk", "_chosen.place", "picked", "order")

    def __init__(self, chosen: PickedOperation, id: str | None = None) -> None:
        super().__init__(id=id)
        self._chosen = chosen
        self.first_wrong()

    @property
    def walk(self) -> int:
        """Which walk, for comparisons."""
        return id(self._chosen.walk)

    def put_chosen(self, chosen: PickedOperation) -> None:
        """Show this operation of this walk, at its first row that differs."""
        if chosen != self._chosen:
            self._chosen = chosen
            self.first_wrong()

    @property
    def wrong(self) -> list[int]:
        """The rows that are off by more than is allowed; what is no number is."""
        held = self._chosen.held
        return [] if held is None else [row for row, each in enumerate(held.errors) if not (each <= held.allowed).all()]

    def first_wrong(self) -> None:
        """Pick the first of them."""
        self.picked = next(iter(self.wrong), 0)

    def draw(self, look: Look, width: int, height: int) -> Sheet:
        """The rows; where an operation has no heads, a bar for each."""
        held, walk = self._chosen.held, self._chosen.walk
        if held is None or not len(held.errors):
            return Sheet([[("no errors of single rows were kept", "faint")]], [("Rows", "strong")])
        largest, wrong = held.errors.max(axis=1).tolist(), {*self.wrong}
        labels = [row_label(walk, held, row, look) for row in range(len(held.errors))]
        inks: list[Ink] = ["text" if row in wrong else "dim" for row in range(len(labels))]
        parts = held.errors.shape[1]
        room = max(width - POSITION - TOKEN - ERROR - 7, 1)
        merged = f"{parts} heads" + ("" if parts <= room else ", some merged")
        columns: list[ListColumn[int]] = [
            ListColumn("position", POSITION + 1, lambda row: (labels[row][0], inks[row]), lambda row: row, True, "row"),
            ListColumn("token", TOKEN, lambda row: (labels[row][1], inks[row])),
            ListColumn(
                *("error", ERROR, lambda row: (error_text(largest[row]), ink_of(largest[row], held.allowed))),
                *(lambda row: largest[row], True),
            ),
            ListColumn(cut(_numbers(parts, room), room), -1, lambda row: _cells(held.errors[row], held.allowed, room)),
        ]
        differ: Line = [(f"{held.differing:,} of {len(labels):,} differ", "rejected" if held.differs else "dim")]
        about: Line = [("each row's error" if parts == 1 else merged, "dim")]
        rows, text = range(len(labels)), lambda row: " ".join(labels[row])
        return self.table("Rows", rows, columns, text, width, (1, differ), (2, about))


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
