"""Two captures compared: the verdict, differences in configuration, and the pairs with the places where they part."""

from __future__ import annotations

from collections.abc import Hashable
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Container

from specscope.tui.compared import Compared, ComparedPair
from specscope.tui.look import Look
from specscope.tui.screens.over import Hint, Over, keys_of
from specscope.tui.screens.parting_view import PartingScreen
from specscope.tui.text import NOTHING, Ink, Line, clean, cut, cut_apart, figure, fit, folded, left, right
from specscope.tui.widgets.lines import Panel, Sheet
from specscope.tui.widgets.listing import PickPanel

INKS: dict[str, Ink] = {"same": "accepted-strong", "different": "rejected"}
NUMBER, TAU = 6, 5
SHORTEST = 16  # cells of a name in a table, where room is short


class ComparedPanel(Panel):
    """A panel that does not change once two captures have been compared."""

    def __init__(self, compared: Compared, id: str | None = None) -> None:
        super().__init__(id=id)
        self._compared = compared

    def key(self, look: Look) -> Hashable:
        """Constant: the panel does not change."""
        return None


class VerdictPanel(ComparedPanel):
    """The verdict (same, different or undecided), and why."""

    def draw(self, look: Look, width: int, height: int) -> Sheet:
        """The sentence first, then the acceptance length, what speaks for it, what was left out, and the files."""
        compared = self._compared
        ink: Ink = INKS.get(compared.answer, "warn")
        lines: list[Line] = [[(text, ink)] for text in folded(compared.summary, width)]
        lines += [[(text, "strong")] for text in folded(compared.headline, width)]
        remarks: list[tuple[str, str, Ink]] = [("• ", reason, "text") for reason in compared.reasons]
        remarks += [("– ", line, "dim") for line in compared.missing]
        for mark, line, shade in remarks:
            for number, text in enumerate(folded(line, width - 2)):
                lines.append([("  " if number else mark, "dim"), (text, shade)])
        for name, source in zip("AB", compared.sources, strict=True):
            lines.append([(f"{name} ", "accent"), (cut(clean(source), width - 2), "dim")])
        return Sheet(lines, [("Verdict", "strong")])


class ConfigurationPanel(ComparedPanel):
    """The differences in configuration between the two runs."""

    def draw(self, look: Look, width: int, height: int) -> Sheet:
        """One line per difference: what differs, A, B."""
        rows = self._compared.differences
        title: Line = [
            ("Configuration", "strong"),
            (f"  {len(rows)} {'differs' if len(rows) == 1 else 'differ'}", "dim"),
        ]
        if not rows:
            return Sheet([[(cut(self._compared.undiffering, width), "faint")]], title)
        name = min(max(len(row[0]) for row in rows), 31, width // 2)
        half = min(max(len(row[1]) for row in rows), (width - name - 4) // 2)
        lines: list[Line] = []
        for what, a, b, note in rows:
            rest = width - name - half - 4
            first, second = cut_apart(clean(a), clean(b), half, rest)
            line: list[tuple[str, Ink]] = [(left(clean(what), name), "dim"), ("  ", "dim")]
            line += [(left(first, half), "text"), ("  ", "dim"), (second, "text")]
            room = rest - len(second) - 3
            if note and room > 12:
                line += [("   ", "dim"), (cut(note, room), "faint")]
            lines.append(line)
        return Sheet(lines, title)


class ChangedPanel(ComparedPanel):
    """The requests, labels and depths that changed most."""

    COLUMNS: ClassVar[tuple[str, ...]] = ("", "A", "B", "B − A", "95 %", "drafts", "")

    def draw(self, look: Look, width: int, height: int) -> Sheet:
        """One line per row. In a narrow panel names shrink first; then columns go, the least important first."""
        rows = self._compared.changed
        title: Line = [("What changed most", "strong"), (f"  {len(rows)}", "dim")]
        if not rows:
            return Sheet([[("nothing changed", "faint")]], title)
        table = [self.COLUMNS, *rows]
        wide = [max(len(clean(row[column])) for row in table) for column in range(len(self.COLUMNS))]
        shown, room = [], width - min(wide[0], SHORTEST)
        for column in (3, 6, 1, 2, 4, 5):  # what matters most comes first
            room -= wide[column] + 2
            if room < 0:
                break
            shown.append(column)
        name = min(wide[0], width - sum(wide[column] + 2 for column in shown))
        lines: list[Line] = []
        for number, row in enumerate(table):
            ink: Ink = "faint" if not number else "text"
            moved: Ink = "faint" if not number else "rejected" if row[3].startswith("-") else "accepted"
            line: list[tuple[str, Ink]] = [(left(clean(row[0]), name), ink)]
            for column in sorted(shown):
                line += [("  ", "dim"), (right(row[column], wide[column]), moved if column == 3 else ink)]
            lines.append(line)
        return Sheet(lines, title, head=1)


class ChangedScreen(Over, inherit_bindings=False):
    """What changed most, over the whole screen."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,q,c", "dismiss", "Close", show=False),
        Binding("ctrl+c", "app.quit", "Quit", show=False),
        *keys_of("theme", "help"),
    ]
    HINTS = (Hint(0, "Esc", "close", "screen.dismiss"), Hint(1, "?", "help", "app.help"))

    def __init__(self, look: Look, compared: Compared) -> None:
        super().__init__(look)
        self._compared = compared

    def parts(self) -> ComposeResult:
        """One panel."""
        yield ChangedPanel(self._compared, "all-changed")

    def on_mount(self) -> None:
        """Arrows scroll it."""
        super().on_mount()
        self.query_one(ChangedPanel).focus()


class PairsPanel(PickPanel):
    """One line per pair; the picked one is highlighted."""

    COLUMNS: ClassVar[tuple[str, ...]] = ("request", "tokens", "τ A", "τ B", "change", "parts at", "cause")

    def __init__(self, compared: Compared, id: str | None = None) -> None:
        super().__init__(id=id)
        self._compared = compared

    def key(self, look: Look) -> Hashable:
        """The picked pair, and the order."""
        return self.picked, self.order

    def draw(self, look: Look, width: int, height: int) -> Sheet:
        """The table."""
        every = self._compared.pairs
        self.shown = self.arranged(every, _value, lambda pair: f"{pair.a} {pair.b} {pair.cause} {pair.title}")
        self.rows = list(range(len(self.shown)))
        self.picked = max(min(self.picked, len(self.shown) - 1), 0)
        parted = sum(pair.at is not None for pair in every)
        count = f"{len(self.shown)} of {len(every)}" if self.order.words else f"{len(every)}"
        title = fit(
            [
                (0, [("Pairs", "strong")]),
                (1, [(count, "dim")]),
                (2, [(f"{parted} {'parts' if parted == 1 else 'part'}", "dim")]),
                (3, self.said()),
            ],
            width - 2,
        )
        if not every:
            return Sheet([[(text, "faint")] for text in folded(self._compared.unpaired, width)], title)
        name = min(max(max(len(pair.a) for pair in every), 7), 14)
        wide = width >= 100
        cells = [("request", left("request", name))]
        cells += [("tokens", right("tokens", NUMBER))] if wide else []
        cells += [("τ A", right("τ A", TAU)), ("τ B", right("τ B", TAU)), ("change", right("change", NUMBER))]
        cells += [("parts at", right("parts at", 8)), ("cause", left("cause", 10)), ("", "prompt")]
        lines: list[Line] = [self.head(cells)]
        harmless = {cause.name for cause in self._compared.causes if cause.harmless}
        lines += [_line(pair, name, width, wide=wide, harmless=pair.cause in harmless) for pair in self.shown]
        return Sheet(lines, title, cursor=1 + self.picked, keep=1 + self.picked, head=1)


def _change(pair: ComparedPair) -> float | None:
    a, b = pair.tau
    return None if a is None or b is None else b - a


def _value(pair: ComparedPair, column: str) -> float | str:
    """The sort value of a pair; missing values come last."""
    last = float("inf")
    if column == "request":
        return pair.a
    if column == "cause":
        return pair.cause or "~"
    numbers = {
        "tokens": pair.tokens[0],
        "τ A": pair.tau[0],
        "τ B": pair.tau[1],
        "change": _change(pair),
        "parts at": pair.at,
    }
    value = numbers[column]
    return last if value is None else value


def _line(pair: ComparedPair, name: int, width: int, *, wide: bool, harmless: bool) -> Line:
    change = _change(pair)
    moved: Ink = "dim" if not change else "accepted" if change > 0 else "rejected"
    why: Ink = "dim" if harmless else "rejected"
    line: list[tuple[str, Ink]] = [(left(clean(pair.a), name), "text"), ("  ", "dim")]
    line += [(right(f"{pair.tokens[0]:,}", NUMBER), "dim"), ("  ", "dim")] if wide else []
    for value in pair.tau:
        line += [(right(figure(value), TAU), "text"), ("  ", "dim")]
    line += [(right(NOTHING if change is None else f"{change:+.2f}", NUMBER), moved), ("  ", "dim")]
    line += [(right(NOTHING if pair.at is None else f"{pair.at:,}", 8), "text"), ("  ", "dim")]
    same: Ink = "accepted" if pair.other is None else "dim"
    verdict = (left(pair.cause, 10), why) if pair.cause else (left("same text", 10), same)
    line += [verdict, ("  ", "dim")]
    used = sum(len(text) for text, _ in line)
    return [*line, (cut(clean(pair.title), max(width - used, 0)), "dim")]


class CompareScreen(Over, inherit_bindings=False):
    """Enter opens the picked pair where it parts."""

    SCOPED_CSS = False  # the classes of size are on the screen itself
    DEFAULT_CSS = """
    #of-compare { height: 1fr; layout: grid; grid-size: 1; grid-rows: 8 5 1fr; }
    #changed { display: none; }
    .-tall #changed { display: block; }
    .-tall #of-compare { grid-rows: 8 7 8 1fr; }
    .-wide #of-compare { grid-size: 2; grid-columns: 1fr 1fr; grid-rows: 11 1fr; }
    .-wide.-tall #of-compare { grid-rows: 11 9 1fr; }
    .-wide #pairs, .-wide #changed { column-span: 2; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("enter", "go", "Open", show=False),
        Binding("ctrl+c", "app.quit", "Quit", show=False),
        *keys_of("quit", "theme", "help"),  # the app's own do not reach a modal screen
        Binding("n", "next(1)", "Next parting", show=False),
        Binding("N,upper_n", "next(-1)", "Previous parting", show=False),
        Binding("c", "changed", "What changed most", show=False),
        *keys_of("filter", "sort", "sort_reverse"),
        Binding("tab", "app.focus_next", "Next panel", show=False),
        Binding("shift+tab", "app.focus_previous", "Previous panel", show=False),
    ]
    HINTS = (
        Hint(0, "⏎", "open", "screen.go"),
        Hint(1, "n", "next parting", "screen.next(1)"),
        Hint(5, "N", "previous", "screen.next(-1)"),
        Hint(4, "c", "changed most", "screen.changed"),
        Hint(2, "/", "filter", "app.filter"),
        Hint(3, "o", "sort", "app.sort(1)"),
        Hint(6, "O", "reverse", "app.sort(-1)"),
        Hint(7, "t", "theme", "app.next_theme"),
        Hint(4, "?", "help", "app.help"),
        Hint(8, "q", "quit", "app.quit"),
    )

    def __init__(self, look: Look, compared: Compared) -> None:
        super().__init__(look)
        self._compared = compared

    def parts(self) -> ComposeResult:
        """Four panels; what changed most is among them where there is room, and under its key always."""
        with Container(id="of-compare"):
            yield VerdictPanel(self._compared, "verdict")
            yield ConfigurationPanel(self._compared, "configuration")
            yield ChangedPanel(self._compared, "changed")
            yield PairsPanel(self._compared, "pairs")

    def on_mount(self) -> None:
        """Arrows pick a pair."""
        super().on_mount()
        self._pairs.focus()

    @property
    def _pairs(self) -> PairsPanel:
        return self.query_one(PairsPanel)

    def action_pick(self, way: int) -> None:
        """Pick another pair."""
        self._pairs.pick(way)

    def action_next(self, way: int) -> bool:
        """The next pair that parts, as they are listed, in a ring; False where there is none."""
        panel = self._pairs
        count = len(panel.shown)
        ring = [(panel.picked + way * by) % count for by in range(1, count + 1)]
        row = next((row for row in ring if panel.shown[row].at is not None), None)
        if row is None:
            self.notify("no pair parts")
            return False
        if row == panel.picked:
            self.notify("this is the only pair that parts")
        elif (row > panel.picked) != (way > 0):
            later, first = ("later", "first") if way > 0 else ("earlier", "last")
            self.notify(f"no {later} pair parts: wrapped around to the {first}")
        panel.pick(row - panel.picked)
        return True

    def action_changed(self) -> None:
        """What changed most, over the whole screen."""
        self.app.push_screen(ChangedScreen(self.last, self._compared))

    def action_go(self) -> None:
        """Open the picked pair."""
        pair = self._pairs.item
        if pair is not None:
            self.app.push_screen(PartingScreen(self.last, self._compared, pair, self._other))

    def _other(self, way: int) -> ComparedPair | None:
        """Pick the next pair that parts, for the screen that lies over this one."""
        return self._pairs.item if self.action_next(way) else None
