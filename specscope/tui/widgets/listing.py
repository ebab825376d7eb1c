"""ListPanel: a list that can be sorted and filtered by words."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

from textual import events
from textual.message import Message

from specscope.tui.keys import hidden
from specscope.tui.text import Ink, Line, clean, cut, fit, left, line_width, right
from specscope.tui.widgets.lines import Panel, Sheet

Item = TypeVar("Item")
UP, DOWN, GAP = "▲", "▼", "  "


@dataclass(frozen=True)
class Order:
    """How a list is arranged."""

    column: str = ""  # sorted by; "" as the items came
    reverse: bool = False
    words: str = ""  # only items with this in their text are shown


class ListPanel(Panel):
    """Subclasses name the columns to sort by, and arrange their items with `arranged`."""

    sorts: tuple[str, ...] = ()  # the columns

    def __init__(self, id: str | None = None) -> None:
        super().__init__(id=id)
        self.order = Order()
        self._item: Hashable = None  # the picked one, when the list was drawn last

    def set_order(self, order: Order) -> None:
        """Show the list in this order, from its top: that is what it was sorted for."""
        self.order = order
        if self.look is not None:
            self.show(self.look)
        self.scroll_to(y=0, animate=False, immediate=True, force=True)

    def kept(self, line: int, item: Hashable) -> int:
        """The line to keep in view: the picked item's. In a list that is sorted, only where another was picked."""
        same, self._item = item == self._item, item
        return -1 if same and (self.order.column or self.order.reverse) else line

    def sort(self, way: int) -> None:
        """Sort by the next column, after the last in the original order; -1: in reverse."""
        columns = ("", *self.sorts)
        index = columns.index(self.order.column) if self.order.column in columns else 0
        by_next = replace(self.order, column=columns[(index + 1) % len(columns)], reverse=False)
        self.set_order(by_next if way > 0 else replace(self.order, reverse=not self.order.reverse))

    def arranged(
        self, items: Sequence[Item], value: Callable[[Item, str], float | str | None], text: Callable[[Item], str]
    ) -> list[Item]:
        """The items that contain the words, sorted; what is not known comes last. Ties keep their order."""
        words = self.order.words.casefold()
        shown = [item for item in items if words in text(item).casefold()] if words else list(items)
        column = self.order.column
        if column:
            shown.sort(key=lambda item: ((at := value(item, column)) is None, at), reverse=self.order.reverse)
        elif self.order.reverse:
            shown.reverse()
        return shown

    def head(self, cells: Sequence[tuple[str, str]]) -> list[tuple[str, Ink]]:
        """The head's line from (column, its padded name); an arrow marks the sorted column.

        Where a name fills its column, the arrow stands in the gap beside it: no column moves.
        """
        texts: list[str] = [cells[0][1], *(text for _, name in cells[1:] for text in (GAP, name))]
        by = next(
            (2 * place for place, (column, _) in enumerate(cells) if column and column == self.order.column), None
        )
        if by is not None:
            arrow = DOWN if self.order.reverse else UP
            name = texts[by]
            if name.endswith(" "):
                texts[by] = (name.rstrip() + arrow).ljust(len(name))
            elif name.startswith(" "):
                texts[by] = (arrow + name.lstrip()).rjust(len(name))
            elif by:
                texts[by - 1] = texts[by - 1][:-1] + arrow
            else:
                texts[1:2] = [arrow + texts[1][1:]] if len(texts) > 1 else []
        sorted_by = range(0) if by is None else range(by - 1, by + 2)
        return [(text, "accent" if number in sorted_by else "faint") for number, text in enumerate(texts)]

    def said(self) -> Line:
        """The filter, for the title."""
        return [(f"/{clean(self.order.words)}", "accent")] if self.order.words else []


@dataclass
class ItemPicked(Message):
    """Another item of a list was picked."""


@dataclass(frozen=True)
class ListColumn(Generic[Item]):
    """A column of a list: its width in cells, 0 where there is no room for it, -1 for what is left of a line."""

    head: str
    width: int
    cell: Callable[[Item], tuple[str, Ink] | list[tuple[str, Ink]]]  # a text to be placed, or ready in its width
    value: Callable[[Item], float | str | None] | None = None  # what it is sorted by; what is not known comes last
    number: bool = False  # flush right
    key: str = ""  # its name for the order, where that is not its head

    @property
    def name(self) -> str:
        """What the order calls it; "" where it cannot be sorted by."""
        return "" if self.value is None else self.key or self.head

    def placed(self, text: str) -> str:
        """A text in its width."""
        return text if self.width < 0 else (right if self.number else left)(text, self.width)


def row_line(item: Item, columns: Sequence[ListColumn[Item]], width: int) -> Line:
    """Its cells, with a gap between them."""
    line: list[tuple[str, Ink]] = []
    for column in columns:
        line += [(GAP, "dim")] if line else []
        cell = column.cell(item)
        if isinstance(cell, list):
            line += cell
        elif column.width < 0:
            line.append((cut(clean(cell[0]), max(width - line_width(line), 0)), cell[1]))
        else:
            line.append((column.placed(clean(cell[0])), cell[1]))
    return line


class PickPanel(ListPanel):
    """A list of which one item is picked, with arrows or the mouse. `draw` fills `shown` and `rows`."""

    BINDINGS = hidden(up="pick(-1)", down="pick(1)", enter="screen.go")

    def __init__(self, id: str | None = None) -> None:
        super().__init__(id=id)
        self.picked = 0
        self.shown: list[Any] = []  # as they are listed
        self.rows: list[int] = []  # of each line below the head, the item's place in `shown`

    def set_order(self, order: Order) -> None:
        """Set the order and pick the first item, whose line is the first in view."""
        self.action_pick(-self.picked)
        super().set_order(order)

    @property
    def item(self) -> Any | None:  # noqa: ANN401
        """The picked item; None where there is none."""
        return self.shown[min(self.picked, len(self.shown) - 1)] if self.shown else None

    def action_pick(self, way: int) -> None:
        self.picked = min(max(self.picked + way, 0), max(len(self.shown) - 1, 0))
        if self.look is not None:
            self.show(self.look)
        self.post_message(ItemPicked())

    def pick_next(self, way: int, wanted: Callable[[Any], bool]) -> int | None:
        """Pick the next item that is wanted, as they are listed, in a ring; how far that was, None for none."""
        count = len(self.shown)
        ring = [(self.picked + way * by) % count for by in range(1, count + 1)]
        row = next((row for row in ring if wanted(self.shown[row])), None)
        if row is None:
            return None
        moved = row - self.picked
        self.action_pick(moved)
        return moved

    def table(
        self,
        name: str,
        items: Sequence[Item],
        columns: Sequence[ListColumn[Item]],
        text: Callable[[Item], str],
        width: int,
        *about: tuple[int, Line],
        below: Callable[[Item], list[Line]] = lambda item: [],
    ) -> Sheet:
        """A line an item, arranged, with what stands below it. `text`: of an item, for the filter.

        `about`: more for the title; what has rank 1 stands there in place of the count.
        """
        values = {column.name: column.value for column in columns if column.value is not None}
        self.sorts = tuple(values)
        shown = self.arranged(items, lambda item, column: values[column](item), text)
        self.shown, self.picked = shown, max(min(self.picked, len(shown) - 1), 0)
        count = f"{len(shown):,} of {len(items):,}" if self.order.words else f"{len(items):,}"
        parts: list[tuple[int, Line]] = [(0, [(name, "strong")])]
        parts += [] if any(rank == 1 for rank, _ in about) else [(1, [(count, "dim")])]
        there = [column for column in columns if column.width]
        lines: list[Line] = [self.head([(column.name, column.placed(column.head)) for column in there])]
        self.rows, cursor = [], 0
        for number, item in enumerate(shown):
            cursor = len(lines) if number == self.picked else cursor
            more = [row_line(item, there, width), *below(item)]
            lines += more
            self.rows += [number] * len(more)
        title = fit([*parts, *about, (3, self.said())], width - 2)
        return Sheet(lines, title, cursor=cursor, keep=cursor, head=1)

    def on_click(self, event: events.Click) -> None:
        row = self.line_at(event.get_content_offset_capture(self).y) - 1
        if 0 <= row < len(self.rows):
            self.action_pick(self.rows[row] - self.picked)
