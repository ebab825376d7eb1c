"""The intervals of an engine that tells counts only: a line each, with its rates by position."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import attrgetter

from textual import events

from specscope.trace.history.interval import COLUMNS, cells, counts, definitions, missing
from specscope.trace.record.aggregate import Aggregate
from specscope.tui.keys import hidden
from specscope.tui.look import Look
from specscope.tui.text import LEVELS, NOTHING, Ink, Line, bar, clean, cut, folded, left, right
from specscope.tui.widgets.lines import Goto, Panel, Sheet

# What gives way first where it is narrow stands last
BY_NEED = ("time", "length", "rate", "drafts", "accepted", "tokens", "running", "KV", "waiting", "drafted", "seconds")
NARROWEST, WIDEST = 7, 30  # cells of a position with its number
LEAST_BAR = 4  # cells of a bar that says anything
LEVEL = 2  # cells of one without
REQUEST = 16  # cells of a request's id


class IntervalsPanel(Panel):
    """As many intervals as there are rows, the current one among them; below, what the source does not report."""

    OF = attrgetter("look.position", "look.steps")

    BINDINGS = hidden(up="app.backward", down="app.forward")

    def __init__(self, id: str | None = None) -> None:
        super().__init__(id=id)
        self._first = 0  # the position of the first line
        self._count = 0

    def on_click(self, event: events.Click) -> None:
        row = event.get_content_offset_capture(self).y - 1
        if 0 <= row < self._count:
            self.post_message(Goto(self._first + row))

    def draw(self, look: Look, width: int, height: int) -> Sheet:
        current = look.aggregate
        title: Line = [("Intervals", "strong")]
        if current is None:
            control = look.viewer.control
            what = "no data" if control is None else f"{control.progress}: no data yet"
            return Sheet([[(clean(what), "faint")]], title)
        about_figures = [f"{line}." for line in definitions(current)]
        about_figures.append(f"{current.source} does not report {', '.join(missing(current))}.")
        note = folded(" ".join(about_figures), max(width, 8))[: max(height // 5, 1)]
        rows = max(height - 1 - len(note), 1)
        self._first = min(max(look.position - (rows if look.viewer.follow else rows // 2) + 1, 0), look.steps)
        self._first = max(min(self._first, look.steps - rows), 0)
        shown = look.history.steps[self._first : self._first + rows]
        self._count = len(shown)
        aggregates = [(cells(step, step.aggregate), step.aggregate) for step in shown if step.aggregate is not None]
        layout = _Layout(width, aggregates)
        lines: list[Line] = [layout.head()]
        lines += [layout.row(row, aggregate) for row, aggregate in aggregates]
        lines += [[]] * (rows - len(shown))
        lines += [[(line, "faint")] for line in note]
        names = (
            f"engine {current.engine}" if current.engine else "",
            look.history.run.target if look.history.run else "",
        )
        about = clean(" ".join(name for name in names if name))
        title = [("Intervals", "strong"), (f"  {cut(about, width - 14)}" if about else "", "dim")]
        return Sheet(lines, title, head=1, cursor=1 + look.position - self._first)


class _Layout:
    """Which columns there is room for."""

    def __init__(self, width: int, rows: Sequence[tuple[Mapping[str, str], Aggregate]]) -> None:
        self._depth = depth = max((len(aggregate.accepted_at) for _, aggregate in rows), default=0)
        self._requests = any(aggregate.request for _, aggregate in rows)
        known = {name for row, _ in rows for name, cell in row.items() if cell != NOTHING}
        numbers = depth * (NARROWEST if depth * NARROWEST <= width // 2 else LEVEL)
        room = width - numbers - (REQUEST if self._requests else 0)
        shown: list[str] = []
        for name in BY_NEED:
            if COLUMNS[name] + 1 > room:
                break
            if name in known:
                shown.append(name)
                room -= COLUMNS[name] + 1
        self._columns = [name for name in COLUMNS if name in shown]
        self._cell = min((room + numbers - 1) // depth, WIDEST) if depth else 0

    def head(self) -> Line:
        names = "".join(right(name, COLUMNS[name]) + " " for name in self._columns)
        cells = (left(self._name(depth), self._cell) for depth in range(1, self._depth + 1))
        return [(names, "faint"), (" " + "".join(cells), "faint"), (" request" if self._requests else "", "faint")]

    def _name(self, depth: int) -> str:
        if self._cell < NARROWEST:
            return str(depth % 10)
        return f" depth {depth}" if self._cell > NARROWEST + 1 else f" {depth}"

    def row(self, by_column: Mapping[str, str], aggregate: Aggregate) -> Line:
        inks: dict[str, Ink] = {"length": "strong", "time": "dim"}
        line: list[tuple[str, Ink]] = [
            (right(by_column[name], COLUMNS[name]) + " ", inks.get(name, "text")) for name in self._columns
        ]
        rates = counts(aggregate).per_position
        line.append((" ", "text"))
        for rate in rates:
            line += self._rate(rate)
        line.append((" " * ((self._depth - len(rates)) * self._cell), "text"))
        line.append((f" {cut(clean(aggregate.request), REQUEST - 1)}" if aggregate.request else "", "dim"))
        line.append(("  restarted" if aggregate.reset else "", "warn"))
        return line

    def _rate(self, rate: float | None) -> Line:
        """A number with a bar where there is room, else a block; blank where nothing was drafted so deep."""
        if rate is None:
            return [(" " * self._cell, "text")]
        if self._cell < NARROWEST:
            return [(left(LEVELS[max(1, round(rate * 8))] if rate else "·", self._cell), "bar" if rate else "rail")]
        room = self._cell - NARROWEST - 1
        room = room if room >= LEAST_BAR else 0
        full = bar(rate, room)
        return [
            (f" {rate:.3f} ", "text"),
            (full, "bar"),
            (left("·" * (room - len(full)), self._cell - 7 - len(full)), "rail"),
        ]
