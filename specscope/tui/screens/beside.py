"""Two runs of a request beside each other, a fork and its original or a compared pair: the steps of both in the order
of the output, and both trees at the picked place."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from operator import attrgetter

from textual.app import ComposeResult
from textual.containers import Container

from specscope.debug.forked import Forked
from specscope.trace.history.place import brief, ended_by
from specscope.trace.history.wording import acceptance
from specscope.trace.record.records import RequestStep
from specscope.trace.record.vocabulary import Vocabulary
from specscope.tui.keys import Key, foot, hidden, of_app
from specscope.tui.look import Look
from specscope.tui.screens.over import Over, close
from specscope.tui.text import Ink, Line, clean, figure, fit, left, paragraph, right
from specscope.tui.widgets.decision import why_lines
from specscope.tui.widgets.lines import Panel, Sheet
from specscope.tui.widgets.listing import ItemPicked
from specscope.tui.widgets.output import output_line
from specscope.tui.widgets.tree_lines import tree_lines

PLACE, STEP, DEPTH = 6, 5, 7
SAID = 2  # lines of a sentence, at most


@dataclass(frozen=True)
class Beside:
    """Both runs, laid out by place in the output: steps do not line up where acceptance differs."""

    names: tuple[str, str]
    title: tuple[tuple[int, Line], ...]
    said: tuple[tuple[str, Ink], ...]  # where and why they part, a sentence each
    sides: tuple[Sequence[RequestStep], Sequence[RequestStep]]
    numbers: tuple[Sequence[int], Sequence[int]]  # of their steps
    at: int | None  # output tokens before they part; None where the outputs are the same
    other: int | None  # output tokens before the first decision that differs; None where none does before they part
    vocabularies: tuple[Vocabulary, Vocabulary]
    dtypes: tuple[str, str]

    @cached_property
    def places(self) -> tuple[list[int], list[int]]:
        first, second = ([0, *accumulate(step.emitted for step in side)][:-1] for side in self.sides)
        return first, second

    @cached_property
    def rows(self) -> list[int]:
        """The places in the output at which a step of either side begins: tokens before it."""
        return sorted({*self.places[0], *self.places[1]})

    def part(self, side: int, place: int) -> int | None:
        """The step of a side that covers a place in the output."""
        index = bisect_right(self.places[side], place) - 1
        return index if index >= 0 else None

    def row_of(self, place: int) -> int:
        return max(bisect_right(self.rows, place) - 1, 0)


def fork_beside(forked: Forked, vocabulary: Vocabulary) -> Beside:
    a, b = (figures.tau for figures in forked.figures)
    gained = "" if forked.gained is None else f" ({forked.gained:+.2f})"
    ink: Ink = "text" if not forked.gained else "accepted" if forked.gained > 0 else "rejected"
    return Beside(
        names=("original", "fork"),
        title=(
            (0, [("Fork of ", "strong"), (f"{clean(forked.request)}@{forked.index}", "strong")]),
            (1, [("τ ", "dim"), (f"{figure(a)} → {figure(b)}", "text"), (gained, ink)]),
            (2, [("not lossless" if forked.forced else "", "warn")]),
        ),
        said=((forked.changes, "accent"), (forked.difference(vocabulary), "warn" if forked.differ else "text")),
        sides=(forked.original, forked.fork),
        numbers=tuple(range(forked.index, forked.index + len(side)) for side in (forked.original, forked.fork)),  # type: ignore[arg-type]
        at=forked.same if forked.differ else None,
        other=None,
        vocabularies=(vocabulary, vocabulary),
        dtypes=(forked.dtype, forked.dtype),
    )


class PlacesPanel(Panel):
    """A line for each place in the output at which a step of either side begins; the band is on the picked one."""

    OF = attrgetter("beside.title", "picked")
    BINDINGS = hidden(up="pick(-1)", down="pick(1)", pageup="pick(-10)", pagedown="pick(10)")

    def __init__(self, beside: Beside, id: str | None = None) -> None:
        super().__init__(id=id)
        self.put_beside(beside)

    def put_beside(self, beside: Beside) -> None:
        self.beside = beside
        first = beside.at if beside.at is not None else beside.other
        self.picked = 0 if first is None else beside.row_of(first)

    @property
    def place(self) -> int:
        """Output tokens before the picked row."""
        rows = self.beside.rows
        return rows[self.picked] if rows else 0

    def action_pick(self, way: int) -> None:
        self.picked = min(max(self.picked + way, 0), max(len(self.beside.rows) - 1, 0))
        self.post_message(ItemPicked())

    def draw(self, look: Look, width: int, height: int) -> Sheet:
        """The steps of both, and a mark where they part."""
        beside, half = self.beside, (width - PLACE - 3) // 2
        heads = [left(right("step", STEP) + "  " + left("depth", DEPTH) + name, half) for name in beside.names]
        lines = [line for text, ink in beside.said for line in paragraph(text, width, ink)[:SAID]]
        lines.append([(right("token", PLACE) + "  " + heads[0] + " " + heads[1], "faint")])
        head = len(lines)
        for place in beside.rows:
            parted = beside.at is not None and place > beside.at
            line: list[tuple[str, Ink]] = [(right(f"{place:,}", PLACE), "faint" if parted else "dim")]
            for side, places in enumerate(beside.places):
                index = beside.part(side, place)
                begun = index if index is not None and places[index] == place else None
                parts = begun is not None and beside.at is not None and beside.part(side, beside.at) == begun
                line.append((" »" if parts else "  ", "warn"))
                line += _cell(beside, side, begun, half - 1)
            lines.append(line)
        title = fit(beside.title, width - 2, " · ")
        return Sheet(lines, title, cursor=head + self.picked, keep=head + self.picked, head=head)


def _cell(beside: Beside, side: int, index: int | None, width: int) -> list[tuple[str, Ink]]:
    """`17  2/5 text` of a step in exactly `width` cells."""
    if index is None:
        return [(" " * width, "text")]
    step, vocabulary = beside.sides[side][index], beside.vocabularies[side]
    verdict, room = step.verdict, width - STEP - 1 - DEPTH
    depth = "" if verdict is None or not len(step.tree) else f"{verdict.accepted}/{step.tree.max_depth}"
    line: list[tuple[str, Ink]] = [(right(str(beside.numbers[side][index]), STEP - 1) + "  ", "faint")]
    line.append((left(depth, DEPTH), "dim"))
    output, room = output_line(step, vocabulary, room)
    return [*line, *output, (" " * room, "text")]


class TreePanelOf(Panel):
    """The judged tree of one side at the picked place."""

    OF = attrgetter("_places.beside.title", "_places.picked")

    def __init__(self, places: PlacesPanel, side: int, id: str | None = None) -> None:
        super().__init__(id=id)
        self._places, self._side = places, side

    def draw(self, look: Look, width: int, height: int) -> Sheet:
        beside, side, place = self._places.beside, self._side, self._places.place
        index, vocabulary = beside.part(side, place), beside.vocabularies[side]
        name: Line = [(beside.names[side], "strong")]
        step = None if index is None else beside.sides[side][index]
        if index is None or step is None or step.verdict is None:
            return Sheet([[("this side has no step here", "faint")]], name)
        head, lines, order = tree_lines(
            step, step.verdict, vocabulary, width, step.verdict.near_ties(beside.dtypes[side])
        )
        over = index == len(beside.sides[side]) - 1 and place >= beside.places[side][index] + step.emitted
        parts: list[tuple[int, Line]] = [
            (0, name),
            (1, [(clean(f"{step.request}@{beside.numbers[side][index]}"), "dim")]),
            (2, [(acceptance(step, short=True), "text")]),
            (3, [("the output has ended" if over else "forced" if len(step.verdict.forced) else "", "warn")]),
        ]
        answer = paragraph(brief(step, ended_by(step), vocabulary), width, "strong")
        why = why_lines(step, step.verdict, vocabulary, width, height - len(lines) - len(answer) - 1)
        final, above = order.index(len(step.tree)), len(answer) + 1
        return Sheet([*answer, head, *lines, *why], fit(parts, width - 2, " · "), keep=final + above, head=above)


class BesideScreen(Over):
    """The places above, both trees below. `another` gives the next pair that parts, or the one before."""

    SCOPED_CSS = False  # the classes of size are on the screen itself
    DEFAULT_CSS = """
    #of-beside { height: 1fr; layout: grid; grid-size: 2; grid-rows: 2fr 3fr; }
    #places { column-span: 2; }
    """
    FIRST = PlacesPanel
    KEYS = (
        Key("", "focused.pick(1)", "", "↑↓", "place", 0, help="pick a place in the output; the trees follow"),
        Key("n", "screen.other(1)", "Next parting", "n", "next parting", 1, help="next pair that parts"),
        Key("N,upper_n", "screen.other(-1)", "Previous parting", "N", "previous", 5, help="previous pair that parts"),
        Key("p", "screen.jump(True)", "Where they part", "p", "parting", 3, help="go to where the outputs part"),
        Key("d", "screen.jump(False)", "First other decision", "d", "first other decision", 4),
        close(2, "escape,q,f"),
        *foot(help=6),
        *of_app("next_theme"),
    )

    def __init__(self, look: Look, beside: Beside, another: Callable[[int], Beside | None] | None = None) -> None:
        super().__init__(look)
        self._beside, self._another = beside, another

    @property
    def at_foot(self) -> Iterable[Key]:
        """Of a fork, without those for other pairs and for decisions, which it is not compared by."""
        pairs = ("screen.other(1)", "screen.other(-1)", "screen.jump(False)")
        return [key for key in self.KEYS if self._another is not None or key.action not in pairs]

    def parts(self) -> ComposeResult:
        places = PlacesPanel(self._beside, "places")
        with Container(id="of-beside"):
            yield places
            yield TreePanelOf(places, 0, "tree-a")
            yield TreePanelOf(places, 1, "tree-b")

    def action_other(self, way: int) -> None:
        if self._another is None:
            self.notify("this is the last fork: there is no other pair")
        elif (beside := self._another(way)) is not None:
            self.query_one(PlacesPanel).put_beside(beside)
            self.show(self.last)

    def action_jump(self, parting: bool) -> None:
        """Where the outputs part, or the first decision that differs."""
        places = self.query_one(PlacesPanel)
        parting = parting or self._another is None
        to = places.beside.at if parting else places.beside.other
        if to is None:
            self.notify("the outputs are the same" if parting else "no decision differs before that")
            return
        places.picked = places.beside.row_of(to)
        self.show(self.last)
