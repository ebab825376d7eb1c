"""Breakpoints and watches: where a run stops, checked against what happened in each step, event by event."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from specscope.debug.answers import BreakpointHit, Stop, StopReason
from specscope.errors import UserError
from specscope.trace.checked import short, whole
from specscope.trace.history.conditions import Expression
from specscope.trace.history.history import History
from specscope.trace.record.records import FinalKind, FinishReason, Outcome, RequestStep, StepRecord, Verdict
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
FINALS = {FinalKind.BONUS: EventKind.BONUS, FinalKind.RECOVERED: EventKind.RECOVER}


def types_of(kind: EventKind) -> dict[str, type]:
    """The fields that a condition on an event can use, with their types: an Expression is checked against them."""
    fields = NODE if kind in NODE_EVENTS else ANY if kind in BARE_EVENTS else STEP
    return {name: field.type for name, field in fields.items()}


@dataclass(frozen=True)
class Event:
    kind: EventKind
    request: str
    evidence: StepFacts
    node: int | None = None


def events(record: StepRecord, history: History, wanted: frozenset[EventKind]) -> Iterator[Event]:
    """The wanted events of a step, in the order in which they happened. The history may hold the step already."""
    happened: list[tuple[EventKind, str, RequestStep | None, int | None]]
    happened = [(EventKind.PREEMPT, name, None, None) for name in record.preempted]
    happened += [(kind, part.request, part, node) for part in record.requests for kind, node in _of_part(part, wanted)]
    for end in record.finished:
        kinds = [EventKind.ERROR] * (end.reason is FinishReason.ERROR) + [EventKind.FINISH]
        happened += [(kind, end.info.id, None, None) for kind in kinds]
    for kind, name, part, node in happened:
        if kind in wanted:
            yield Event(kind, name, StepFacts(record, name, part, history, node), node)


def _of_part(part: RequestStep, wanted: frozenset[EventKind]) -> Iterator[tuple[EventKind, int | None]]:
    """(kind, node) of what happened to one request."""
    verdict = part.verdict
    if part.prefill_tokens:
        yield EventKind.PREFILL, None
    if len(part.tree):
        yield EventKind.DRAFT, None
    if verdict is not None:
        if not wanted.isdisjoint(NODE_EVENTS):
            yield from _tried(part, verdict)
        if verdict.kind in FINALS:
            yield FINALS[verdict.kind], None
        if part.emitted:
            yield EventKind.EMIT, None
    yield EventKind.STEP, None


def _tried(part: RequestStep, verdict: Verdict) -> Iterator[tuple[EventKind, int]]:
    """Tried nodes, level by level. Rules that look ahead try some below rejected ones, too."""
    outcome, depth = verdict.outcome.tolist(), part.tree.depth.tolist()
    for node in sorted(range(len(outcome)), key=depth.__getitem__):
        if outcome[node] != Outcome.UNTRIED:
            yield EventKind.ACCEPT if outcome[node] == Outcome.ACCEPTED else EventKind.REJECT, node


@dataclass
class Breakpoint:
    """One place to stop. Raises ExpressionError for a condition that cannot be used."""

    number: int
    kind: EventKind  # for a watch: STEP
    condition: str = ""
    watch: bool = False  # stops when the condition changes truth, not whenever it holds
    hits: int = 0
    _expression: Expression | None = field(default=None, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.condition:
            self._expression = Expression(self.condition, types_of(self.kind))

    def holds(self, event: Event) -> bool:
        """Whether it stops at an event, by the evidence alone: the same going forward and back."""
        if event.kind is not self.kind:
            return False
        holds = self._expression is None or self._expression(event.evidence)
        if not self.watch:
            return holds
        before = event.evidence.before()
        return holds != (before is not None and self._expression is not None and self._expression(before))

    def describe(self) -> str:
        if self.watch:
            return f"watch {self.condition}"
        text = f"break {self.kind.value}"
        return f"{text} if {self.condition}" if self.condition else text


@dataclass(frozen=True)
class BreakpointInfo:
    """A breakpoint as a screen shows it."""

    number: int
    text: str  # as it was typed
    hits: int


class Breakpoints:
    def __init__(self) -> None:
        self.points: dict[int, Breakpoint] = {}
        self._numbers = itertools.count(1)

    def add(self, event: str, condition: str = "") -> Breakpoint:
        """`break EVENT [if EXPR]`. Raises UserError."""
        return self._keep(Breakpoint(0, _event(event), condition))

    def watch(self, condition: str) -> Breakpoint:
        """`watch EXPR`: stop when it changes truth for a request. Raises UserError."""
        if not condition:
            raise UserError("give a condition, such as watch tau < 1.5")
        return self._keep(Breakpoint(0, EventKind.STEP, condition, watch=True))

    def _keep(self, point: Breakpoint) -> Breakpoint:
        point.number = next(self._numbers)
        self.points[point.number] = point
        return point

    def delete(self, words: Sequence[str] = ()) -> list[Breakpoint]:
        """Delete those of the numbers or at the events that are named, or all. Raises UserError and deletes none where
        there is none of a name.
        """
        gone = {point.number: point for word in words for point in self._named(word)} if words else dict(self.points)
        for number in gone:
            del self.points[number]
        return list(gone.values())

    def _named(self, word: str) -> list[Breakpoint]:
        number = whole(word)
        if number in self.points:
            return [self.points[number]]
        if number is not None:
            known = ", ".join(map(str, self.points)) or "none"
            raise UserError(f"there is no breakpoint {number}; there are: {known}")
        kind = _event(word)
        there = [point for point in self.points.values() if point.kind is kind and not point.watch]
        if not there:
            raise UserError(f"there is no breakpoint at {kind.value}")
        return there

    def shown(self) -> tuple[BreakpointInfo, ...]:
        return tuple(BreakpointInfo(p.number, p.describe(), p.hits) for p in self.points.values())

    @property
    def wanted(self) -> frozenset[EventKind]:
        return frozenset(point.kind for point in self.points.values())

    def check(self, record: StepRecord, history: History, *, back: bool = False) -> Stop | None:
        """The stop at a step, if any breakpoint stops there. Going back counts no hits."""
        if not self.points:
            return None
        hits: list[BreakpointHit] = []
        for event in events(record, history, self.wanted):
            for point in self.points.values():
                if point.holds(event):
                    point.hits += not back
                    hits.append(BreakpointHit(point.number, point.describe(), record.step, event.request, event.node))
        return Stop(StopReason.BREAKPOINT, record.step, tuple(hits)) if hits else None


def _event(name: str) -> EventKind:
    """The event of that name or unique prefix. Raises UserError."""
    matches = [kind for kind in EventKind if name and kind.value.startswith(name)]  # no name begins another
    if len(matches) != 1:
        raise UserError(f"unknown event {short(name)}: use {', '.join(kind.value for kind in EventKind)}")
    return matches[0]
