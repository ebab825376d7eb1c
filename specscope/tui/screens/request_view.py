"""One request from first step to last: one line per step, the tree of the current one, the text by origin."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from operator import attrgetter

from rich.cells import cell_len
from textual import events
from textual.app import ComposeResult
from textual.containers import Container

from specscope.trace.history.wording import acceptance, ending, plural
from specscope.trace.record.records import FinalKind, RequestStep
from specscope.tui.keys import Key, foot, hidden
from specscope.tui.look import Look
from specscope.tui.screens.over import Over, close
from specscope.tui.text import LEVELS, Ink, Line, clean, cut, figure, fit, left, right, show_token, spread
from specscope.tui.widgets.lines import Goto, Sheet
from specscope.tui.widgets.listing import ListPanel, Order
from specscope.tui.widgets.output import OutputPanel, output_line
from specscope.tui.widgets.tree import TreePanel

DEEPEST = 8  # accepted tokens that have a mark each
NUMBER = 5
WIDEST = 3  # cells of a column of the curve
DEPTH, NODES = DEEPEST + 6, 6
HEADS = (
    ("step", right("step", NUMBER)),
    ("depth", left("depth", DEPTH)),
    ("nodes", left("nodes", NODES)),
    ("tokens", left("tokens", 8)),
)


def _curve(steps: Sequence[RequestStep], place: int, width: int) -> Line:
    """A column per step: the tokens it emitted, that of `place` in another colour. With more steps than cells, only
    those around it.
    """
    count = min(len(steps), width)
    first = max(0, min(place - width // 2, len(steps) - width))
    shown = steps[first : first + count]
    top = max(1, *(step.emitted for step in shown))
    line: list[tuple[str, Ink]] = []
    for number, (step, wide) in enumerate(zip(shown, spread(count, min(width, count * WIDEST)), strict=True), first):
        mark = LEVELS[max(1, round(step.emitted / top * 8)) if step.emitted else 0]
        line.append((mark.replace(" ", "▁") * wide, "accent") if number == place else (mark * wide, "bar"))
    return line


class TimelinePanel(ListPanel):
    """A line a step: how much of its tree was accepted, how it ended, what came out. The band is on the position's."""

    OF = attrgetter("look.current", "look.at", "length", "order")

    BINDINGS = hidden(up="pick(-1)", down="pick(1)", enter="app.step")
    sorts = tuple(name for name, _ in HEADS)

    def __init__(self, id: str | None = None) -> None:
        super().__init__(id=id)
        self._source: Hashable = None  # the request, width and colours that the lines are of
        self._drawn: list[Line] = []
        self.places: Sequence[int] = ()  # of the listed steps among the request's

    @property
    def length(self) -> object:
        """How many steps the request has, and its state."""
        request = None if self.look is None else self.look.request
        return None if request is None else (len(request.steps), request.state)

    def draw(self, look: Look, width: int, height: int) -> Sheet:
        """Head, curve, and every step; those after the position are there already where they are known."""
        request = look.request
        if request is None or not request.steps:
            return Sheet([[("no steps of a request yet", "faint")]], [("Request", "strong")])
        source = (look.current, width, id(look.history), look.history.rewinds, id(request))
        if source != self._source or len(self._drawn) > len(request.steps):
            self._source, self._drawn = source, []
        self._drawn += [_line(look, step, width) for step in request.steps[len(self._drawn) :]]
        self.places = range(len(request.steps))
        if self.order != Order():
            steps = request.steps
            text = lambda index: _words(look, steps[index])  # noqa: E731
            self.places = self.arranged(self.places, lambda index, column: _value(steps[index], column), text)
        place = look.part[0] if look.part is not None else -1
        head: list[Line] = [_curve(request.steps, place, width), self.head(HEADS)]
        title = _title(look, len(request.steps), width - 2, self.said())
        index = self.places.index(place) + len(head) if place in self.places else -1
        lines = self._drawn if isinstance(self.places, range) else [self._drawn[index] for index in self.places]
        return Sheet([*head, *lines], title, cursor=index, keep=self.kept(index, (look.current, place)), head=len(head))

    def on_click(self, event: events.Click) -> None:
        y = event.get_content_offset_capture(self).y
        row = self.line_at(y) - self.sheet.head
        if self.look is not None and self.look.request is not None and y >= self.sheet.head and row < len(self.places):
            self._to(self.look.request.engine_steps[self.places[row]])

    def _to(self, position: int) -> None:
        self.post_message(Goto(position))

    def action_pick(self, way: int) -> None:
        look = self.look
        if look is None or look.request is None or not self.places:
            return
        place = look.part[0] if look.part is not None else -1
        index = self.places.index(place) + way if place in self.places else 0
        self._to(look.request.engine_steps[self.places[min(max(index, 0), len(self.places) - 1)]])


def _value(step: RequestStep, column: str) -> float | str:
    """What a step is sorted by."""
    accepted = -1 if step.verdict is None else step.verdict.accepted
    values = {"step": step.index, "depth": accepted, "nodes": len(step.tree), "tokens": step.emitted}
    return values[column]


def _words(look: Look, step: RequestStep) -> str:
    """The text that a filter searches: the kind of the final token, and the step's text."""
    if step.verdict is None:
        return "prefill"
    forced = " forced" if len(step.verdict.forced) else ""
    shown = "".join(show_token(look.vocabulary, token) for token in step.output())
    return f"{step.verdict.kind.value}{forced} {shown} {shown.replace('␣', ' ')}"


def _title(look: Look, steps: int, width: int, words: Line) -> Line:
    """Name, state, figures; how to leave."""
    request = look.request
    assert request is not None
    figures = request.acceptance
    parts: list[tuple[int, Line]] = [
        (0, [("Request ", "strong"), (clean(request.id), "strong")]),
        (2, [(request.state if request.end is None else ending(request.end.reason), "dim")]),
        (1, [("τ ", "dim"), (figure(figures.tau), "text")]),
        (3, [(plural(steps, "step"), "dim")]),
        (1, words),
    ]
    return fit(parts, width, " · ")


def _line(look: Look, step: RequestStep, width: int) -> Line:
    """`   17  ▮▮▮▯▯ 3/5   3/9  text`."""
    line: list[tuple[str, Ink]] = [(right(f"{step.index:,}", NUMBER) + "  ", "dim")]
    verdict = step.verdict
    if verdict is None:
        lead = NUMBER + 2 + DEPTH + NODES + 4
        return [*line, (left("", DEPTH + NODES + 4), "faint"), (cut(acceptance(step), max(width - lead, 0)), "dim")]
    depth, accepted = step.tree.max_depth, verdict.accepted
    if depth:
        full, empty = min(accepted, DEEPEST), min(depth, DEEPEST) - min(accepted, DEEPEST)
        failed = min(empty, 1 if verdict.kind is FinalKind.RECOVERED else 0)
        line += [("▮" * full, "accepted-strong"), ("▯" * failed, "rejected"), ("▯" * (empty - failed), "faint")]
        line.append((left(f"{'' if depth <= DEEPEST else '…'} {accepted}/{depth}", DEPTH - full - empty), "dim"))
        line.append(("  " + left(f"{accepted}/{len(step.tree)}", NODES + 2), "dim"))
    else:
        line.append((left("–", DEPTH + NODES + 4), "faint"))
    room = width - sum(cell_len(text) for text, _ in line)
    output, room = output_line(step, look.vocabulary, room)
    forced: Line = [(cut("  forced", room), "warn")] if len(verdict.forced) else []
    return [*line, *output, *forced]


class RequestScreen(Over):
    FIRST = TimelinePanel
    KEYS = (
        Key("", "focused.pick(1)", "", "↑↓", "step", 0),
        Key("d", "app.step", "The step's decisions", "⏎", "decisions", 1),
        *foot(rejection=3, filter=4, sort=5, requests=6, debug=7, copy=8, help=9),
        close(2, "escape,q,r"),
    )

    def parts(self) -> ComposeResult:
        with Container(id="of-request"):
            yield TimelinePanel("timeline")
            yield TreePanel("its-tree")
            yield OutputPanel("its-output")
