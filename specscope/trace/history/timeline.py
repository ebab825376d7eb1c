"""The spans of one trace as rows in one scale of time: those of other services, and our own request and its steps.

Nothing is shifted and nothing is invented: each row comes from a span or a record, and `notes` says what is missing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from specscope.trace.history.history import History, RequestHistory
from specscope.trace.history.wording import acceptance, plural
from specscope.trace.record.records import StepRecord
from specscope.trace.record.vocabulary import printable
from specscope.trace.wire.engine_spans import EngineSpan

STEPS = 1000  # steps of a request that have a row of their own, at most
SKEW_NS = 1_000_000  # a child that begins earlier than its parent by more shows that clocks differ
NO_OTHERS = (
    "No spans of other services in this trace. vLLM and SGLang send theirs with --otlp-traces-endpoint ADDRESS "
    "(SGLang also needs --enable-trace); give the address to which specscope's spans go."
)
NOT_OURS = (
    "No specscope records belong to this trace: drafts, verdicts and tokens are not known, only what these spans say."
)
NOTHING = "No request and no spans yet."
BY_NAME = "The client sent no traceparent: these are two traces, joined by the request's id."
MISSING = (NO_OTHERS, NOT_OURS, NOTHING, BY_NAME)


@dataclass(frozen=True)
class TimelineRow:
    """One bar, or a lane of marks."""

    id: str
    parent: str
    name: str
    service: str
    start_ns: int
    end_ns: int
    depth: int = 0  # of nesting
    span: EngineSpan | None = None  # None for ours
    position: int | None = None  # of a step: where it is in History.steps
    marks: tuple[int, ...] = ()  # of a lane: when each step in it began
    early_ns: int = 0  # by which it begins before its parent, where that shows that clocks differ

    @property
    def took_ns(self) -> int:
        """How long it took."""
        return self.end_ns - self.start_ns


@dataclass(frozen=True)
class SpanTimeline:
    """The rows in order, each below its parent, with notes on what is missing or wrong."""

    title: str
    rows: tuple[TimelineRow, ...] = ()
    notes: tuple[str, ...] = ()
    others: int = 0  # spans of other services in it
    start_ns: int = field(init=False)
    end_ns: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "start_ns", min((row.start_ns for row in self.rows), default=0))
        object.__setattr__(self, "end_ns", max((row.end_ns for row in self.rows), default=0))

    @property
    def span_ns(self) -> int:
        """The time that it covers."""
        return max(self.end_ns - self.start_ns, 1)


def of_request(history: History, request: RequestHistory) -> SpanTimeline:
    """A request of ours with the spans of other services in its trace."""
    others, info = history.others, request.info
    trace = info.traceparent.split("-")[1] if info is not None and info.traceparent else ""
    spans, notes = others.of(trace), []
    if not spans and (other := others.trace_of_request(request.id)):
        trace, spans = other, others.of(other)
        notes.append(BY_NAME)
    if not spans:
        notes.append(NO_OTHERS)
    own_rows, more = _own(history, request)
    rows = _nested([*_rows(spans), *own_rows])
    return SpanTimeline(f"Request {printable(request.id)}", rows, (*notes, *more, *_said(history, rows)), len(spans))


def of_trace(history: History, trace_id: str) -> SpanTimeline:
    """A trace without any request of ours."""
    spans = history.others.of(trace_id)
    rows = _nested(_rows(spans))
    return SpanTimeline(f"Trace {trace_id}", rows, (NOT_OURS, *_said(history, rows)), len(spans))


def other_traces(history: History) -> list[str]:
    """The traces of other services that hold no request of ours."""
    requests = [(request.id, request.info) for request in history.requests.values()]
    ours = {info.traceparent.split("-")[1] for _, info in requests if info is not None and info.traceparent}
    ours |= {history.others.trace_of_request(name) for name, _ in requests}
    return [trace for trace in history.others.traces if trace not in ours]


def _rows(spans: Iterable[EngineSpan]) -> list[TimelineRow]:
    return [TimelineRow(s.span_id, s.parent_id, s.name, s.service, s.start_ns, s.end_ns, span=s) for s in spans]


def _own(history: History, request: RequestHistory) -> tuple[list[TimelineRow], list[str]]:
    """Rows of the request, its wait, its prefill and its decode steps; and notes on what is not known."""
    info, end, notes = request.info, request.end, []
    steps = [
        (position, history.steps[position], part)
        for position, part in zip(request.engine_steps, request.steps, strict=True)
    ]
    steps = [step for step in steps if step[1].phases]
    begins = [record.start_ns for _, record, _ in steps]
    ends = [record.end_ns for _, record, _ in steps]
    if info is None and not steps:
        return [], ["Nothing but the name of this request is known."]
    start = info.arrival_ns if info is not None else begins[0]
    done = end.finished_ns if end is not None else max([start, *ends])
    above = info.traceparent.split("-")[2] if info is not None and info.traceparent else ""
    name = f"request {printable(request.id)}"
    rows = [_ours("request", above, name if end is not None else f"{name} (no end yet)", start, done)]
    if info is None:
        notes.append("Its arrival was not seen: how long it waited is not known.")
    elif info.admitted_ns:
        rows.append(_ours("queue", "request", "queue", start, info.admitted_ns))
    if request.steps and request.steps[0].index:
        notes.append(f"What it did before its step {request.steps[0].index:,} is not known.")
    fed = [record for _, record, part in steps if part.prefill_tokens or part.verdict is None]
    judged = [(position, record, part) for position, record, part in steps if part.verdict is not None]
    rows += _lane("prefill", fed) + _lane("decode", [record for _, record, _ in judged])
    if len(judged) > STEPS:
        notes.append(f"Only the last {STEPS:,} of {len(judged):,} decode steps have a row; the lane `decode` has all.")
    for position, record, part in judged[-STEPS:]:
        accepted = 0 if part.verdict is None else part.verdict.accepted
        label = f"@{part.index}  {f'{accepted}/{len(part.tree)} accepted' if len(part.tree) else acceptance(part)}"
        rows.append(
            replace(_ours(f"step {position}", "decode", label, record.start_ns, record.end_ns), position=position)
        )
    return rows, notes


def _ours(key: str, parent: str, name: str, start_ns: int, end_ns: int) -> TimelineRow:
    above = f"specscope {parent}" if parent in OWN else parent
    return TimelineRow(f"specscope {key}", above, name, "specscope", start_ns, end_ns)


OWN = ("request", "decode")  # rows that have rows of ours below them


def _lane(name: str, records: Sequence[StepRecord]) -> list[TimelineRow]:
    """One row for all of them, a mark where each began; none where there are none."""
    if not records:
        return []
    end = max(record.end_ns for record in records)
    row = _ours(name, "request", f"{name}, {plural(len(records), 'step')}", records[0].start_ns, end)
    return [replace(row, marks=tuple(record.start_ns for record in records))]


def _nested(rows: Sequence[TimelineRow]) -> tuple[TimelineRow, ...]:
    """Each row below its parent, those of one parent by their start. Spans whose parents go in a circle stand apart."""
    by_id = {row.id: row for row in rows}
    children: dict[str, list[TimelineRow]] = {}
    roots: list[TimelineRow] = []
    for row in sorted(rows, key=lambda row: row.start_ns):
        inside = row.parent in by_id and row.parent != row.id
        (children.setdefault(row.parent, []) if inside else roots).append(row)
    out: dict[str, TimelineRow] = {}
    for root in (*roots, *sorted(rows, key=lambda row: row.start_ns)):  # the second for what no root leads to
        stack = [(root, 0)]
        while stack:
            row, depth = stack.pop()
            if row.id in out:
                continue
            parent = by_id.get(row.parent) if depth else None
            early = parent.start_ns - row.start_ns if parent is not None else 0
            out[row.id] = replace(row, depth=depth, early_ns=early if early > SKEW_NS else 0)
            stack += [(child, depth + 1) for child in reversed(children.get(row.id, []))]
    return tuple(out.values())


def _said(history: History, rows: Iterable[TimelineRow]) -> list[str]:
    """Notes on what is wrong with the spans of other services."""
    others, notes = history.others, []
    early = [row.early_ns for row in rows if row.early_ns]
    if early:
        begin = "1 span begins" if len(early) == 1 else f"{len(early):,} spans begin"
        notes.append(f"{begin} up to {max(early) / 1e6:,.1f} ms before the parent: clocks differ. Nothing was shifted.")
    if others.dropped:
        notes.append(f"{plural(others.dropped, 'span')} of other services were lost, the oldest first.")
    if others.faults.total:
        notes.append(f"{plural(others.faults.total, 'span')} of other services could not be read.")
    return notes
