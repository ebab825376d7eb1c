"""A fork beside its original: step by step, the first difference marked, the trees of the picked step."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import ClassVar

from rich.cells import cell_len
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Container

from specscope.debug.forked import Forked
from specscope.trace.history.wording import acceptance
from specscope.trace.record.records import RequestStep
from specscope.trace.record.vocabulary import Vocabulary
from specscope.tui.look import Look
from specscope.tui.screens.over import Hint, Over
from specscope.tui.text import Ink, Line, clean, cut, figure, fit, left, paragraph, right, show_token
from specscope.tui.widgets.decision import why_lines
from specscope.tui.widgets.lines import Panel, Sheet
from specscope.tui.widgets.output import INKS
from specscope.tui.widgets.tree_lines import tree_lines

NUMBER, DEPTH = 4, 7
NAMES = ("original", "fork")


class ForkPanel(Panel):
    """One line per step of either side; the picked one is highlighted."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up", "screen.pick(-1)", "Step above", show=False),
        Binding("down", "screen.pick(1)", "Step below", show=False),
    ]

    def __init__(self, forked: Forked, id: str | None = None) -> None:
        super().__init__(id=id)
        self.forked = forked
        last = max(len(forked.original), len(forked.fork)) - 1
        self.picked = max(min(forked.parting(forked.original), forked.parting(forked.fork), last), 0)

    def key(self, look: Look) -> Hashable:
        """What is picked."""
        return self.picked

    def draw(self, look: Look, width: int, height: int) -> Sheet:
        """Figures, heads, and the steps."""
        forked, half = self.forked, (width - NUMBER - 3) // 2
        partings = [forked.parting(side) for side in (forked.original, forked.fork)]
        heads = [left("depth", DEPTH) + name for name in NAMES]
        lines: list[Line] = [
            *paragraph(forked.changes, width, "accent")[:2],
            *paragraph(forked.difference(look.vocabulary), width, "warn" if forked.differ else "text")[:2],
            [(right("step", NUMBER) + "  " + left(heads[0], half + 1) + heads[1], "faint")],
        ]
        head = len(lines)
        for row in range(max(len(forked.original), len(forked.fork))):
            line: list[tuple[str, Ink]] = [(right(str(forked.index + row), NUMBER), "dim")]
            for side, parting in zip((forked.original, forked.fork), partings, strict=True):
                line += [("»" if row == parting else " ", "warn"), (" ", "text")]
                line += (
                    step_cell(look.vocabulary, side[row], half - 1) if row < len(side) else [(" " * (half - 1), "text")]
                )
            lines.append(line)
        return Sheet(lines, _title(forked, width - 2), cursor=self.picked + head, keep=self.picked + head, head=head)


def _title(forked: Forked, width: int) -> Line:
    """What was forked from what, and how acceptance changed."""
    a, b = (figures.tau for figures in forked.figures)
    gained = "" if forked.gained is None else f" ({forked.gained:+.2f})"
    ink: Ink = "text" if not forked.gained else "accepted" if forked.gained > 0 else "rejected"
    parts: list[tuple[int, Line]] = [
        (0, [("Fork of ", "strong"), (f"{clean(forked.request)}@{forked.index}", "strong")]),
        (1, [("τ ", "dim"), (f"{figure(a)} → {figure(b)}", "text"), (gained, ink)]),
        (2, [("not lossless" if forked.forced else "", "warn")]),
    ]
    return fit(parts, width, " · ")


def step_cell(vocabulary: Vocabulary, step: RequestStep, width: int) -> list[tuple[str, Ink]]:
    """`2/5 text` in exactly `width` cells."""
    verdict = step.verdict
    depth = "" if verdict is None or not len(step.tree) else f"{verdict.accepted}/{step.tree.max_depth}"
    line: list[tuple[str, Ink]] = [(left(depth, DEPTH), "dim")]
    room = width - DEPTH
    for token, origin in zip(step.output(), () if verdict is None else verdict.origins(), strict=False):
        text = cut(show_token(vocabulary, token), room)
        line.append((text, INKS[origin]))
        room -= cell_len(text)
    return [*line, (" " * max(room, 0), "text")]


class SidePanel(Panel):
    """The judged tree of one side's picked step."""

    def __init__(self, table: ForkPanel, side: int, id: str | None = None) -> None:
        super().__init__(id=id)
        self._table, self._side = table, side

    @property
    def _steps(self) -> Sequence[RequestStep]:
        return self._table.forked.fork if self._side else self._table.forked.original

    def key(self, look: Look) -> Hashable:
        """What is picked."""
        return self._table.picked

    def draw(self, look: Look, width: int, height: int) -> Sheet:
        """The tree, or why there is none."""
        name, picked = NAMES[self._side], self._table.picked
        if picked >= len(self._steps):
            return Sheet([[("this side has ended", "faint")]], [(name, "strong")])
        step = self._steps[picked]
        if step.verdict is None:
            return Sheet([[("a prefill: nothing was judged", "faint")]], [(name, "strong")])
        head, lines, order = tree_lines(step, step.verdict, look.vocabulary, width, look.history.near_ties(step))
        summary: Line = [(acceptance(step, short=True), "text")]
        forced: Line = [("forced" if len(step.verdict.forced) else "", "warn")]
        title = fit([(0, [(name, "strong")]), (1, summary), (2, forced)], width - 2, " · ")
        why = why_lines(step, step.verdict, look.vocabulary, width, height - len(lines) - 1)
        return Sheet([head, *lines, *why], title, keep=order.index(len(step.tree)) + 1, head=1)


class ForkScreen(Over):
    """The table above, both trees below."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("f", "dismiss", "Close", show=False)]
    HINTS = (
        Hint(0, "↑↓", "step", "screen.pick(1)"),
        Hint(2, ":", "debug", "app.console"),
        Hint(3, "?", "help", "app.help"),
        Hint(1, "Esc", "close", "screen.dismiss"),
    )

    def __init__(self, look: Look, forked: Forked) -> None:
        super().__init__(look)
        self._forked = forked

    def parts(self) -> ComposeResult:
        """Three panels."""
        table = ForkPanel(self._forked, "fork")
        with Container(id="of-fork"):
            yield table
            yield SidePanel(table, 0, "fork-original")
            yield SidePanel(table, 1, "fork-changed")

    def on_mount(self) -> None:
        """Arrows pick a step."""
        super().on_mount()
        self.query_one(ForkPanel).focus()

    def action_pick(self, way: int) -> None:
        """Pick another step."""
        table = self.query_one(ForkPanel)
        last = max(len(self._forked.original), len(self._forked.fork)) - 1
        table.picked = min(max(table.picked + way, 0), last)
        self.show(self.last)
