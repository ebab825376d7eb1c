"""Ledger: what the run came to at any position, without counting from the start again.

Running totals for what every request and every bucket of the plot needs, and checkpoints of the full counts; so a
screen that is dragged through ten thousand steps adds up a few hundred at most for each place it stops at.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from specscope.trace.history.history import History
from specscope.trace.history.stats import Acceptance, mean_tau
from specscope.trace.history.undrafted import Undrafted, why_undrafted
from specscope.trace.record.aggregate import Aggregate
from specscope.trace.record.records import RequestStep, StepRecord

EVERY = 512  # request steps between two checkpoints
Part = RequestStep | Aggregate
SPEED_NS = 3_000_000_000  # tokens per second are measured over this much of the run


def _zero() -> array[int]:
    return array("q", [0])


@dataclass
class RunningTotals:
    """Running totals after each item (an engine step, or a step of one request); index 0 is before the first."""

    drafts: array[int] = field(default_factory=_zero)
    accepted: array[int] = field(default_factory=_zero)
    emitted: array[int] = field(default_factory=_zero)
    total: Acceptance = field(default_factory=Acceptance)
    marks: list[tuple[int, Acceptance]] = field(default_factory=lambda: [(0, Acceptance())])
    unmarked: int = 0  # request steps since the last checkpoint
    undrafted: dict[Undrafted, array[int]] = field(default_factory=dict)  # of each such step the item that it is in

    def add(self, parts: Iterable[Part], reasons: Iterable[Undrafted | None] = ()) -> None:
        """Take one more item, made of these request steps or sums. `reasons`: why they drafted nothing."""
        for reason in reasons:
            if reason is not None:
                self.undrafted.setdefault(reason, array("q")).append(len(self.drafts) - 1)
        drafts, accepted, known = self.total.drafts, self.total.accepted, True
        for part in parts:
            self.total.add(part)
            self.unmarked += 1
            known &= not isinstance(part, Aggregate) or None not in (part.drafts, part.accepted)
        self.drafts.append(self.drafts[-1] + (self.total.drafts - drafts if known else 0))
        self.accepted.append(self.accepted[-1] + (self.total.accepted - accepted if known else 0))
        self.emitted.append(self.total.emitted)
        if self.unmarked >= EVERY:
            self.unmarked = 0
            self.marks.append((len(self.drafts) - 1, _copy(self.total)))

    def take_back(self, parts: Iterable[Part]) -> None:
        """As before the last item, which was made of these."""
        for part in parts:
            self.total.take_back(part)
            self.unmarked = max(self.unmarked - 1, 0)
        for totals in (self.drafts, self.accepted, self.emitted):
            totals.pop()
        while self.marks[-1][0] >= len(self.drafts):
            self.marks.pop()
        for items in self.undrafted.values():
            while items and items[-1] >= len(self.drafts) - 1:
                items.pop()

    def undrafted_upto(self, count: int) -> Counter[Undrafted]:
        """Why steps of the first `count` items drafted nothing."""
        return Counter({reason: bisect_left(items, count) for reason, items in self.undrafted.items()})

    def upto(self, count: int, item: Callable[[int], Iterable[Part]]) -> Acceptance:
        """The full counts over the first `count` items; `item(i)` gives what `add` was given."""
        if count >= len(self.drafts) - 1:
            return self.total
        begin, mark = self.marks[bisect_right(self.marks, count, key=lambda mark: mark[0]) - 1]
        total = _copy(mark)
        for at in range(begin, count):
            for part in item(at):
                total.add(part)
        return total

    def tau(self, begin: int, end: int) -> float | None:
        """Mean acceptance length over the items from `begin` to before `end`."""
        drafts = self.drafts[end] - self.drafts[begin]
        return Acceptance(drafts=drafts, accepted=self.accepted[end] - self.accepted[begin]).tau


@dataclass
class RequestLedger:
    """One request, counted by its own steps."""

    first: int  # the position at which it was first seen
    counts: RunningTotals = field(default_factory=RunningTotals)
    ended: int | None = None  # the position at which it ended
    preempted: list[int] = field(default_factory=list)  # positions at which its KV was taken


def _copy(counts: Acceptance) -> Acceptance:
    new = Acceptance()
    new.merge(counts)
    return new


def _or_told(tau: float | None, steps: Iterable[StepRecord]) -> float | None:
    """A length from counts; where a source tells lengths and no counts, the mean of what it told."""
    if tau is not None:
        return tau
    told = [step.aggregate.length for step in steps if step.aggregate is not None]
    known = [length for length in told if length is not None]
    return sum(known) / len(known) if known else None


class Ledger:
    """Follows a history and answers for any position in it."""

    def __init__(self, history: History) -> None:
        self.history = history
        self._seen: list[StepRecord] = []
        self.counts = RunningTotals()
        self.requests: dict[str, RequestLedger] = {}
        self._start: list[int] = []  # wall clock of each engine step
        self._end: list[int] = []

    def counts_for(self, history: History) -> bool:
        """Whether it is this history that is followed."""
        return self.history is history

    def update(self) -> None:
        """Take back the steps that are gone, and take in those that are new."""
        steps, seen = self.history.steps, self._seen
        while seen and (len(seen) > len(steps) or steps[len(seen) - 1] is not seen[-1]):
            self._take_back(len(seen) - 1, seen.pop())
        while len(seen) < len(steps):
            seen.append(steps[len(seen)])
            self._take(len(seen) - 1, seen[-1])

    def _take(self, at: int, record: StepRecord) -> None:
        reasons = [why_undrafted(self.history.run, record, part) for part in record.requests]
        self.counts.add(record.counted, reasons)
        before = self._end[-1] if self._end else 0
        self._start.append(record.start_ns if record.phases else before)
        self._end.append(max(record.end_ns, before) if record.phases else before)
        for info in record.admitted:
            self._request(info.id, at)
        for part, reason in zip(record.requests, reasons, strict=True):
            self._request(part.request, at).counts.add((part,), (reason,))
        for name in record.preempted:
            self._request(name, at).preempted.append(at)
        for end in record.finished:
            self._request(end.info.id, at).ended = at

    def _take_back(self, at: int, record: StepRecord) -> None:
        self.counts.take_back(record.counted)
        self._start.pop()
        self._end.pop()
        for end in record.finished:
            self.requests[end.info.id].ended = None
        for name in record.preempted:
            self.requests[name].preempted.pop()
        for part in record.requests:
            self.requests[part.request].counts.take_back((part,))
        for name in [name for name, request in self.requests.items() if request.first == at]:
            del self.requests[name]

    def _request(self, name: str, at: int) -> RequestLedger:
        if name not in self.requests:
            self.requests[name] = RequestLedger(first=at)
        return self.requests[name]

    def place(self, name: str, position: int) -> int:
        """How many steps of its own the request had made by `position`."""
        request = self.history.requests.get(name)
        return bisect_right(request.engine_steps, position) if request else 0

    def acceptance(self, position: int, request: str | None) -> Acceptance:
        """Counts up to and with `position`: of one request, or of all."""
        if request is None:
            return self.counts.upto(position + 1, lambda at: self.history.steps[at].counted)
        if request not in self.requests:
            return Acceptance()
        steps = self.history.requests[request].steps
        return self.requests[request].counts.upto(self.place(request, position), lambda at: (steps[at],))

    def undrafted(self, position: int, request: str | None) -> Counter[Undrafted]:
        """Why steps up to and with `position` drafted nothing: of one request, or of all."""
        if request is None:
            return self.counts.undrafted_upto(position + 1)
        known = self.requests.get(request)
        return Counter() if known is None else known.counts.undrafted_upto(self.place(request, position))

    def mean_tau(self, position: int) -> tuple[float | None, int]:
        """The mean over requests of each one's tau up to `position`, and how many requests have one."""
        parts = []
        for name, request in self.requests.items():
            place, counts = self.place(name, position), request.counts
            if counts.drafts[place]:
                parts.append(Acceptance(drafts=counts.drafts[place], accepted=counts.accepted[place]))
        return mean_tau(parts), len(parts)

    def state(self, name: str, position: int) -> str:
        """What the request was at, by `position`: `later`, `prefill`, `running`, `preempted`, or why it ended."""
        request, history = self.requests.get(name), self.history.requests.get(name)
        if request is None or history is None or request.first > position:
            return "later"
        if request.ended is not None and request.ended <= position and history.end is not None:
            return history.end.reason.value
        place = self.place(name, position)
        last = history.engine_steps[place - 1] if place else -1
        taken = bisect_right(request.preempted, position)
        if taken and request.preempted[taken - 1] >= last:
            return "preempted"
        return "running" if place and history.steps[place - 1].verdict is not None else "prefill"

    def lengths(self, position: int, request: str | None, width: int) -> tuple[list[float | None], int]:
        """Mean acceptance length in at most `width` buckets up to `position`, and the steps in a bucket.

        Buckets hold a power of two of steps, so that they stay where they are while the run grows.
        """
        counts = self.counts if request is None else self.requests[request].counts if request in self.requests else None
        count = position + 1 if request is None else self.place(request, position)
        if counts is None or count <= 0 or width <= 0:
            return [], 1
        size = 1
        while -(-count // size) > width:
            size *= 2
        ranges = [(at, min(at + size, count)) for at in range(0, count, size)]
        if request is None and self.history.counts_only:
            return [_or_told(counts.tau(*each), self.history.steps[slice(*each)]) for each in ranges], size
        return [counts.tau(*each) for each in ranges], size

    def speed(self, position: int) -> float | None:
        """Output tokens a second over the last seconds of the run before `position`."""
        if not 0 <= position < len(self._end):
            return None
        begin = bisect_right(self._end, self._end[position] - SPEED_NS, hi=position)
        elapsed = self._end[position] - self._start[begin]
        tokens = self.counts.emitted[position + 1] - self.counts.emitted[begin]
        return tokens * 1e9 / elapsed if elapsed > 0 else None

    def elapsed(self, position: int) -> float:
        """Seconds from the first step's start to the end of the step at `position`."""
        return (self._end[position] - self._start[0]) / 1e9 if 0 <= position < len(self._end) else 0.0
