"""Acceptance length over time, as columns."""

from __future__ import annotations

import math
from collections.abc import Sequence
from operator import attrgetter

from textual import events

from specscope.trace.history.wording import plural
from specscope.tui.look import Look
from specscope.tui.text import LEVELS, Line, clean, column_at, fit, right, spread
from specscope.tui.widgets.lines import Goto, Panel, Sheet

AXIS = 4
WIDEST = 4  # cells of a column


class LengthsPanel(Panel):
    """Mean acceptance length of each bucket of steps, from the start of the run to the position."""

    OF = attrgetter("look.position", "look.scope", "look.pooled")

    def __init__(self, id: str | None = None) -> None:
        super().__init__(id=id)
        self._per, self._count, self._span = 1, 1, 1  # steps in a column, how many columns, and their cells

    def on_click(self, event: events.Click) -> None:
        """Go to the last step of the column under the pointer."""
        x = event.get_content_offset_capture(self).x - AXIS
        look = self.look
        if look is None or not 0 <= x < self._span:
            return
        column = column_at(x, self._count, self._span)
        last = (column + 1) * self._per - 1
        if look.scope is None:
            self._to(last if column * self._per <= look.position else -1, look.position)
        elif look.request is not None:
            steps = look.request.engine_steps
            place = look.request.count_at(look.position) - 1
            self._to(steps[min(last, place)] if 0 <= column * self._per <= place else -1, look.position)

    def _to(self, position: int, newest: int) -> None:
        if position >= 0:
            self.post_message(Goto(min(position, newest)))

    def draw(self, look: Look, width: int, height: int) -> Sheet:
        """Columns over an axis that says what a column is."""
        title = fit([(0, [("Acceptance length", "strong")]), (1, [(clean(look.scope_name), "dim")])], width - 2)
        buckets, size = look.history.lengths_at(look.position, look.scope, width - AXIS)
        self._per, self._count = size, max(len(buckets), 1)
        self._span = min(width - AXIS, WIDEST * self._count)
        known = [value for value in buckets if value is not None]
        if not known:
            return Sheet([[("nothing drafted yet", "faint")]], title)
        rows = max(1, height - 1)
        top = max(2, math.ceil(max(known)))
        marks = scale(rows, top)
        lines: list[Line] = [
            [(right(marks.get(row, ""), AXIS - 1) + ("┤" if row in marks else "│"), "faint"), (text, "bar")]
            for row, text in enumerate(columns(buckets, rows, top, self._span))
        ]
        unit = "step" if look.aggregate is None else "interval"
        scope = "" if look.pooled or look.aggregate is not None else f" of {clean(look.scope_name)}"
        lines.append([(right("1", AXIS - 1) + "└", "faint"), (f" one column: {plural(size, unit)}{scope}", "faint")])
        return Sheet(lines, title)


def columns(buckets: Sequence[float | None], rows: int, top: float, span: int) -> list[str]:
    """Rows of `span` block characters, from the top; 1 is the ground and keeps a sliver, an empty bucket is blank."""
    eighths = [0 if v is None else max(1, round((v - 1) / (top - 1) * rows * 8)) for v in buckets]
    wide = list(zip(eighths, spread(len(buckets), span), strict=True))
    return ["".join(LEVELS[max(0, min(8, e - 8 * (rows - 1 - row)))] * w for e, w in wide) for row in range(rows)]


def scale(rows: int, top: int) -> dict[int, str]:
    """Which rows carry which whole number: the row just below the height that stands for it."""
    marks: dict[int, str] = {}
    for value in range(top, 1, -max(1, math.ceil((top - 1) * 1.5 / rows))):
        row = rows - math.floor((value - 1) / (top - 1) * rows + 0.5)
        if row < rows:
            marks[row] = str(value)
    return marks
