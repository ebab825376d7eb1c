"""A table of strings, the one kind that there is, which reports, pages and screens lay out; and formats of cells."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rich.cells import cell_len

from specscope.analyze.findings import Reference
from specscope.trace.record.vocabulary import printable

GAP = 3  # characters between two columns of a table
NONE = "–"  # a figure with nothing under it
NARROWEST = 16  # cells of words that give way


@dataclass(frozen=True)
class Examples:
    """Where to look: the first of what a row counts, and what shows it best."""

    first: Reference
    clearest: Reference


@dataclass(frozen=True)
class Table:
    """Rows of cells under a title. The first column is words; the others are figures unless named in `words`.

    The answer to a question over many steps (questions/answers.py) has more than cells: what its rows are sorted by,
    and where to look at one of them.
    """

    title: str
    columns: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    note: str = ""  # what the columns mean
    words: frozenset[str] = field(default_factory=frozenset)
    cut: frozenset[str] = frozenset()  # of the words, those that a narrow terminal cuts; others fold
    ranks: Mapping[str, int] = field(
        default_factory=dict
    )  # of columns: where room is short, those of the highest go first; 0 stays
    values: Sequence[tuple[float | str | None, ...]] = ()  # of each row, what it is sorted by; None goes to the end
    examples: Sequence[Examples] = ()  # of each row
    notes: tuple[str, ...] = ()  # what is missing
    summary: str = ""  # the answer in a line; "" where there is none

    @property
    def widths(self) -> list[int]:
        """Width of each column in characters, where there is room."""
        return [max(map(cell_len, cells)) for cells in zip(self.columns, *self.rows, strict=True)]

    @property
    def width(self) -> int:
        return sum(self.widths) + GAP * (len(self.columns) - 1)

    def is_words(self, column: int) -> bool:
        """True where the column holds words and is set flush left."""
        return column == 0 or self.columns[column] in self.words

    def fitted(self, width: int, gap: int) -> list[tuple[int, int]]:
        """(column, its width) of those with something to show and room; words are cut before a column goes."""
        ranks, need = [self.ranks.get(name, 0) for name in self.columns], self.widths
        gives = [name in self.words and rank > 0 for name, rank in zip(self.columns, ranks, strict=True)]
        wide = {
            column: min(need[column], NARROWEST) if gives[column] else need[column]
            for column, rank in enumerate(ranks)
            if not rank or any(row[column] != NONE for row in self.rows)
        }
        while len(wide) > 1 and sum(wide.values()) + gap * (len(wide) - 1) > width:
            worst = max(wide, key=ranks.__getitem__)
            if not ranks[worst]:
                break
            del wide[worst]
        spare = width - sum(wide.values()) - gap * (len(wide) - 1)
        for column in wide:
            more = max(min(need[column] - wide[column], spare), 0)
            wide[column], spare = wide[column] + more, spare - more
        return list(wide.items())


def number(value: float | None, digits: int = 2) -> str:
    """1,234.50"""
    return NONE if value is None else f"{value:,.{digits}f}"


def percent(value: float | None) -> str:
    """12.3%"""
    return NONE if value is None else f"{value * 100:.1f}%"


def share(value: float | None, of: int | None) -> str:
    """12.3% of 80: a rate with its n; a dash where there is none."""
    return NONE if value is None else f"{percent(value)} of {told(of)}"


def count(value: int) -> str:
    """1,234"""
    return f"{value:,}"


def told(value: int | None) -> str:
    """1,234, or a dash for what is not known."""
    return NONE if value is None else count(value)


def one_line(text: str, limit: int) -> str:
    """The text on one line, cut to `limit` characters."""
    line = printable(" ".join(text[: limit * 4].split()))
    return line if len(line) <= limit else line[: limit - 1] + "…"
