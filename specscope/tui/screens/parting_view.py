"""A pair of requests side by side: step by step in the order of the output, and both trees at the picked place."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Container

from specscope.trace.history.place import brief, ended_by
from specscope.trace.history.wording import acceptance
from specscope.trace.record.records import RequestStep
from specscope.tui.compared import Beside, Compared, ComparedPair
from specscope.tui.look import Look
from specscope.tui.screens.fork_view import DEPTH, step_cell
from specscope.tui.screens.over import Hint, Over, keys_of
from specscope.tui.text import Ink, Line, clean, cut, figure, fit, left, paragraph, right
from specscope.tui.widgets.decision import why_lines
from specscope.tui.widgets.lines import Panel, Sheet
from specscope.tui.widgets.tree_lines import tree_lines

PLACE, STEP = 6, 5
NAMES = ("A", "B")


class PlacesPanel(Panel):
    """A line for each place in the output at which a step of either side begins; the band is on the picked one."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up", "screen.pick(-1)", "Above", show=False),
        Binding("down", "screen.pick(1)", "Below", show=False),
        Binding("pageup", "screen.pick(-10)", "Far above", show=False),
        Binding("pagedown", "screen.pick(10)", "Far below", show=False),
    ]

    def __init__(self, compared: Compared, pair: ComparedPair, id: str | None = None) -> None:
        super().__init__(id=id)
        self.compared = compared
        self.put_pair(pair)

    def put_pair(self, pair: ComparedPair) -> None:
        """Show this pair, where it parts."""
        self.pair = pair
        self.beside = Beside(*self.compared.steps(pair))
        first = pair.at if pair.at is not None else pair.other
        self.picked = 0 if first is None else self.beside.row_of(first)

    @property
    def place(self) -> int:
        """Output tokens before the picked row."""
        rows = self.beside.rows
        return rows[self.picked].place if rows else 0

    def key(self, look: Look) -> Hashable:
        """The pair, and the picked place."""
        return self.pair.number, self.picked

    def draw(self, look: Look, width: int, height: int) -> Sheet:
        """The steps of both, and a mark where they part."""
        half = (width - PLACE - 3) // 2
        heads = [left(right("step", STEP) + "  " + left("depth", DEPTH) + name, half) for name in NAMES]
        why: Ink = "dim" if self.pair.at is None else "warn"
        lines: list[Line] = [[(cut(said(self.pair), width), why)]]
        lines.append([(right("token", PLACE) + "  " + heads[0] + " " + heads[1], "faint")])
        for row in self.beside.rows:
            parted = self.pair.at is not None and row.place > self.pair.at
            line: list[tuple[str, Ink]] = [(right(f"{row.place:,}", PLACE), "faint" if parted else "dim")]
            for side, steps in enumerate((self.beside.a, self.beside.b)):
                index = row.parts[side]
                line.append((" »" if self._parts(side, index) else "  ", "warn"))
                line += self._cell(side, None if index is None else steps[index], half - 1)
            lines.append(line)
        return Sheet(lines, self._title(width - 2), cursor=2 + self.picked, keep=2 + self.picked, head=2)

    def _parts(self, side: int, index: int | None) -> bool:
        """Whether the step that begins there is the one in which the outputs part."""
        return index is not None and self.pair.at is not None and self.beside.part(side, self.pair.at) == index

    def _cell(self, side: int, step: RequestStep | None, width: int) -> list[tuple[str, Ink]]:
        if step is None:
            return [(" " * width, "text")]
        number: tuple[str, Ink] = (right(str(step.index), STEP - 1) + "  ", "faint")
        return [number, *step_cell(self.compared.vocabularies[side], step, width - STEP - 1)]

    def _title(self, width: int) -> Line:
        pair = self.pair
        names = pair.a if pair.a == pair.b else f"{pair.a} / {pair.b}"
        tau: Line = [("τ ", "dim"), (f"{figure(pair.tau[0])} → {figure(pair.tau[1])}", "text")]
        parts: list[tuple[int, Line]] = [(0, [(clean(names), "strong")]), (1, tau), (2, [(clean(pair.title), "dim")])]
        return fit(parts, width, " · ")


def said(pair: ComparedPair) -> str:
    """Where and why they part, in a sentence."""
    if pair.at is None:
        same = "the same output"
        return same if pair.other is None else f"{same}; the first other decision is at token {pair.other:,}"
    before = "" if pair.other is None else f"; the first other decision is at token {pair.other:,}"
    return f"the outputs part at token {pair.at:,}: {pair.about}{before}"


class TreePanelOf(Panel):
    """The judged tree of one side at the picked place."""

    def __init__(self, places: PlacesPanel, side: int, id: str | None = None) -> None:
        super().__init__(id=id)
        self._places, self._side = places, side

    def key(self, look: Look) -> Hashable:
        """The pair, and the picked place."""
        return self._places.pair.number, self._places.picked

    def draw(self, look: Look, width: int, height: int) -> Sheet:
        """The tree, and below it the decisions that ended its path."""
        places, side = self._places, self._side
        steps = (places.beside.a, places.beside.b)[side]
        index = places.beside.part(side, places.place)
        name: Line = [(NAMES[side], "strong")]
        if index is None or steps[index].verdict is None:
            return Sheet([[("this side has no step here", "faint")]], name)
        step = steps[index]
        verdict = step.verdict
        assert verdict is not None
        compared = places.compared
        ties = verdict.near_ties(compared.dtypes[side])
        head, lines, order = tree_lines(step, verdict, compared.vocabularies[side], width, ties)
        summary: Line = [(acceptance(step, short=True), "text")]
        where: Line = [(clean(f"{step.request}@{step.index}"), "dim")]
        ended: Line = [("the output has ended" if index == len(steps) - 1 and self._over(index) else "", "warn")]
        title = fit([(0, name), (1, where), (2, summary), (3, ended)], width - 2, " · ")
        answer = paragraph(brief(step, ended_by(step), compared.vocabularies[side]), width, "strong")
        why = why_lines(step, verdict, compared.vocabularies[side], width, height - len(lines) - len(answer) - 1)
        final = order.index(len(step.tree))
        return Sheet([*answer, head, *lines, *why], title, keep=final + len(answer) + 1, head=len(answer) + 1)

    def _over(self, index: int) -> bool:
        """Whether the picked place lies behind the last token of the side."""
        beside = self._places.beside
        step = (beside.a, beside.b)[self._side][index]
        return self._places.place >= beside.places[self._side][index] + step.emitted


class PartingScreen(Over, inherit_bindings=False):
    """The places above, both trees below."""

    SCOPED_CSS = False  # the classes of size are on the screen itself
    DEFAULT_CSS = """
    #of-parting { height: 1fr; layout: grid; grid-size: 2; grid-rows: 2fr 3fr; }
    #places { column-span: 2; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,q", "dismiss", "Close", show=False),
        Binding("ctrl+c", "app.quit", "Quit", show=False),
        *keys_of("theme", "help"),
        Binding("n", "other(1)", "Next parting", show=False),
        Binding("N,upper_n", "other(-1)", "Previous parting", show=False),
        Binding("p", "jump(True)", "Where they part", show=False),
        Binding("d", "jump(False)", "First other decision", show=False),
        Binding("tab", "app.focus_next", "Next panel", show=False),
        Binding("shift+tab", "app.focus_previous", "Previous panel", show=False),
    ]
    HINTS = (
        Hint(0, "↑↓", "place", "screen.pick(1)"),
        Hint(1, "n", "next parting", "screen.other(1)"),
        Hint(5, "N", "previous", "screen.other(-1)"),
        Hint(3, "p", "parting", "screen.jump(True)"),
        Hint(4, "d", "first other decision", "screen.jump(False)"),
        Hint(2, "Esc", "close", "screen.dismiss"),
        Hint(6, "?", "help", "app.help"),
    )

    def __init__(
        self, look: Look, compared: Compared, pair: ComparedPair, other: Callable[[int], ComparedPair | None]
    ) -> None:
        super().__init__(look)
        self._compared, self._pair, self._next = compared, pair, other

    def parts(self) -> ComposeResult:
        """Three panels."""
        places = PlacesPanel(self._compared, self._pair, "places")
        with Container(id="of-parting"):
            yield places
            yield TreePanelOf(places, 0, "tree-a")
            yield TreePanelOf(places, 1, "tree-b")

    def on_mount(self) -> None:
        """Arrows pick a place."""
        super().on_mount()
        self._places.focus()

    @property
    def _places(self) -> PlacesPanel:
        return self.query_one(PlacesPanel)

    def action_pick(self, way: int) -> None:
        """Pick another place."""
        places = self._places
        places.picked = min(max(places.picked + way, 0), max(len(places.beside.rows) - 1, 0))
        self.show(self.last)

    def action_other(self, way: int) -> None:
        """The next pair that parts, or the one before."""
        pair = self._next(way)
        if pair is not None:
            self._places.put_pair(pair)
            self.show(self.last)

    def action_jump(self, parting: bool) -> None:
        """Where the outputs part, or the first decision that differs."""
        places = self._places
        to = places.pair.at if parting else places.pair.other
        if to is None:
            self.notify("the outputs are the same" if parting else "no decision differs before that")
            return
        places.picked = places.beside.row_of(to)
        self.show(self.last)
