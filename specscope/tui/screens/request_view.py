"""One request from its first step to its last: a line a step, the tree of any of them, the text by origin."""

from __future__ import annotations

from collections.abc import Hashable
from typing import ClassVar

from rich.cells import cell_len
from textual import events
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Container

from specscope.trace.records import FinalKind, RequestStep
from specscope.trace.wording import plural
from specscope.tui.look import Look
from specscope.tui.screens.over import Over
from specscope.tui.text import LEVELS, Ink, Line, clean, cut, figure, fit, left, right, show_token
from specscope.tui.widgets.lines import Sheet
from specscope.tui.widgets.output import INKS, OutputPanel
from specscope.tui.widgets.panel import Panel
from specscope.tui.widgets.tree import TreePanel

DEEPEST = 8  # accepted tokens that have a mark each
NUMBER = 5


class TimelinePanel(Panel):
    """A line a step: how much of its tree was accepted, how it ended, what came out. The band is on the position's."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up", "app.request_step(-1)", "Its step before", show=False),
        Binding("down", "app.request_step(1)", "Its next step", show=False),
    ]

    def __init__(self, id: str | None = None) -> None:
        super().__init__(id=id)
        self._source: Hashable = None  # the request, width and colours that the lines are of
        self._drawn: list[Line] = []

    def key(self, look: Look) -> Hashable:
        """The request, where in it the position is, and how many steps it has."""
        request = look.request
        return look.chosen, look.at, 0 if request is None else (len(request.steps), request.state)

    def draw(self, look: Look, width: int, height: int) -> Sheet:
        """Head, curve, and every step; those after the position are there already where they are known."""
        request = look.request
        if request is None or not request.steps:
            return Sheet([[("no steps of a request yet", "faint")]], [("Request", "strong")])
        source = (look.chosen, width, id(look.history), look.history.rewinds, id(request))
        if source != self._source or len(self._drawn) > len(request.steps):
            self._source, self._drawn = source, []
        self._drawn += [_line(look, step, width) for step in request.steps[len(self._drawn) :]]
        place = look.part[0] if look.part is not None else -1
        head: list[Line] = [_curve(request.steps, place, width), [(_heads(), "faint")]]
        title = _title(look, len(request.steps), width - 2)
        at = place + len(head) if place >= 0 else -1
        return Sheet([*head, *self._drawn], title, cursor=at, keep=at, head=len(head))

    def on_click(self, event: events.Click) -> None:
        """Go to the step under the pointer."""
        at = self.line_at(event.get_content_offset_capture(self).y) - self.sheet.head
        if self.look is not None and self.look.request is not None and 0 <= at < len(self.look.request.steps):
            self.run_worker(self.app.run_action(f"goto_position({self.look.request.engine_steps[at]})"))


def _title(look: Look, steps: int, width: int) -> Line:
    """Name, state, figures; how to leave."""
    request = look.request
    assert request is not None
    figures = request.acceptance
    parts: list[tuple[int, Line]] = [
        (0, [("Request ", "strong"), (clean(request.id), "strong")]),
        (2, [(request.state, "dim")]),
        (1, [("τ ", "dim"), (figure(figures.tau), "text")]),
        (3, [(plural(steps, "step"), "dim")]),
        (4, [("Esc closes", "faint")]),
    ]
    return fit(parts, width, " · ")


def _heads() -> str:
    return right("step", NUMBER) + "  " + left("accepted", DEEPEST + 6) + "what came out"


def _curve(steps: list[RequestStep], place: int, width: int) -> Line:
    """A column a step: tokens that came of it. Around the position where there are more steps than columns."""
    start = max(0, min(place - width // 2, len(steps) - width))
    shown = steps[start : start + width]
    top = max(1, *(step.emitted for step in shown))
    marks = [LEVELS[max(1, round(step.emitted / top * 8)) if step.emitted else 0] for step in shown]
    at = place - start
    if not 0 <= at < len(marks):
        return [("".join(marks), "bar")]
    return [("".join(marks[:at]), "bar"), (marks[at].replace(" ", "▁"), "accent"), ("".join(marks[at + 1 :]), "bar")]


def _line(look: Look, step: RequestStep, width: int) -> Line:
    """`   17  ▮▮▮▯▯ 3/5   text`."""
    line: list[tuple[str, Ink]] = [(right(f"{step.index:,}", NUMBER) + "  ", "dim")]
    verdict = step.verdict
    if verdict is None:
        return [*line, (left("", DEEPEST + 6), "faint"), (f"prefill of {plural(step.prefill_tokens, 'token')}", "dim")]
    depth, accepted = step.tree.max_depth, verdict.accepted
    if depth:
        full, empty = min(accepted, DEEPEST), min(depth, DEEPEST) - min(accepted, DEEPEST)
        failed = min(empty, 1 if verdict.kind is FinalKind.RECOVERED else 0)
        line += [("▮" * full, "accepted-strong"), ("▯" * failed, "rejected"), ("▯" * (empty - failed), "faint")]
        line.append((left(f"{'' if depth <= DEEPEST else '…'} {accepted}/{depth}", DEEPEST + 6 - full - empty), "dim"))
    else:
        line.append((left("–", DEEPEST + 6), "faint"))
    room = width - NUMBER - 2 - DEEPEST - 6
    for token, origin in zip(step.output(), verdict.origins(), strict=False):
        text = cut(show_token(look.vocabulary, token), max(room, 0))
        line.append((text, INKS[origin]))
        room -= cell_len(text)
    if len(verdict.forced):
        line.append((cut("  forced", max(room, 0)), "warn"))
    return line


class RequestScreen(Over):
    """Timeline, tree and text of the chosen request."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("r", "dismiss", "Close", show=False)]

    def compose(self) -> ComposeResult:
        """The timeline has the keys."""
        with Container(id="of-request"):
            yield TimelinePanel("timeline")
            yield TreePanel("its-tree")
            yield OutputPanel("its-output")

    def on_mount(self) -> None:
        """Arrows move through the steps."""
        super().on_mount()
        self.query_one(TimelinePanel).focus()
