"""Two captures compared: the verdict, differences in configuration, and the pairs with the places where they part."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from operator import attrgetter

from textual.app import ComposeResult
from textual.containers import Container

from specscope.analyze.compare.parting import PartingCause
from specscope.analyze.compare.result import Comparison, Pair
from specscope.analyze.compare.side import Side
from specscope.analyze.compare.tables import configuration
from specscope.tui.keys import ALONE, COLOURS, MARKS, Key, foot
from specscope.tui.look import Look
from specscope.tui.screens.beside import Beside, BesideScreen
from specscope.tui.screens.help import NODE, Part, Row, keys_of, two_columns
from specscope.tui.screens.over import Over
from specscope.tui.text import NOTHING, Ink, Line, clean, cut, cut_apart, figure, labelled, left, paragraph
from specscope.tui.widgets.lines import FixedPanel, Sheet
from specscope.tui.widgets.listing import ListColumn, PickPanel

INKS: dict[str, Ink] = {"same": "accepted-strong", "different": "rejected"}
NUMBER, TAU = 6, 5
SHORTEST = 16  # cells of a name in a table, where room is short

COLUMNS: tuple[Row, ...] = (
    ("τ A, τ B", "strong", "mean acceptance length of the request in each capture"),
    ("change", "strong", "τ B - τ A"),
    ("parts at", "strong", "output tokens before the first difference"),
)
MARKS_HERE: tuple[Row, ...] = (*MARKS[:-2], ("»", "warn", "the step where the outputs part; a final token"))


def help_lines(width: int) -> list[Line]:
    """The help page for a width in cells: what can make two outputs part, and the keys."""
    keys: list[Part] = [("Keys: pairs", keys_of(CompareScreen)), ("Keys: one pair", keys_of(BesideScreen))]
    why: list[Row] = [(cause.value, "dim" if cause.harmless else "rejected", cause.about) for cause in PartingCause]
    means: list[Part] = [("Columns", COLUMNS), ("Causes", why), ("Verdicts", MARKS_HERE), ("Tokens", COLOURS), NODE]
    return two_columns(width, keys, means, labels=(7, 12))


@dataclass(frozen=True)
class Compared:
    comparison: Comparison
    a: Side
    b: Side

    def beside(self, pair: Pair) -> Beside:
        requests = self.a.requests[pair.a], self.b.requests[pair.b]
        steps = self.a.steps(requests[0]), self.b.steps(requests[1])
        at, first = pair.parting, pair.first
        other = "" if first is None else f"; the first other decision is at token {first.position:,}"
        what = "the same output" if at is None else f"the outputs part at token {at.position:,}: {at.cause.about}"
        tau: Line = [("τ ", "dim"), (f"{figure(pair.tau[0])} → {figure(pair.tau[1])}", "text")]
        name = pair.id_a if pair.id_a == pair.id_b else f"{pair.id_a} / {pair.id_b}"
        return Beside(
            names=("A", "B"),
            title=((0, [(clean(name), "strong")]), (1, tau), (2, [(clean(pair.title), "dim")])),
            said=((what + other, "dim" if at is None else "warn"),),
            sides=steps,
            numbers=([step.index for step in steps[0]], [step.index for step in steps[1]]),
            at=None if at is None else at.position,
            other=None if first is None else first.position,
            vocabularies=(self.a.vocabulary, self.b.vocabulary),
            dtypes=(self.a.dtype(requests[0]), self.b.dtype(requests[1])),
        )


def verdict_sheet(found: Comparison, width: int) -> Sheet:
    """The sentence first, then the acceptance length, what speaks for it, what was left out, and the files."""
    ink: Ink = INKS.get(found.answer.value, "warn")
    lines = [*paragraph(found.summary, width, ink), *paragraph(found.headline, width, "strong")]
    for line in found.reasons:
        lines += labelled("•", "dim", line, "text", 2, width)
    for line in found.missing:
        lines += labelled("–", "dim", line, "dim", 2, width)
    for name, side in found.sides.items():
        lines.append([(f"{name} ", "accent"), (cut(clean(", ".join(side.source)), width - 2), "dim")])
    return Sheet(lines, [("Verdict", "strong")])


def configuration_sheet(found: Comparison, width: int) -> Sheet:
    rows = found.differences
    title: Line = [("Configuration", "strong"), (f"  {len(rows)} {'differs' if len(rows) == 1 else 'differ'}", "dim")]
    if not rows:
        return Sheet([[(cut(configuration(found).note, width), "faint")]], title)
    name = min(max(len(row.name) for row in rows), 31, width // 2)
    half = min(max(len(row.a) for row in rows), (width - name - 4) // 2)
    lines: list[Line] = []
    for row in rows:
        rest = width - name - half - 4
        first, second = cut_apart(clean(row.a), clean(row.b), half, rest)
        line: list[tuple[str, Ink]] = [(left(clean(row.name), name), "dim"), ("  ", "dim")]
        line += [(left(first, half), "text"), ("  ", "dim"), (second, "text")]
        room = rest - len(second) - 3
        if row.note and room > 12:
            line += [("   ", "dim"), (cut(row.note, room), "faint")]
        lines.append(line)
    return Sheet(lines, title)


class PairsPanel(PickPanel):
    """One line per pair; the picked one is highlighted."""

    OF = attrgetter("picked", "order")

    def __init__(self, comparison: Comparison, id: str | None = None) -> None:
        super().__init__(id=id)
        self._comparison = comparison

    def draw(self, look: Look, width: int, height: int) -> Sheet:
        pairs = self._comparison.pairs
        parted = sum(not pair.same for pair in pairs)
        about: Line = [(f"{parted} {'parts' if parted == 1 else 'part'}", "dim")]
        name = min(max((7, *(len(pair.id_a) for pair in pairs))), 14)
        columns: list[ListColumn[Pair]] = [
            ListColumn("request", name, lambda pair: (pair.id_a, "text"), lambda pair: pair.id_a),
            ListColumn(
                *("tokens", NUMBER if width >= 100 else 0, lambda pair: (f"{pair.tokens[0]:,}", "dim")),
                *(lambda pair: pair.tokens[0], True),
            ),
            ListColumn("τ A", TAU, lambda pair: (figure(pair.tau[0]), "text"), lambda pair: pair.tau[0], True),
            ListColumn("τ B", TAU, lambda pair: (figure(pair.tau[1]), "text"), lambda pair: pair.tau[1], True),
            ListColumn("change", NUMBER, _change_cell, _change, True),
            ListColumn(
                "parts at", 8, lambda pair: (NOTHING if (at := _at(pair)) is None else f"{at:,}", "text"), _at, True
            ),
            ListColumn("cause", 10, _cause, lambda pair: None if pair.parting is None else pair.parting.cause.value),
            ListColumn("prompt", -1, lambda pair: (pair.title, "dim")),
        ]
        text = lambda pair: f"{pair.id_a} {pair.id_b} {_cause(pair)[0]} {pair.title}"  # noqa: E731
        sheet = self.table("Pairs", pairs, columns, text, width, (2, about))
        if pairs:
            return sheet
        return Sheet(paragraph(self._comparison.unpaired, width, "faint"), sheet.title)


def _change(pair: Pair) -> float | None:
    a, b = pair.tau
    return None if a is None or b is None else b - a


def _change_cell(pair: Pair) -> tuple[str, Ink]:
    change = _change(pair)
    ink: Ink = "dim" if not change else "accepted" if change > 0 else "rejected"
    return NOTHING if change is None else f"{change:+.2f}", ink


def _at(pair: Pair) -> int | None:
    return None if pair.parting is None else pair.parting.position


def _cause(pair: Pair) -> tuple[str, Ink]:
    if pair.parting is None:
        return "same text", "accepted" if pair.first is None else "dim"
    return pair.parting.cause.value, "dim" if pair.parting.cause.harmless else "rejected"


class CompareScreen(Over, inherit_bindings=False):
    """Enter opens the picked pair where it parts."""

    SCOPED_CSS = False  # the classes of size are on the screen itself
    DEFAULT_CSS = """
    #of-compare { height: 1fr; layout: grid; grid-size: 1; grid-rows: 8 5 1fr; }
    .-tall #of-compare { grid-rows: 8 7 1fr; }
    .-wide #of-compare { grid-size: 2; grid-columns: 1fr 1fr; grid-rows: 11 1fr; }
    .-wide #pairs { column-span: 2; }
    """
    FIRST = PairsPanel
    KEYS = (
        *ALONE,
        Key("enter", "screen.go", "Open", "⏎", "open", 0, help="open the pair where its outputs part"),
        Key("n", "screen.next(1)", "Next parting", "n", "next parting", 1, help="next pair that parts"),
        Key("N,upper_n", "screen.next(-1)", "Previous parting", "N", "previous", 5, help="previous pair that parts"),
        *foot(filter=2, sort=3, reverse=6, theme=7, help=4, quit=8),
    )

    def __init__(self, look: Look, compared: Compared) -> None:
        super().__init__(look)
        self._compared = compared

    def parts(self) -> ComposeResult:
        with Container(id="of-compare"):
            yield FixedPanel(partial(verdict_sheet, self._compared.comparison), "verdict")
            yield FixedPanel(partial(configuration_sheet, self._compared.comparison), "configuration")
            yield PairsPanel(self._compared.comparison, "pairs")

    def action_next(self, way: int) -> Beside | None:
        """Pick the next pair that parts, as they are listed, in a ring; None where there is none."""
        panel = self.query_one(PairsPanel)
        moved = panel.pick_next(way, lambda pair: not pair.same)
        if moved is None or panel.item is None:
            self.notify("no pair parts")
            return None
        if not moved:
            self.notify("this is the only pair that parts")
        elif (moved > 0) != (way > 0):
            later, first = ("later", "first") if way > 0 else ("earlier", "last")
            self.notify(f"no {later} pair parts: wrapped around to the {first}")
        return self._compared.beside(panel.item)

    def action_go(self) -> None:
        """Open the picked pair; there, its neighbours are picked here."""
        pair = self.query_one(PairsPanel).item
        if pair is not None:
            self.app.push_screen(BesideScreen(self.last, self._compared.beside(pair), self.action_next))
