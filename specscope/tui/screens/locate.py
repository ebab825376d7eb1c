"""Where a run breaks: the faults with their places, and every operation of a walk with its error."""

from __future__ import annotations

from collections.abc import Hashable
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Container

from specscope.analyze.locate.located import Held, Located, Location, Walk
from specscope.analyze.locate.text import AGREES, DIFFERS, error_text, explained, verdict
from specscope.tui.look import Look
from specscope.tui.screens.held import HeldScreen
from specscope.tui.screens.over import Hint, Over, keys_of
from specscope.tui.text import Ink, Line, clean, fit, labelled, left, paragraph, right
from specscope.tui.widgets.errors import ERROR, ErrorGrid, PickedOperation, error_bar
from specscope.tui.widgets.lines import Panel, Sheet
from specscope.tui.widgets.listing import PickPanel

LABEL = 12  # cells of the words before a line of a fault
NARROWEST_BAR, LONGEST_BAR = 8, 40


class FaultsPanel(Panel):
    """What was located, sentence by sentence, and what was ruled out."""

    def __init__(self, location: Location, id: str | None = None) -> None:
        super().__init__(id=id)
        self._location = location

    def key(self, look: Look) -> Hashable:
        """Constant: it does not change."""
        return None

    def draw(self, look: Look, width: int, height: int) -> Sheet:
        """Each fault; then what has no place, what was ruled out and what was left out."""
        location = self._location
        ink: Ink = "rejected" if location.without_place else "warn" if location.left_out else "accepted-strong"
        lines: list[Line] = [] if location.located else paragraph(verdict(location), width, ink)
        for number, fault in enumerate(location.located, 1):
            lines += _fault_lines(number, fault, width)
        rest: tuple[tuple[str, tuple[str, ...], Ink], ...] = (
            ("no place", location.without_place, "rejected"),
            ("ruled out", location.ruled_out, "dim"),
            ("left out", location.left_out, "warn"),
        )
        for title, sentences, shade in rest:
            for sentence in sentences:
                lines += labelled(title, "faint", clean(sentence), shade, LABEL, width)
        count = len(location.located)
        return Sheet(lines, fit([(0, [("Located", "strong")]), (1, [(f"{count}", "dim")])], width - 2))


def _fault_lines(number: int, fault: Located, width: int) -> list[Line]:
    """A fault: its operation, how it differs, what that looks like, where in the code, what shows it."""
    operation = fault.operation
    region = "" if fault.certain else ", or near it"
    name = f"{operation.words}  ({operation.stage.value}: {operation.name}{region})"
    lines = labelled(f"{number}.", "accent", clean(name), "strong", LABEL, width)
    lines += labelled("", "faint", clean(fault.sentence), "text", LABEL, width)
    for label, text in (
        ("looks like", fault.looks),
        ("code", operation.code),
        ("smallest", fault.smallest),
        ("explains", explained(fault) if fault.differing else ""),
        ("next best", fault.runner_up),
    ):
        lines += labelled(label, "faint", clean(text), "text", LABEL, width) if text else []
    return lines


class WalkPanel(PickPanel):
    """The operations of a walk in the order of computing: error, what is allowed, a bar and how many rows are off."""

    COLUMNS: ClassVar[tuple[str, ...]] = ("operation", "error", "rows off")

    def __init__(self, location: Location, id: str | None = None) -> None:
        super().__init__(id=id)
        self.location = location
        walks = location.walks
        self.number = next((number for number, walk in enumerate(walks) if walk.first is not None), 0)
        self.picked = (self.walk.first or 0) if self.walk is not None else 0

    @property
    def walk(self) -> Walk | None:
        """The walk that is shown; None where there is none."""
        return self.location.walks[self.number] if self.location.walks else None

    @property
    def chosen(self) -> PickedOperation | None:
        """The picked operation of the walk."""
        item = self.item
        return None if self.walk is None or item is None else PickedOperation(self.walk, item)

    def turn(self, way: int) -> None:
        """Show another walk, at its first difference."""
        self.number = (self.number + way) % max(len(self.location.walks), 1)
        self.picked = (self.walk.first or 0) if self.walk is not None else 0
        if self.look is not None:
            self.show(self.look)

    def key(self, look: Look) -> Hashable:
        """The walk, the picked operation, and the order."""
        return self.number, self.picked, self.order

    def draw(self, look: Look, width: int, height: int) -> Sheet:
        """The table."""
        walk = self.walk
        if walk is None:
            return Sheet([[("no walk: no model computed a step again", "faint")]], [("Operations", "strong")])
        operations = walk.operations

        def value(place: int, column: str) -> float | str:
            held = operations[place]
            return (
                held.operation.words if column == "operation" else held.error if column == "error" else held.differing
            )

        def text(place: int) -> str:
            return f"{operations[place].operation.words} {operations[place].operation.name}"

        shown = self.shown = self.arranged(range(len(operations)), value, text)
        self.rows, self.picked = list(range(len(shown))), max(min(self.picked, len(shown) - 1), 0)
        words = min(max([len("operation"), *(len(held.operation.words) for held in operations)]), 44)
        room = _Room.of(width, words, max([0, *(len(held.operation.name) for held in operations)]))
        cells = [("", " "), ("operation", left("operation", room.words))]
        cells += [("", left("name", room.name))] if room.name else []
        cells += [("error", right("error", ERROR)), ("", right("allowed", ERROR)), ("", left("", room.bar))]
        cells += [("rows off", right("rows off", room.rows))]
        lines: list[Line] = [self.head(cells)]
        first = walk.first
        lines += [_line(operations[place], room, is_first=place == first) for place in shown]
        return Sheet(lines, self._title(walk, width - 2), cursor=1 + self.picked, keep=1 + self.picked, head=1)

    def _title(self, walk: Walk, width: int) -> Line:
        walks = self.location.walks
        count = f"{len(self.shown)} of {len(walk.operations)}" if self.order.words else f"{len(walk.operations)}"
        several = f"walk {self.number + 1} of {len(walks)}" if len(walks) > 1 else ""
        return fit(
            [
                (0, [("Operations", "strong")]),
                (1, [(count, "dim")]),
                (2, [(clean(f"{walk.stage.value} at {walk.where}"), "accent")]),
                (3, [(several, "dim")]),
                (5, [(clean(walk.sides), "dim")]),
                (4, self.said()),
            ],
            width,
        )


class _Room:
    """The cells of each column of the operations."""

    def __init__(self, words: int, name: int, bar: int, rows: int) -> None:
        self.words, self.name, self.bar, self.rows = words, name, bar, rows

    @staticmethod
    def of(width: int, words: int, name: int) -> _Room:
        """Words first, then a bar, then names, where there is room for them."""
        rows = 9
        left_over = width - 1 - 2 * ERROR - rows - 5 * 2
        words = min(words, max(left_over - NARROWEST_BAR, NARROWEST_BAR))
        left_over -= words
        shown = name if left_over - name - 2 >= NARROWEST_BAR else 0
        return _Room(words, shown, max(min(left_over - (shown + 2 if shown else 0), LONGEST_BAR), 1), rows)


def _line(held: Held, room: _Room, *, is_first: bool) -> Line:
    differs = held.differs
    words: Ink = "strong" if is_first else "text" if differs else "dim"
    line: list[tuple[str, Ink]] = [
        (DIFFERS if differs else AGREES, "rejected" if differs else "accepted"),
        ("  ", "dim"),
    ]
    line += [(left(clean(held.operation.words), room.words), words), ("  ", "dim")]
    line += [(left(clean(held.operation.name), room.name), "faint"), ("  ", "dim")] if room.name else []
    line += [(right(error_text(held.error), ERROR), "rejected" if differs else "text"), ("  ", "dim")]
    line += [(right(error_text(held.allowed), ERROR), "faint"), ("  ", "dim")]
    line += [*error_bar(held.error, held.allowed, room.bar), ("  ", "dim")]
    return [*line, (right(f"{held.differing:,}/{held.rows:,}", room.rows), "rejected" if differs else "faint")]


class LocateScreen(Over, inherit_bindings=False):
    """Enter opens the picked operation by position and head."""

    SCOPED_CSS = False  # the classes of size are on the screen itself
    DEFAULT_CSS = """
    #of-locate { height: 1fr; layout: grid; grid-size: 1; grid-rows: 9 1fr; }
    .-tall #of-locate { grid-rows: 13 1fr; }
    #preview { display: none; }
    .-huge #of-locate { grid-size: 2; grid-columns: 13fr 9fr; grid-rows: 13 1fr; }
    .-huge #faults { column-span: 2; }
    .-huge #preview { display: block; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("enter", "go", "Open", show=False),
        Binding("ctrl+c", "app.quit", "Quit", show=False),
        *keys_of("quit", "theme", "help"),
        Binding("n", "next(1)", "Next difference", show=False),
        Binding("N,upper_n", "next(-1)", "Previous difference", show=False),
        Binding("right,w", "turn(1)", "Next walk", show=False),
        Binding("left,W,upper_w", "turn(-1)", "Previous walk", show=False),
        *keys_of("filter", "sort", "sort_reverse"),
        Binding("tab", "app.focus_next", "Next panel", show=False),
        Binding("shift+tab", "app.focus_previous", "Previous panel", show=False),
    ]
    HINTS = (
        Hint(0, "⏎", "positions and heads", "screen.go"),
        Hint(1, "n", "next difference", "screen.next(1)"),
        Hint(6, "N", "previous", "screen.next(-1)"),
        Hint(2, "→", "next walk", "screen.turn(1)"),
        Hint(3, "/", "filter", "app.filter"),
        Hint(5, "o", "sort", "app.sort(1)"),
        Hint(7, "O", "reverse", "app.sort(-1)"),
        Hint(8, "t", "theme", "app.next_theme"),
        Hint(4, "?", "help", "app.help"),
        Hint(9, "q", "quit", "app.quit"),
    )

    def __init__(self, look: Look, location: Location) -> None:
        super().__init__(look)
        self._location = location

    def parts(self) -> ComposeResult:
        """The faults, the operations, and the picked one's rows where there is room."""
        walk = WalkPanel(self._location, "walk")
        with Container(id="of-locate"):
            yield FaultsPanel(self._location, "faults")
            yield walk
            if walk.walk is not None:
                yield ErrorGrid(PickedOperation(walk.walk, walk.picked), "preview")

    def on_mount(self) -> None:
        """Arrows pick an operation."""
        super().on_mount()
        self._walk.focus()

    @property
    def _walk(self) -> WalkPanel:
        return self.query_one(WalkPanel)

    def show(self, look: Look) -> None:
        """A new look, or another operation."""
        super().show(look)
        self._preview()

    def _preview(self) -> None:
        chosen = self._walk.chosen
        for panel in self.query(ErrorGrid):
            if chosen is not None:
                panel.put_chosen(chosen)
                panel.show(self.last)

    def action_pick(self, way: int) -> None:
        """Pick another operation, or another row where these have the focus."""
        panel = self.focused if isinstance(self.focused, ErrorGrid) else self._walk
        panel.pick(way)
        self._preview()

    def action_turn(self, way: int) -> None:
        """The next walk."""
        if len(self._location.walks) < 2:
            self.notify("this is the only walk" if self._location.walks else "there is no walk")
            return
        self._walk.turn(way)
        self._preview()

    def action_next(self, way: int) -> None:
        """The next operation that differs, as they are listed, in a ring."""
        panel = self._walk
        operations = () if panel.walk is None else panel.walk.operations
        count = len(panel.shown)
        ring = [(panel.picked + way * by) % count for by in range(1, count + 1)]
        row = next((row for row in ring if operations[panel.shown[row]].differs), None)
        if row is None:
            self.notify("no operation differs")
            return
        panel.pick(row - panel.picked)
        self._preview()

    def action_go(self) -> None:
        """Open the picked operation."""
        chosen = self._walk.chosen
        if chosen is not None:
            self.app.push_screen(HeldScreen(self.last, chosen))
