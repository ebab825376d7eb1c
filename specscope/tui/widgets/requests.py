"""The table of requests. Rows are drawn by need: sixty-four requests cost what the visible ones cost."""

from __future__ import annotations

from operator import attrgetter
from typing import ClassVar

from textual import events
from textual.binding import Binding, BindingType

from specscope.trace.words import RequestRow, request_row
from specscope.tui.look import Look
from specscope.tui.text import Ink, Line, clean, cut, figure, left, line_width, right
from specscope.tui.widgets.lines import Goto, Sheet
from specscope.tui.widgets.listing import ListPanel

STATE_INKS: dict[str, Ink] = {
    "running": "accepted",
    "prefill": "accent",
    "later": "faint",
    "preempted": "warn",
    "cancelled": "warn",
    "error": "rejected",
    "cancelling": "warn",
    "queued": "accent",
}


def _row(look: Look, name: str) -> RequestRow:
    """A request at the current position; `cancelling` where it was asked to end and no step has ended it yet."""
    row = request_row(look.history.requests[name], look.position, look.vocabulary)
    ended = look.history.requests[name].ended
    cancels = name in look.pending[1] and (ended is None or ended > look.position)
    return row._replace(state="cancelling") if cancels else row


class RequestsPanel(ListPanel):
    """Id, state, tokens, steps, tau, kind and prompt of each request; the current one is on the band.

    Prompts that a paused engine has been given stand below, until a step takes them in.
    """

    OF = attrgetter("look.position", "look.steps", "look.current", "look.pending", "order")

    COLUMNS: ClassVar[tuple[str, ...]] = ("name", "state", "tokens", "steps", "tau", "kind", "prompt")

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up", "app.choose(-1)", "Request above", show=False),
        Binding("down", "app.choose(1)", "Request below", show=False),
        Binding("enter", "app.open('request')", "The request over time", show=False),
    ]

    def __init__(self, id: str | None = None) -> None:
        super().__init__(id=id)
        self.names: list[str] = []  # the requests, as they are listed

    def draw(self, look: Look, width: int, height: int) -> Sheet:
        """A head where there is room for one, then a row a request."""
        every = [_row(look, name) for name in look.history.requests]
        rows = self.arranged(every, _value, lambda item: f"{item.name} {item.state} {item.kind} {item.prompt}")
        self.names = [item.name for item in rows]
        queued = [RequestRow("·", "queued", 0, 0, None, "", clean(" ".join(text.split()))) for text in look.pending[0]]
        count = f"  {len(rows)} of {len(every)}" if self.order.words else f"  {len(rows)}"
        gap: Line = [("  ", "dim")] if self.order.words else []
        title: Line = [("Requests", "strong"), (count, "dim"), *gap, *self.said()]
        if not every and not queued:
            return Sheet([[("no requests yet", "faint")]], title)
        head = 1 if height > 3 else 0
        columns = _columns([*every, *queued], width)
        cells = [(name, (right if name in NUMBERS else left)(HEADS.get(name, name), wide)) for name, wide in columns]
        lines: list[Line] = [self.head([("", ""), *cells])] if head else []
        if not head:  # no line to spare: the names of the figures stand in the title
            names = "  " + "  ".join(text if name in NUMBERS else " " * len(text) for name, text in cells)
            title = [*title, (names[line_width(title) :].rstrip(), "faint")]
        lines += [_line(item, columns, item.name == look.current) for item in [*rows, *queued]]
        current = self.names.index(look.current) + head if look.current in self.names else -1
        return Sheet(lines, title, cursor=current, keep=self.kept(current, look.current), head=head)

    def on_click(self, event: events.Click) -> None:
        """Choose the request under the pointer."""
        row = self.line_at(event.get_content_offset_capture(self).y) - self.sheet.head
        if 0 <= row < len(self.names):
            self.post_message(Goto(request=self.names[row]))


def _value(item: RequestRow, column: str) -> float | str:
    """What a row is sorted by; a request without drafts has the highest tau."""
    value: float | str | None = getattr(item, column)
    return float("inf") if value is None else value


def _columns(rows: list[RequestRow], width: int) -> list[tuple[str, int]]:
    """Width of each column that fits, the prompt taking what is left."""
    wanted = {
        "name": max(7, min(16, max(len(item.name) for item in rows))),
        "state": max(7, max(len(item.state) for item in rows)),
        "tokens": 6,
        "steps": 5,
        "tau": 5,
        "kind": min(12, max((len(item.kind) for item in rows), default=0)),
    }
    if width < 70:
        wanted["name"] = min(wanted["name"], 10)
    for spare in ("kind", "steps"):
        if 2 + sum(w + 2 for w in wanted.values() if w) + 20 > width:
            wanted[spare] = 0
    used = 2 + sum(w + 2 for w in wanted.values() if w)
    wanted["prompt"] = max(0, width - used)
    return [(name, wide) for name, wide in wanted.items() if wide]


NUMBERS = ("tokens", "steps", "tau")
HEADS = {"name": "request", "tau": "τ"}


def _line(item: RequestRow, columns: list[tuple[str, int]], current: bool) -> Line:
    later = item.state in ("later", "queued")
    ink: Ink = "faint" if later else "dim"
    line: list[tuple[str, Ink]] = [("▸ " if current else "  ", "accent")]
    for name, wide in columns:
        text = figure(item.tau) if name == "tau" else clean(str(getattr(item, name)))
        if name in NUMBERS:
            line.append((right("" if later else text, wide), ink if later else "text"))
        elif name == "name":
            line.append((left(text, wide), "strong" if current else ink if later else "text"))
        elif name == "state":
            line.append((left(text, wide), STATE_INKS.get(text, "dim")))
        else:
            line.append((cut(text, wide) if name == "prompt" else left(text, wide), ink))
        line.append(("  ", ink))
    return line[:-1]
