"""What each request of a run has come to, for the figures on its own span: on the branch on which the run stands.

Where a run goes back, what lies beyond is taken back, and what is on the path again is added: for that the newest
request steps are remembered. A run that goes back beyond them leaves its requests without figures.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple

from specscope.trace.history.stats import Acceptance, StepCounts
from specscope.trace.history.undrafted import Undrafted, why_undrafted
from specscope.trace.record.aggregate import DEPTHS, RequestFigures
from specscope.trace.record.records import FinalKind, RequestEnd, RunInfo, StepRecord

KEPT = 20_000  # request steps that are remembered, and requests at most


@dataclass
class _Sums:
    """A request's sums so far."""

    acceptance: Acceptance = field(default_factory=Acceptance)
    undrafted: Counter[Undrafted] = field(default_factory=Counter)
    first: tuple[int, int] | None = None  # the step with its first token, and when that ended
    ended: tuple[int, int] | None = None  # the step in which it ended, and its branch
    known: bool = True  # False: the run went back too far, or its first steps did not come


class _Part(NamedTuple):
    """A request's part in a step, as it was counted."""

    sums: _Sums
    counts: StepCounts
    undrafted: Undrafted | None
    end_ns: int

    def add(self, step: int) -> None:
        """Add it to the request's sums."""
        self.sums.acceptance.add(self.counts)
        if self.undrafted is not None:
            self.sums.undrafted[self.undrafted] += 1
        if self.sums.first is None and self.counts.emitted:
            self.sums.first = (step, self.end_ns)

    def take_back(self, step: int) -> None:
        """Remove it again: the latest step first."""
        self.sums.acceptance.take_back(self.counts)
        if self.undrafted is not None:
            self.sums.undrafted[self.undrafted] -= 1
        if self.sums.first is not None and self.sums.first[0] == step:
            self.sums.first = None


@dataclass
class _Step:
    """A step that is remembered."""

    before: int  # the step before it on its branch, as far as records came; -1 for none
    parts: list[_Part]
    ended: list[str]


class RequestTally:
    """Takes a run's records in order, and gives the figures of requests that end."""

    def __init__(self, run: RunInfo) -> None:
        self._run = run
        self._sums: dict[str, _Sums] = {}
        self._steps: dict[int, _Step] = {}  # the newest
        self._size = 0  # request steps in them, and steps
        self._last = -1

    def add(self, record: StepRecord) -> None:
        """Take one more step."""
        if record.after is not None:
            self._go(record.after)
        for info in record.admitted:
            sums = self._sums.get(info.id)
            if sums is not None and sums.ended is not None and sums.ended[1] == record.branch:
                del self._sums[info.id]  # another request of the same name
        parts: list[_Part] = []
        for part in record.requests:
            sums = self._sums.setdefault(part.request, _Sums(known=part.index == 0))  # else its first steps are missing
            sums.ended = None
            if (counts := StepCounts.of(part)) is not None:
                why = None if counts.drafted else why_undrafted(self._run, record, part)
                parts.append(_Part(sums, counts, why, record.end_ns))
                parts[-1].add(record.step)
        ended = [end.info.id for end in record.finished]
        for name in ended:
            self._sums.setdefault(name, _Sums()).ended = (record.step, record.branch)
        self._steps[record.step] = _Step(self._last, parts, ended)
        self._last = record.step
        self._size += 1 + len(parts)
        self._forget()

    def _forget(self) -> None:
        """Forget the oldest steps where they are too many, and with each the requests that ended in it."""
        while self._size > KEPT and len(self._steps) > 1:
            number = next(iter(self._steps))
            step = self._steps.pop(number)
            self._size -= 1 + len(step.parts)
            for name in step.ended:
                sums = self._sums.get(name)
                if sums is not None and sums.ended is not None and sums.ended[0] == number:
                    del self._sums[name]
        while len(self._sums) > KEPT:
            del self._sums[next(iter(self._sums))]

    def _path(self, step: int) -> tuple[set[int], int]:
        """The remembered steps up to this one on its branch, and the first before them that is not."""
        path: set[int] = set()
        while step in self._steps:
            path.add(step)
            step = self._steps[step].before
        return path, step

    def _go(self, after: int) -> None:
        """Stand after another step: its path counts, and what else was counted does not."""
        old, old_begin = self._path(self._last)
        new, new_begin = self._path(after)
        if old_begin != new_begin:  # what lies between is forgotten
            for sums in self._sums.values():
                sums.known = False
        for number in sorted(old - new, reverse=True):
            for part in self._steps[number].parts:
                part.take_back(number)
        for number in sorted(new - old):
            for part in self._steps[number].parts:
                part.add(number)
        self._last = after

    def figures(self, end: RequestEnd) -> RequestFigures | None:
        """The figures of a request that ended in the newest step; None where they are not known."""
        sums = self._sums.get(end.info.id, _Sums())
        if not sums.known:
            return None
        counts, info = sums.acceptance, end.info
        arrival = info.arrival_ns
        return RequestFigures(
            counts.steps,
            counts.drafts,
            counts.drafted,
            counts.accepted,
            counts.emitted,
            counts.depth,
            counts.kinds[FinalKind.BONUS],
            counts.kinds[FinalKind.RECOVERED],
            counts.tau,
            counts.rate,
            tuple(counts.accepted_at[:DEPTHS]),
            tuple(counts.proposed_at[:DEPTHS]),
            tuple(counts.tried_at[:DEPTHS]),
            {reason.value: count for reason, count in sums.undrafted.items() if count},
            _seconds(arrival, info.admitted_ns),
            _seconds(arrival, 0 if sums.first is None else sums.first[1]),
            _seconds(arrival, end.finished_ns),
        )


def _seconds(begin_ns: int, end_ns: int) -> float | None:
    """From one to the other; None where either is not known, or a clock was turned back."""
    return (end_ns - begin_ns) / 1e9 if 0 < begin_ns <= end_ns else None
