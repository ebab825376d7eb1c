"""A trace over time: the current request's spans and those of other services, as bars in one scale."""

from __future__ import annotations

from collections.abc import Hashable
from typing import ClassVar

from textual import events
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Container

from specscope.trace.history import timeline
from specscope.trace.history.timeline import SpanTimeline, TimelineRow
from specscope.trace.history.wording import plural
from specscope.tui.look import Look
from specscope.tui.screens.over import Hint, Over
from specscope.tui.text import Line, fit, left, paragraph, right
from specscope.tui.widgets.lines import Panel, Sheet
from specscope.tui.widgets.listing import PickPanel
from specscope.tui.widgets.spans import Layout, axis, inks_of, row_facts, row_line


class SpansPanel(PickPanel):
    """A bar a span, below its parent; above them what is missing, and the axis."""

    COLUMNS: ClassVar[tuple[str, ...]] = ("name", "service", "start", "took")

    def __init__(self, id: str | None = None) -> None:
        super().__init__(id=id)
        self.trace = ""  # one of other services alone; "" for the current request's
        self.timeline = SpanTimeline("")
        self._source: Hashable = None  # what the timeline was made of
        self._current: str | None = None
        self._row = ""  # the id of the picked row: its place changes as others come

    def traces(self, look: Look) -> list[str]:
        """What can be shown: "" for the current request's trace, if there is one, and those without a request."""
        return [*([""] if look.request is not None else []), *timeline.other_traces(look.history)]

    def next_trace(self, way: int) -> None:
        """Show the next or previous trace."""
        if self.look is None or not (traces := self.traces(self.look)):
            return
        index = traces.index(self.trace) if self.trace in traces else len(traces) - 1
        self.trace, self._row, self.picked = traces[(index + way) % len(traces)], "", 0
        self.show(self.look)

    def key(self, look: Look) -> Hashable:
        """The request, how much of it is known, and what other services told."""
        return self._about(look), look.at, self.picked, self.order, len(look.history.requests)

    def _about(self, look: Look) -> Hashable:
        request = look.request
        known = None if request is None else (len(request.steps), request.state, request.info is None)
        return look.current, self.trace, look.history.others.changes, known, look.history.rewinds, id(look.history)

    def draw(self, look: Look, width: int, height: int) -> Sheet:
        """Notes, axis, and the rows."""
        if look.current != self._current:
            self._current, self.trace, self._row, self.picked = look.current, "", "", 0
        if (source := self._about(look)) != self._source:
            self._source, self.timeline = source, self._read(look)
        shown, layout = self.timeline, Layout.of(width)
        lines: list[Line] = [line for note in shown.notes for line in _note(note, width)]
        lines = lines[: max(height // 3, 1)]
        self.shown = self.arranged(shown.rows, _value, lambda row: f"{row.name} {row.service}")
        self.rows = list(range(len(self.shown)))
        ids = [row.id for row in self.shown]
        self.picked = ids.index(self._row) if self._row in ids else max(min(self.picked, len(ids) - 1), 0)
        self._row = ids[self.picked] if ids else ""
        if not self.shown:
            return Sheet(lines, self._title(look, width))
        heads = [("", " "), ("name", left("name", layout.name))]
        heads += [("service", left("service", layout.service))] if layout.service else []
        heads += [(column, right(f"{column} ms", layout.time)) for column in ("start", "took")]
        lines.append([*self.head(heads, " "), (" " + axis(shown.span_ns, layout.bars), "faint")])
        inks, head, flat = inks_of(shown), len(lines), bool(self.order.column)
        for row in self.shown:
            here = row.position is not None and row.position == look.at
            lines.append(row_line(row, shown, layout, inks, here=here, flat=flat))
        cursor = head + self.picked
        return Sheet(lines, self._title(look, width), cursor=cursor, keep=self.kept(cursor, self._row), head=head)

    def _read(self, look: Look) -> SpanTimeline:
        traces = self.traces(look)
        if self.trace not in traces:
            self.trace = "" if look.request is not None or not traces else traces[-1]
        if self.trace:
            return timeline.of_trace(look.history, self.trace)
        if look.request is not None:
            return timeline.of_request(look.history, look.request)
        return SpanTimeline("Spans", notes=(timeline.NOTHING, timeline.NO_OTHERS))

    def _title(self, look: Look, width: int) -> Line:
        others, traces = self.timeline.others, timeline.other_traces(look.history)
        services = len({row.service for row in self.timeline.rows if row.span is not None})
        spans = f"{plural(others, 'span')} of {plural(services, 'other service')}" if others else "no other service"
        number = f"{traces.index(self.trace) + 1} of " if self.trace in traces else ""
        more = f"{number}{plural(len(traces), 'trace')} without a request" if traces else ""
        parts: list[tuple[int, Line]] = [
            (0, [(self.timeline.title, "strong")]),
            (1, [(spans, "text")]),
            (3, [(more, "dim")]),
            (2, self.said()),
        ]
        return fit(parts, width - 2, " · ")

    def pick(self, way: int) -> None:
        """Another row."""
        self._row = ""
        super().pick(way)

    def on_click(self, event: events.Click) -> None:
        """Pick the row under the pointer; on the head, sort."""
        if self.clicked_head(event, line=self.sheet.head - 1):
            return
        row = self.line_at(event.get_content_offset_capture(self).y) - self.sheet.head
        if 0 <= row < len(self.rows):
            self.pick(row - self.picked)


def _note(note: str, width: int) -> list[Line]:
    """A note as lines: dim where something is only missing, else as a warning."""
    return paragraph(note, width, "dim" if note in timeline.MISSING else "warn")


def _value(row: TimelineRow, column: str) -> float | str:
    """What a row is sorted by."""
    values: dict[str, float | str] = {"name": row.name, "service": row.service, "start": row.start_ns}
    return values.get(column, row.took_ns)


class SpanPanel(Panel):
    """The picked row in full."""

    def __init__(self, spans: SpansPanel, id: str | None = None) -> None:
        super().__init__(id=id)
        self._spans = spans

    def key(self, look: Look) -> Hashable:
        """The row."""
        return self._spans.key(look), self._spans.item

    def draw(self, look: Look, width: int, height: int) -> Sheet:
        """The row's facts and attributes."""
        row: TimelineRow | None = self._spans.item
        if row is None:
            return Sheet([], [("Span", "strong")])
        return Sheet(row_facts(row, self._spans.timeline, width), [(row.name, "strong")])


class SpansScreen(Over):
    """The timeline; below it one of its rows in full, where asked for."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("w", "dismiss", "Close", show=False),
        Binding("left", "trace(-1)", "Previous trace", show=False),
        Binding("right", "trace(1)", "Next trace", show=False),
    ]
    HINTS = (
        Hint(0, "↑↓", "span", "screen.pick(1)"),
        Hint(1, "⏎", "attributes, step", "screen.go"),
        Hint(3, "← →", "trace", "screen.trace(1)"),
        Hint(4, "/", "filter", "app.filter"),
        Hint(5, "o", "sort", "app.sort(1)"),
        Hint(6, "j k", "request", "app.choose(1)"),
        Hint(7, ":", "debug", "app.console"),
        Hint(8, "?", "help", "app.help"),
        Hint(2, "Esc", "close", "screen.dismiss"),
    )

    def parts(self) -> ComposeResult:
        """Two panels, the second hidden."""
        spans = SpansPanel("spans")
        with Container(id="of-spans"):
            yield spans
            yield SpanPanel(spans, "span")

    def on_mount(self) -> None:
        """Arrows pick a row."""
        super().on_mount()
        self.query_one(SpansPanel).focus()

    def action_pick(self, way: int) -> None:
        """Another row."""
        self.query_one(SpansPanel).pick(way)
        self.show(self.last)

    def action_trace(self, way: int) -> None:
        """Show another trace: the current request's, or one of other services alone."""
        self.query_one(SpansPanel).next_trace(way)
        self.show(self.last)

    def action_go(self) -> None:
        """Go to the picked step; for any other row show or hide the attributes."""
        row: TimelineRow | None = self.query_one(SpansPanel).item
        if row is not None and row.position is not None:
            self.run_worker(self._go(row.position))
            return
        self.query_one("#of-spans").toggle_class("-open")
        self.call_after_refresh(lambda: self.show(self.last))

    async def _go(self, position: int) -> None:
        await self.app.run_action(f"goto_position({position})")
        await self.app.run_action("app.step")
