"""What happened in a step, event by event."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from specscope.trace.history.history import History
from specscope.trace.record.records import FinalKind, FinishReason, Outcome, RequestStep, StepRecord
from specscope.trace.record.tree import ROOT
from specscope.trace.words import ANY, NODE, STEP, StepFacts


class EventKind(StrEnum):
    """What a breakpoint can be set on."""

    STEP = "step"  # a request took part in a step
    DRAFT = "draft"  # a tree was drafted
    REJECT = "reject"  # a node was rejected
    ACCEPT = "accept"  # a node was accepted
    BONUS = "bonus"  # the final token follows a path that was accepted to its leaf
    RECOVER = "recover"  # the final token was drawn from a residual
    EMIT = "emit"  # tokens became output
    PREFILL = "prefill"  # prompt tokens were fed
    PREEMPT = "preempt"  # a request lost its KV
    FINISH = "finish"  # a request ended
    ERROR = "error"  # a request failed


NODE_EVENTS = (EventKind.REJECT, EventKind.ACCEPT)
BARE_EVENTS = (EventKind.PREEMPT, EventKind.FINISH, EventKind.ERROR)


def types_of(kind: EventKind) -> dict[str, type]:
    """The fields that a condition on an event can use, with their types: an Expression is checked against them."""
    fields = NODE if kind in NODE_EVENTS else ANY if kind in BARE_EVENTS else STEP
    return {name: field.type for name, field in fields.items()}


@dataclass(frozen=True)
class Event:
    """One thing that happened."""

    kind: EventKind
    request: str
    evidence: StepFacts
    node: int | None = None


def events(record: StepRecord, history: History, wanted: frozenset[EventKind]) -> Iterator[Event]:
    """The wanted events of a step, in the order in which they happened. The history may hold the step already."""
    for name in record.preempted:
        if EventKind.PREEMPT in wanted:
            yield Event(EventKind.PREEMPT, name, StepFacts(record, name, None, history))
    for part in record.requests:
        for kind, node in _of_part(part, wanted):
            yield Event(kind, part.request, StepFacts(record, part.request, part, history, node), node)
    for end in record.finished:
        failed = end.reason is FinishReason.ERROR
        for kind, happened in ((EventKind.ERROR, failed), (EventKind.FINISH, True)):
            if happened and kind in wanted:
                yield Event(kind, end.info.id, StepFacts(record, end.info.id, None, history))


def _of_part(part: RequestStep, wanted: frozenset[EventKind]) -> Iterator[tuple[EventKind, int | None]]:
    """(kind, node) of what happened to one request."""
    verdict = part.verdict
    if EventKind.PREFILL in wanted and part.prefill_tokens:
        yield EventKind.PREFILL, None
    if EventKind.DRAFT in wanted and len(part.tree):
        yield EventKind.DRAFT, None
    if verdict is not None:
        if EventKind.REJECT in wanted or EventKind.ACCEPT in wanted:
            yield from _tried(part, wanted)
        if EventKind.BONUS in wanted and verdict.kind is FinalKind.BONUS:
            yield EventKind.BONUS, None
        if EventKind.RECOVER in wanted and verdict.kind is FinalKind.RECOVERED:
            yield EventKind.RECOVER, None
        if EventKind.EMIT in wanted and part.emitted:
            yield EventKind.EMIT, None
    if EventKind.STEP in wanted:
        yield EventKind.STEP, None


def _tried(part: RequestStep, wanted: frozenset[EventKind]) -> Iterator[tuple[EventKind, int]]:
    """Tried nodes in the order of their trials: level by level down the path."""
    assert part.verdict is not None
    outcome = part.verdict.outcome.tolist()
    for above in (ROOT, *part.verdict.path.tolist()):
        for node in part.tree.children(above):
            kind = EventKind.ACCEPT if outcome[node] == Outcome.ACCEPTED else EventKind.REJECT
            if outcome[node] != Outcome.UNTRIED and kind in wanted:
                yield kind, node
