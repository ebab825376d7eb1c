"""A report in the terminal."""

from __future__ import annotations

from rich import box
from rich.console import Console, Group, JustifyMethod, RenderableType
from rich.markup import escape
from rich.table import Table as RichTable
from rich.text import Text

from specscope.analyze import tables
from specscope.analyze.report import Report
from specscope.analyze.tables import Table
from specscope.trace.vocabulary import printable

REQUESTS_SHOWN = 20
TOP = 10  # rows of each question over many steps
WIDE = 132  # columns from which two tables fit side by side


def render_text(report: Report, console: Console, top: int = TOP) -> None:
    """Print the report. Text of models and users is never read as markup, and holds no control characters."""
    console.print(_header(report))
    for warning in report.warnings:
        console.print(Text(f"! {printable(warning)}", style="yellow"))
    blocks = [table_block(table) for table in tables.tables(report)]
    if console.width >= WIDE:
        console.print(_two_columns(blocks, console.width))
    else:
        for block in blocks:
            console.print(block)
    for table in tables.questions(report, top, console.width):
        console.print(table_block(table))
    if report.requests or not report.intervals:
        console.print(table_block(tables.requests(report, REQUESTS_SHOWN)))


def _header(report: Report) -> RichTable:
    grid = RichTable.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    for name, value in tables.header(report):
        grid.add_row(name, Text(value))
    return grid


def _two_columns(blocks: list[RenderableType], width: int) -> RichTable:
    grid = RichTable.grid(padding=(0, 4), expand=False)
    half = (width - 4) // 2
    grid.add_column(width=half)
    grid.add_column(width=half)
    middle = -(-len(blocks) // 2)
    grid.add_row(Group(*blocks[:middle]), Group(*blocks[middle:]))
    return grid


def table_block(table: Table) -> RenderableType:
    """A table under its title, its note below."""
    rich = RichTable(
        box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, header_style="bold", show_header=any(table.columns)
    )
    for at, name in enumerate(table.columns):
        justify: JustifyMethod = "left" if table.is_words(at) else "right"
        # Where room is short names and prompts give way, figures never: only columns that may wrap are made narrower.
        rich.add_column(escape(name), justify=justify, no_wrap=not table.gives_way(at))
    for row in table.rows:
        rich.add_row(*(Text(cell, no_wrap=True, overflow="ellipsis") for cell in row))
    parts: list[RenderableType] = [Text(""), Text(table.title, style="bold cyan")]
    if table.rows:
        parts.append(rich)
    if table.note:
        parts.append(Text(table.note, style="dim"))
    return Group(*parts)
