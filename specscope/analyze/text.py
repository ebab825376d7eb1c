"""A report in the terminal."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from rich import box
from rich.console import Console, ConsoleOptions, JustifyMethod, RenderResult
from rich.table import Table as RichTable
from rich.text import Text

from specscope.analyze import tables
from specscope.analyze.findings import Exit
from specscope.analyze.report import Report, Several
from specscope.analyze.table import GAP, Table
from specscope.trace.record.vocabulary import printable

VERDICT = {Exit.CONSISTENT: "bold green", Exit.INCONSISTENT: "bold red", Exit.NOT_JUDGED: "bold yellow"}
REQUESTS_SHOWN = 20
TOP = 10  # rows of each question over many steps
LEAST_WORDS, LEAST_PROSE, LEAST_CUT = 16, 28, 6  # characters that columns of names keep, of sentences, of cut texts
PROSE = 48  # characters from which words are sentences


def render_text(report: Report, console: Console, top: int = TOP) -> None:
    """Print the report. Text of models and users is never read as markup, and holds no control characters."""
    shown = [*tables.tables(report), *tables.questions(report, top)]
    shown += [tables.requests(report, REQUESTS_SHOWN)] if report.requests or not report.intervals else []
    render_page(console, tables.header(report), report.warnings, shown)


def render_several(all_of_them: Several, console: Console, top: int = TOP) -> None:
    """Print the pooled figures, and then each report."""
    render_page(console, (), all_of_them.notes, tables.over_all(all_of_them))
    for number, report in enumerate(all_of_them.reports, 1):
        console.print(Text(f"\nCapture {number} of {len(all_of_them.reports)}", style="bold"))
        render_text(report, console, top)


def render_page(
    console: Console, header: Sequence[tuple[str, str]], warnings: Iterable[str], shown: Iterable[Table]
) -> None:
    """Print what a page is about, what is wrong with it, and its tables."""
    if header:
        console.print(header_block(header))
    for warning in warnings:
        console.print(Text(f"! {printable(warning)}", style="yellow"))
    for table in shown:
        console.print(TableBlock(table))


def header_block(lines: Iterable[tuple[str, str]]) -> RichTable:
    """What a page is about: (name, value) pairs, one below the other."""
    grid = RichTable.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    for name, value in lines:
        grid.add_row(name, Text(printable(value)))
    return grid


@dataclass(frozen=True)
class TableBlock:
    """A table under its title, its note below.

    Where room is short words fold and what may be cut is; figures are neither. Where there is still no room the table
    goes on below, with its first column again.
    """

    table: Table
    styles: Mapping[str, str] = field(default_factory=dict)  # of cells, by their text

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Text("")
        if self.table.title:
            yield Text(self.table.title, style="bold cyan")
        for number, widths in enumerate(_parts(self.table, options.max_width) if self.table.rows else ()):
            yield from ([Text("")] if number else [])
            yield self._part(widths)
        if self.table.note:
            yield Text(self.table.note, style="dim")

    def _part(self, widths: Mapping[int, int]) -> RichTable:
        """Some of the table's columns, with their widths."""
        table = self.table
        rich = RichTable(
            box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, header_style="bold", show_header=any(table.columns)
        )
        for column, width in widths.items():
            justify: JustifyMethod = "left" if table.is_words(column) else "right"
            rich.add_column(Text(table.columns[column]), justify=justify, width=width, overflow="fold")
        for row in table.rows:
            rich.add_row(*(self._cell(row[column], cut=table.columns[column] in table.cut) for column in widths))
        return rich

    def _cell(self, text: str, *, cut: bool) -> Text:
        return Text(text, self.styles.get(text, ""), no_wrap=cut, overflow="ellipsis" if cut else "fold")


def _parts(table: Table, width: int) -> Iterator[dict[int, int]]:
    """Columns with their widths, as many in a part as fit; every part begins with the first column."""
    need = table.widths
    least = [_least(table, column, n) for column, n in enumerate(need)]
    fewest = len(_split(least, width))
    narrow = next(room for room in range(min(width, least[0] + GAP), width + 1) if len(_split(least, room)) == fewest)
    for part in _split(least, narrow):  # none is much narrower than the others
        wide = {column: least[column] for column in part}
        spare = width - sum(wide.values()) - GAP * (len(part) - 1)
        while spare > 0 and (short := [column for column in part if wide[column] < need[column]]):
            wide[min(short, key=wide.__getitem__)] += 1
            spare -= 1
        yield wide


def _least(table: Table, column: int, need: int) -> int:
    """How narrow a column may be made."""
    if not table.is_words(column):
        return need
    if table.columns[column] in table.cut:
        return min(need, LEAST_CUT)
    return min(need, LEAST_PROSE if need > PROSE and column else LEAST_WORDS)


def _split(least: Sequence[int], width: int) -> list[list[int]]:
    """Split the columns into parts no wider than `width`, as far as two columns fit."""
    parts, used = [[0]], least[0]
    for column in range(1, len(least)):
        if used + GAP + least[column] > width and len(parts[-1]) > 1:
            parts, used = [*parts, [0]], least[0]
        parts[-1].append(column)
        used += GAP + least[column]
    return parts
