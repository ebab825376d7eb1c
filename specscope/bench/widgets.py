"""`specscope bench widgets`: what a frame costs with Textual's own widgets, and with the lines that the screens draw.

Both sides show the same text in one terminal of 120x40 and change what a step changes: the figures of 64 requests, a
tree of 24 nodes, 100 columns of a curve, the row of keys. A frame is the processor time from the change to the drawn
screen. The sides take turns, round by round.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from statistics import median
from typing import Any

from rich.table import Table
from textual.app import App, ComposeResult
from textual.binding import Binding
from textual.widget import Widget
from textual.widgets import DataTable, Footer, Sparkline, Tree

from specscope.terminal import text_console
from specscope.tui.palette import DARK
from specscope.tui.text import LEVELS, Ink, Line, left, right
from specscope.tui.widgets.lines import Lines, Sheet

ROWS, NODES, COLUMNS, FRAMES = 64, 24, 100, 20
WORDS = ("play", "step", "rejection", "decisions", "request", "debug", "breakpoints", "engine", "help", "quit")
Draw = Callable[[int], None]


class _Stage(App[None]):
    """One widget on the whole screen."""

    BINDINGS = [Binding(f"f{at}", f"f({at})", word) for at, word in enumerate(WORDS, 1)]  # noqa: RUF012

    def __init__(self, widget: Widget) -> None:
        super().__init__()
        self.register_theme(DARK)
        self.theme = DARK.name
        self.animation_level = "none"
        self._widget = widget

    def compose(self) -> ComposeResult:
        """The widget."""
        yield self._widget


def _figures(at: int, row: int) -> tuple[str, str, str]:
    return str(at * 3 + row), str(at), f"{1 + (at * 7 + row) % 40 / 10:.2f}"


def _requests() -> dict[str, tuple[Widget, Draw]]:
    """The table of requests: three figures of each change."""
    table: DataTable[str] = DataTable(cursor_type="row")
    lines = Lines()
    columns = ("request", "state", "tokens", "steps", "τ", "kind", "prompt")

    def theirs(at: int) -> None:
        if not table.columns:
            for name in columns:
                table.add_column(name, key=name)
            for row in range(ROWS):
                table.add_row(f"r{row}", "running", "0", "0", "1.00", "chat", "Why is the sky blue?", key=str(row))
        for row in range(ROWS):
            for name, value in zip(("tokens", "steps", "τ"), _figures(at, row), strict=True):
                table.update_cell(str(row), name, value)

    def ours(at: int) -> None:
        sheet: list[Line] = []
        for row in range(ROWS):
            cells = "  ".join(right(value, 6) for value in _figures(at, row))
            sheet.append([(left(f"r{row}", 7), "text"), ("  running   ", "accepted"), (cells, "text")])
        lines.put(Sheet(sheet), dark=True)

    return {"DataTable": (table, theirs), "lines": (lines, ours)}


def _tree() -> dict[str, tuple[Widget, Draw]]:
    """The draft tree: another one with each step."""
    tree: Tree[int] = Tree("root")
    lines = Lines()

    def theirs(at: int) -> None:
        tree.clear()
        tree.root.expand()
        node = tree.root
        for number in range(NODES):
            node = (tree.root if number % 4 == 0 else node).add(f"✓ token{at + number}  0.123  0.456", expand=True)

    def ours(at: int) -> None:
        sheet: list[Line] = [
            [("   " * (number % 4) + "└─ ", "rail"), (f"✓ token{at + number}", "accepted"), ("  0.123  0.456", "text")]
            for number in range(NODES)
        ]
        lines.put(Sheet(sheet), dark=True)

    return {"Tree": (tree, theirs), "lines": (lines, ours)}


def _curve() -> dict[str, tuple[Widget, Draw]]:
    """A row of columns, as in the engine's screen."""
    spark, lines = Sparkline([0.0] * COLUMNS), Lines()

    def values(at: int) -> list[float]:
        return [float((at * 13 + column * 7) % 9) for column in range(COLUMNS)]

    def theirs(at: int) -> None:
        spark.data = values(at)

    def ours(at: int) -> None:
        lines.put(Sheet([[("".join(LEVELS[round(value)] for value in values(at)), "bar")]]), dark=True)

    return {"Sparkline": (spark, theirs), "lines": (lines, ours)}


def _keys() -> dict[str, tuple[Widget, Draw]]:
    """The row of keys: a word of it changes, as pause and resume do."""
    footer, lines = Footer(), Lines()

    def theirs(at: int) -> None:
        footer.refresh(recompose=True)

    def ours(at: int) -> None:
        line: list[tuple[str, Ink]] = []
        for key, word in enumerate((f"stop{at}", *WORDS[1:]), 1):
            line += [(f"f{key}", "key"), (f" {word}  ", "dim")]
        lines.put(Sheet([line]), dark=True)

    return {"Footer": (footer, theirs), "lines": (lines, ours)}


async def _measure(sides: dict[str, tuple[Widget, Draw]]) -> dict[str, tuple[float, float]]:
    """(milliseconds until the first frame, milliseconds of a later one) of each side."""
    found: dict[str, tuple[float, float]] = {}
    for name, (widget, draw) in sides.items():
        app = _Stage(widget)
        begin = time.process_time()
        async with app.run_test(size=(120, 40)) as pilot:
            draw(0)
            await pilot.pause()
            first = time.process_time() - begin
            begin = time.process_time()
            for at in range(1, FRAMES + 1):
                draw(at)
                await pilot.pause()
            found[name] = first * 1e3, (time.process_time() - begin) / FRAMES * 1e3
    return found


def run_widgets(rounds: int) -> list[dict[str, Any]]:
    """Measure, print, and return the medians."""
    cases = {
        f"{ROWS} requests": _requests,
        f"a tree of {NODES} nodes": _tree,
        f"{COLUMNS} columns": _curve,
        "the keys": _keys,
    }
    table = Table(title=f"a frame at 120x40, ms (median of {rounds} rounds)", title_justify="left", title_style="dim")
    for column in ("what", "widget", "first", "frame", "ours, first", "ours, frame", "ratio"):
        table.add_column(column, justify="left" if column in ("what", "widget") else "right")
    rows = []
    for what, make in cases.items():
        found = [asyncio.run(_measure(make())) for _ in range(rounds)]
        name = next(one for one in found[0] if one != "lines")
        theirs, ours = ([median(one[side][at] for one in found) for at in (0, 1)] for side in (name, "lines"))
        ratio = theirs[1] / ours[1]
        table.add_row(what, name, *(f"{value:.2f}" for value in (*theirs, *ours)), f"{ratio:.1f}")
        rows.append({"what": what, "widget": name, "theirs_ms": theirs, "ours_ms": ours, "ratio": ratio})
    text_console().print(table)
    return rows
