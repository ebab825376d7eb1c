"""Rows of a Timeline as lines: name, service, times, and a bar in one scale for all; and one row in full."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from rich.cells import cell_len

from specscope.trace.history.timeline import SpanTimeline, TimelineRow
from specscope.trace.history.wording import plural
from specscope.tui.text import EIGHTHS, Ink, Line, cut, labelled, left, paragraph, right

SERVICE_INKS: tuple[Ink, ...] = ("accent", "target", "recovered", "bonus")  # of other services, in turn
TICK = 2  # cells between two labels of the axis, at least
DEEPEST = 8  # levels that are indented
KEY = 40  # cells of an attribute's name


@dataclass(frozen=True)
class Layout:
    """How wide each column is."""

    name: int
    service: int  # 0 where there is no room for it
    time: int
    bars: int

    @staticmethod
    def of(width: int) -> Layout:
        """For a panel of so many cells."""
        name, service, time = (40, 24, 11) if width >= 150 else (30, 22, 10) if width >= 100 else (24, 10, 9)
        name, service = (name, service) if width >= 70 else (20, 0)
        used = 2 + name + (service + 1 if service else 0) + 2 * (time + 1) + 1
        return Layout(name, service, time, max(width - used, 4))


def milliseconds(nanoseconds: int) -> str:
    """Nanoseconds as a number of milliseconds, with the digits that matter."""
    value = nanoseconds / 1e6
    return f"{value:,.0f}" if abs(value) >= 99_999 else f"{value:,.2f}" if abs(value) < 100 else f"{value:,.1f}"


def axis(span_ns: int, width: int) -> str:
    """`0    200    400 ms`: round numbers of milliseconds below each other's bars."""
    whole = span_ns / 1e6
    step = 10.0**-3
    while True:
        for factor in (1, 2, 5):
            ticks = (
                [n * step * factor for n in range(int(whole / (step * factor)) + 1)] if whole / step < 10_000 else []
            )
            labels = [f"{value:,.10g}" for value in ticks]
            if ticks and width * step * factor / whole >= max(map(len, labels)) + TICK:
                return _placed(labels, [int(value / whole * width) for value in ticks], width)
        step *= 10


def _placed(labels: Sequence[str], cells: Sequence[int], width: int) -> str:
    line = ""
    for label, cell in zip(labels, cells, strict=True):
        if cell + len(label) <= width:
            line = line.ljust(cell) + label
    return (line + " ms" if len(line) + 3 <= width else line).ljust(width)


def row_line(
    row: TimelineRow, timeline: SpanTimeline, layout: Layout, inks: Mapping[str, Ink], *, here: bool, flat: bool
) -> Line:
    """One row. `here`: it is the current step; `flat`: the rows are not nested below their parents."""
    ours = row.span is None
    ink: Ink = "bar" if ours else inks[row.service]
    indent = 0 if flat else min(row.depth, DEEPEST)
    mark: tuple[str, Ink] = ("! ", "warn") if row.early_ns else ("▸ " if here else "  ", "accent")
    line: list[tuple[str, Ink]] = [mark, (left(" " * indent + row.name, layout.name), "text" if ours else "strong")]
    if layout.service:
        line.append((" " + left(row.service, layout.service), "dim" if ours else ink))
    times = "".join(" " + right(milliseconds(t), layout.time) for t in (row.start_ns - timeline.start_ns, row.took_ns))
    return [*line, (times + " ", "dim"), *_bar(row, timeline, layout.bars, ink)]


def _bar(row: TimelineRow, timeline: SpanTimeline, width: int, ink: Ink) -> Line:
    """A row's bar, to an eighth of a cell, from the cell of its start; for a lane a line, with a mark for each step."""

    def cell(at_ns: int) -> int:
        return min((at_ns - timeline.start_ns) * width // timeline.span_ns, width - 1)

    first = cell(row.start_ns)
    eighths = min(max(round(row.took_ns * width * 8 / timeline.span_ns), 1), 8 * (width - first))
    if not row.marks:
        return [(" " * first, "text"), ("█" * (eighths // 8) + (EIGHTHS[eighths % 8] if eighths % 8 else ""), ink)]
    counts = Counter(map(cell, row.marks))
    last = max(first + (eighths + 7) // 8 - 1, *counts)
    marks = "".join("─" if not counts[x] else "▌" if counts[x] == 1 else "█" for x in range(first, last + 1))
    return [(" " * first, "text"), (marks, ink)]


def inks_of(timeline: SpanTimeline) -> dict[str, Ink]:
    """A colour for each other service."""
    services = sorted({row.service for row in timeline.rows if row.span is not None})
    return {service: SERVICE_INKS[number % len(SERVICE_INKS)] for number, service in enumerate(services)}


def row_facts(row: TimelineRow, timeline: SpanTimeline, width: int) -> list[Line]:
    """Everything known about a row."""
    seconds, rest = divmod(row.start_ns, 10**9)
    began = f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M:%S}.{rest // 1000:06} UTC"
    start, took = milliseconds(row.start_ns - timeline.start_ns), milliseconds(row.took_ns)
    facts = [("service", row.service), ("start", f"{start} ms, {began}"), ("took", f"{took} ms")]
    lines: list[Line] = []
    if row.early_ns:
        early = f"begins {milliseconds(row.early_ns)} ms before its parent: the clocks of the services differ"
        lines += paragraph(early, width, "warn")
    if (span := row.span) is None:
        lines += _table(facts, width)
        return [
            *lines,
            [],
            *paragraph("From specscope's records. Only these times are known.", width, "faint"),
        ]
    facts += [("scope", span.scope)] if span.scope else []
    facts += [("trace id", span.trace_id), ("span id", span.span_id), ("parent", span.parent_id or "none")]
    lines += [*_table(facts, width), []]
    lines += _table([(key, str(value)) for key, value in span.attributes.items()], width)
    if span.left_out:
        remark = f"{plural(span.left_out, 'attribute')} not shown: too many, or their values are bytes or maps"
        lines += paragraph(remark, width, "warn")
    return lines if span.attributes or span.left_out else [*lines, [("no attributes", "faint")]]


def _table(facts: Sequence[tuple[str, str]], width: int) -> list[Line]:
    wide = min(max((cell_len(key) for key, _ in facts), default=0), KEY, width // 2)
    return [line for key, text in facts for line in labelled(cut(key, wide), "dim", text, "text", wide + 2, width)]
