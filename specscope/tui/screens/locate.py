"""Where a run breaks: the faults with their places, every operation of a walk with its error, and of one of them the
error of every row and head."""

from __future__ import annotations

import math
from functools import partial
from operator import attrgetter

from textual.app import ComposeResult
from textual.containers import Container

from specscope.analyze.locate.located import Floats, Held, Located, Location, Walk
from specscope.analyze.locate.text import AGREES, DIFFERS, error_text, explained, verdict
from specscope.tui.keys import ALONE, Key, foot, of_app
from specscope.tui.look import Look
from specscope.tui.screens.help import Part, Row, keys_of, two_columns
from specscope.tui.screens.over import Over, close
from specscope.tui.text import LEVELS, Ink, Line, clean, cut, fit, labelled, left, paragraph, show_token
from specscope.tui.widgets.lines import FixedPanel, Sheet
from specscope.tui.widgets.listing import ListColumn, PickPanel

SMALLEST = -8.0  # the power of ten at which bars begin; they end at 1
ERROR = 7  # cells of an error
FAR = 100.0  # times what is allowed: from here on the difference is no rounding of any dtype
RAIL, LIMIT, FULL = "·", "│", "█"
POSITION, TOKEN, LONGEST_ROW_BAR = 7, 12, 40
LABEL = 12  # cells of the words before a line of a fault
NARROWEST_BAR, LONGEST_BAR = 8, 40
ROWS = 9  # cells of the count of rows
MEANS: tuple[Row, ...] = (
    ("error", "strong", "the largest of |ours - right| / |right| over rows and heads"),
    ("allowed", "strong", "the error that rounding explains"),
    ("rows off", "strong", "rows with a larger error, of those compared"),
    ("position", "strong", "of the row in the text; /3: node 3 of the tree"),
)
BARS: tuple[Row, ...] = (
    ("▂", "bar", "rounding explains it; bars are powers of ten, from 1e-8 to 1"),
    ("▄", "warn", "up to 100 times more than rounding explains"),
    ("█", "rejected", "more than that"),
    ("│", "dim", "what is allowed"),
    ("✗", "rejected", "differs; the first, in bold, is the place"),
)


def help_lines(width: int) -> list[Line]:
    keys: list[Part] = [("Keys: operations", keys_of(LocateScreen)), ("Keys: one operation", keys_of(HeldScreen))]
    return two_columns(width, keys, [("Figures", MEANS), ("Colours", BARS)], labels=(7, 9))


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
        rest: Line = [(RAIL * (mark - filled), "rail"), (LIMIT, "dim"), (RAIL * (width - mark - 1), "rail")]
        return [(FULL * filled, "bar"), *rest]
    past, over = min(max(filled - mark - 1, 1), width - mark - 1), ink_of(error, allowed)
    return [(FULL * mark, "bar"), (LIMIT + FULL * past, over), (RAIL * (width - mark - 1 - past), "rail")]


class ErrorGrid(PickPanel):
    """The errors of an operation: a row of the grid for each row that was compared, a column for each head."""

    OF = attrgetter("place", "picked", "order")

    def __init__(self, walk: Walk, place: int, id: str | None = None) -> None:
        super().__init__(id=id)
        self._walk = walk
        self.put_place(place)

    def put_place(self, place: int) -> None:
        """Show the operation at this place of the walk, at its first row that differs."""
        self.place = min(max(place, 0), len(self._walk.operations) - 1)
        self.picked = next(iter(self.wrong), 0)

    @property
    def held(self) -> Held:
        return self._walk.operations[self.place]

    @property
    def wrong(self) -> list[int]:
        """The rows that are off by more than is allowed; what is no number is."""
        return [row for row, each in enumerate(self.held.errors) if not (each <= self.held.allowed).all()]

    def draw(self, look: Look, width: int, height: int) -> Sheet:
        """The rows; where an operation has no heads, a bar for each."""
        held = self.held
        name = clean(f"{held.operation.name}: error {error_text(held.error)}, {error_text(held.allowed)} allowed")
        if not len(held.errors):
            return Sheet([[("no errors of single rows were kept", "faint")]], [(cut(name, width - 2), "strong")])
        largest, wrong = held.errors.max(axis=1).tolist(), {*self.wrong}
        labels = [row_label(self._walk, held, row, look) for row in range(len(held.errors))]
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
        return self.table(name, rows, columns, text, width, (1, differ), (2, about))


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
        return "1e-8" + " " * (min(room, LONGEST_ROW_BAR) - 5) + "1"
    wide, merged = _width_of_part(parts, room)
    if merged > 1 or wide < 2:
        return f"heads 0 to {parts - 1}"
    return "".join(left(str(part), wide) if part % (1 if wide > 2 else 2) == 0 else " " * wide for part in range(parts))


def _cells(errors: Floats, allowed: float, room: int) -> list[tuple[str, Ink]]:
    """A row of the grid: blocks as high as the error, coloured by what is allowed."""
    if len(errors) == 1:
        return error_bar(float(errors[0]), allowed, max(min(room, LONGEST_ROW_BAR), 1))
    wide, merged = _width_of_part(len(errors), room)
    cells: list[tuple[str, Ink]] = []
    for part in range(0, len(errors), merged):
        error = float(errors[part : part + merged].max())
        level = max(round(share_of(error) * (len(LEVELS) - 1)), 1)
        block = LEVELS[level] * max(wide - 1, 1)
        cells.append((left(block, wide), ink_of(error, allowed)))
    return cells


def faults_sheet(location: Location, width: int) -> Sheet:
    """Each fault that was located; then what has no place, what was ruled out and what was left out."""
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

    OF = attrgetter("number", "picked", "order")

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

    def turn(self, way: int) -> None:
        self.number = (self.number + way) % max(len(self.location.walks), 1)
        self.picked = (self.walk.first or 0) if self.walk is not None else 0
        if self.look is not None:
            self.show(self.look)

    def draw(self, look: Look, width: int, height: int) -> Sheet:
        """The table: words first, then a bar, then names, where there is room for them."""
        walk = self.walk
        if walk is None:
            return Sheet([[("no walk: no model recomputed a step", "faint")]], [("Operations", "strong")])
        every = walk.operations
        words = min(max([len("operation"), *(len(held.operation.words) for held in every)]), 44)
        name = max([0, *(len(held.operation.name) for held in every)])
        room = width - 1 - 2 * ERROR - ROWS - 5 * 2
        words = min(words, max(room - NARROWEST_BAR, NARROWEST_BAR))
        room -= words
        name = name if room - name - 2 >= NARROWEST_BAR else 0
        bar = max(min(room - (name + 2 if name else 0), LONGEST_BAR), 1)

        def ink(held: Held, other: Ink) -> Ink:
            return "rejected" if held.differs else other

        def named(place: int) -> tuple[str, Ink]:
            held = every[place]
            return held.operation.words, "strong" if place == walk.first else "text" if held.differs else "dim"

        def error(place: int) -> tuple[str, Ink]:
            return error_text(every[place].error), ink(every[place], "text")

        def off(place: int) -> tuple[str, Ink]:
            return f"{every[place].differing:,}/{every[place].rows:,}", ink(every[place], "faint")

        columns: list[ListColumn[int]] = [
            ListColumn("", 1, lambda at: (DIFFERS if every[at].differs else AGREES, ink(every[at], "accepted"))),
            ListColumn("operation", words, named, lambda at: every[at].operation.words),
            ListColumn("name", name, lambda at: (every[at].operation.name, "faint")),
            ListColumn("error", ERROR, error, lambda at: every[at].error, True),
            ListColumn("allowed", ERROR, lambda at: (error_text(every[at].allowed), "faint"), None, True),
            ListColumn("", bar, lambda at: error_bar(every[at].error, every[at].allowed, bar)),
            ListColumn("rows off", ROWS, off, lambda at: every[at].differing, True),
        ]
        walks = self.location.walks
        about: tuple[tuple[int, Line], ...] = (
            (2, [(clean(f"{walk.stage.value} at {walk.where}"), "accent")]),
            (3, [(f"walk {self.number + 1} of {len(walks)}" if len(walks) > 1 else "", "dim")]),
            (5, [(clean(walk.sides), "dim")]),
        )
        text = lambda at: f"{every[at].operation.words} {every[at].operation.name}"  # noqa: E731
        return self.table("Operations", range(len(every)), columns, text, width, *about)


class HeldScreen(Over):
    FIRST = ErrorGrid
    KEYS = (
        close(0, word="back"),
        Key("n", "screen.next(1)", "Next row that differs", "n", "next row that differs", 1),
        Key("N,upper_n", "screen.next(-1)", "Previous row that differs", "N", "previous", 4),
        Key("right", "screen.turn(1)", "Next operation", "→", "next operation", 2),
        Key("left", "screen.turn(-1)", "Previous operation", "←", "previous", 3),
        Key("pageup", "focused.pick(-10)", "Far above"),
        Key("pagedown", "focused.pick(10)", "Far below"),
        *foot(sort=6, help=5),
        *of_app("next_theme"),
    )

    def __init__(self, look: Look, walk: Walk, place: int) -> None:
        super().__init__(look)
        self._grid = ErrorGrid(walk, place, "rows")

    def parts(self) -> ComposeResult:
        yield self._grid

    def action_turn(self, way: int) -> None:
        self._grid.put_place(self._grid.place + way)
        self.show(self.last)

    def action_next(self, way: int) -> None:
        """The next row that differs, as they are listed, in a ring."""
        if self._grid.pick_next(way, {*self._grid.wrong}.__contains__) is None:
            self.notify("no row differs")


class LocateScreen(Over, inherit_bindings=False):
    """Enter opens the picked operation by position and head."""

    SCOPED_CSS = False  # the classes of size are on the screen itself
    DEFAULT_CSS = """
    #of-locate { height: 1fr; layout: grid; grid-size: 1; grid-rows: 9 1fr; }
    .-tall #of-locate { grid-rows: 13 1fr; }
    """
    FIRST = WalkPanel
    KEYS = (
        *ALONE,
        Key("enter", "screen.go", "Open", "⏎", "positions and heads", 0, help="the error of every position and head"),
        Key("n", "screen.next(1)", "Next difference", "n", "next difference", 1),
        Key("N,upper_n", "screen.next(-1)", "Previous difference", "N", "previous", 6),
        Key("right,w", "screen.turn(1)", "Next walk", "→", "next walk", 2, help="next walk: target, drafter"),
        Key("left,W,upper_w", "screen.turn(-1)", "Previous walk", "←"),
        *foot(filter=3, sort=5, reverse=7, theme=8, help=4, quit=9),
    )

    def __init__(self, look: Look, location: Location) -> None:
        super().__init__(look)
        self._location = location

    def parts(self) -> ComposeResult:
        with Container(id="of-locate"):
            yield FixedPanel(partial(faults_sheet, self._location), "faults")
            yield WalkPanel(self._location, "walk")

    @property
    def _walk(self) -> WalkPanel:
        return self.query_one(WalkPanel)

    def action_turn(self, way: int) -> None:
        if len(self._location.walks) < 2:
            self.notify("this is the only walk" if self._location.walks else "there is no walk")
            return
        self._walk.turn(way)

    def action_next(self, way: int) -> None:
        """The next operation that differs, as they are listed, in a ring."""
        walk = self._walk.walk
        if walk is None or self._walk.pick_next(way, lambda place: walk.operations[place].differs) is None:
            self.notify("no operation differs")

    def action_go(self) -> None:
        walk, place = self._walk.walk, self._walk.item
        if walk is not None and place is not None:
            self.app.push_screen(HeldScreen(self.last, walk, place))
