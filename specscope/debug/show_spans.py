"""The rows of the timeline as a table, for the console."""

from __future__ import annotations

from specscope.debug.session import Session
from specscope.trace.history import timeline
from specscope.trace.history.timeline import SpanTimeline

MOST = 200  # rows
NAME = 40  # characters


def spans(session: Session) -> str:
    """The current request's spans with those of other services in its trace; without a request, each trace."""
    history, request = session.history, session.current_request
    if request is not None:
        shown = [timeline.of_request(history, request)]
    else:
        shown = [timeline.of_trace(history, trace) for trace in timeline.other_traces(history)]
    lines = [line for one in shown for line in _table(one)]
    more = len(lines) - MOST
    lines = [*lines[:MOST], *([f"… and {more:,} more lines: the screen shows all (w)"] if more > 0 else [])]
    return "\n".join(lines) or f"{timeline.NOTHING} {timeline.NO_OTHERS}"


def _table(shown: SpanTimeline) -> list[str]:
    """Notes, and a line a row: name, service, start and time taken in milliseconds."""
    names = ["  " * min(row.depth, 8) + row.name for row in shown.rows]
    wide = min(max(map(len, names), default=0), NAME)
    service = max((len(row.service) for row in shown.rows), default=0)
    lines = [shown.title, *shown.notes]
    if shown.rows:
        lines.append(f"  {'name':<{wide}}  {'service':<{service}}  {'start ms':>10}  {'took ms':>10}")
    for row, name in zip(shown.rows, names, strict=True):
        start, took = (row.start_ns - shown.start_ns) / 1e6, row.took_ns / 1e6
        name = name if len(name) <= wide else name[: wide - 1] + "…"
        early = f"  begins {row.early_ns / 1e6:,.1f} ms before its parent" if row.early_ns else ""
        lines.append(f"  {name:<{wide}}  {row.service:<{service}}  {start:>10,.2f}  {took:>10,.2f}{early}")
    return lines
