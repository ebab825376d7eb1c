"""The table of requests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter

from textual import events

from specscope.trace.words import RequestRow, request_row
from specscope.tui.keys import hidden
from specscope.tui.look import Look
from specscope.tui.text import Ink, clean, figure, left, line_width
from specscope.tui.widgets.lines import Goto, Sheet
from specscope.tui.widgets.listing import GAP, ListColumn, PickPanel, row_line

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


class RequestsPanel(PickPanel):
    """Id, state, tokens, steps, tau, kind and prompt of each request; the current one is on the band.

    Prompts that a paused engine has been given stand below, until a step takes them in.
    """

    OF = attrgetter("look.position", "look.steps", "look.current", "look.pending", "order")

    BINDINGS = hidden(up="app.choose(-1)", down="app.choose(1)", enter="app.open('request')")

    @property
    def names(self) -> list[str]:
        return [item.name for item in self.shown]

    def draw(self, look: Look, width: int, height: int) -> Sheet:
        """A head where there is room for one, then a row a request."""
        every = [_row(look, name) for name in look.history.requests]
        queued = [RequestRow("·", "queued", 0, 0, None, "", clean(" ".join(text.split()))) for text in look.pending[0]]
        columns = _columns([*every, *queued], width, look.current)
        text = lambda item: f"{item.name} {item.state} {item.kind} {item.prompt}"  # noqa: E731
        sheet = self.table("Requests", every, columns, text, width)
        if not every and not queued:
            return Sheet([[("no requests yet", "faint")]], sheet.title)
        sheet.title = [*sheet.title, (f", {len(queued)} queued", "faint")] if queued else sheet.title
        there = [column for column in columns if column.width]
        sheet.lines += [row_line(item, there, width) for item in queued]
        if height <= 3:  # no line to spare: the names of the figures stand in the title
            names = [(column.number, column.placed(column.head)) for column in there]
            heads = GAP.join(text if is_number else " " * len(text) for is_number, text in names)
            sheet.title = [*sheet.title, (heads[line_width(sheet.title) :].rstrip(), "faint")]
            sheet.lines, sheet.head = sheet.lines[1:], 0
        sheet.cursor = self.names.index(look.current) + sheet.head if look.current in self.names else -1
        sheet.keep = self.kept(sheet.cursor, look.current)
        return sheet

    def on_click(self, event: events.Click) -> None:
        """Choose the request under the pointer."""
        row = self.line_at(event.get_content_offset_capture(self).y) - self.sheet.head
        if 0 <= row < len(self.shown):
            self.post_message(Goto(request=self.names[row]))


def _columns(rows: Sequence[RequestRow], width: int, current: str | None) -> list[ListColumn[RequestRow]]:
    """Those that fit, the prompt taking what is left."""
    name = max([7, *(min(len(item.name), 10 if width < 70 else 16) for item in rows)])
    state = max([7, *(len(item.state) for item in rows)])
    kind, steps = min(12, max((len(item.kind) for item in rows), default=0)), 5
    room = width - 42 - name - state  # beside tokens, tau, gaps and twenty cells of a prompt
    kind = 0 if room < steps + 2 + (kind + 2) * bool(kind) else kind
    steps = 0 if room < steps + 2 + (kind + 2) * bool(kind) else steps

    def ink(item: RequestRow, other: Ink) -> Ink:
        return "faint" if item.state in ("later", "queued") else other

    def named(item: RequestRow) -> list[tuple[str, Ink]]:
        is_current = item.name == current
        mark = "▸ " if is_current else "  "
        return [(mark, "accent"), (left(clean(item.name), name), "strong" if is_current else ink(item, "text"))]

    def number(head: str, wide: int, text: Callable[[RequestRow], str], key: str) -> ListColumn[RequestRow]:
        def cell(item: RequestRow) -> tuple[str, Ink]:
            return "" if ink(item, "text") == "faint" else text(item), ink(item, "text")

        value = attrgetter(key)  # a request without drafts has the highest tau
        return ListColumn(
            head, wide, cell, lambda item: float("inf") if value(item) is None else value(item), True, key
        )

    return [
        ListColumn("  request", name + 2, named, attrgetter("name"), key="name"),
        ListColumn("state", state, lambda item: (item.state, STATE_INKS.get(item.state, "dim")), attrgetter("state")),
        number("tokens", 6, lambda item: str(item.tokens), "tokens"),
        number("steps", steps, lambda item: str(item.steps), "steps"),
        number("τ", 5, lambda item: figure(item.tau), "tau"),
        ListColumn("kind", kind, lambda item: (item.kind, ink(item, "dim")), attrgetter("kind")),
        ListColumn("prompt", -1, lambda item: (item.prompt, ink(item, "dim")), attrgetter("prompt")),
    ]
