"""What each request of a run has come to, for the figures on its own span: on the branch on which the run stands.

Sums are never changed, only followed by others, so where a run goes back the sums of that step hold again: those after
the newest steps are remembered. A run that goes back beyond them leaves its requests without figures.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from specscope.trace.history.stats import Acceptance, StepCounts
from specscope.trace.history.undrafted import Undrafted, why_undrafted
from specscope.trace.record.aggregate import DEPTHS, RequestFigures
from specscope.trace.record.records import FinalKind, RequestEnd, RunInfo, StepRecord

KEPT = 20_000  # sums that are remembered


@dataclass(frozen=True)
class _Sums:
    """A request's sums after a step."""

    row: tuple[int, ...] = tuple(Acceptance().row())
    undrafted: Mapping[Undrafted, int] = field(default_factory=dict)
    first_ns: int = 0  # when the step with its first token ended; 0 before it
    ended: int | None = None  # the branch on which it ended
    known: bool = True  # False: the run went back too far, or its first steps did not come

    def plus(self, counts: StepCounts, why: Undrafted | None, end_ns: int) -> _Sums:
        """With one more step, which ended then."""
        total = Acceptance.of(self.row)
        total.add(counts)
        undrafted = self.undrafted if why is None else {**self.undrafted, why: self.undrafted.get(why, 0) + 1}
        first_ns = self.first_ns or (end_ns if counts.emitted else 0)
        return replace(self, row=tuple(total.row()), undrafted=undrafted, first_ns=first_ns, ended=None)


class RequestTally:
    """Takes a run's records in order, and gives the figures of requests that end."""

    def __init__(self, run: RunInfo) -> None:
        self._run = run
        self._sums: dict[str, _Sums] = {}  # after the newest step
        self._after: dict[int, dict[str, _Sums]] = {-1: self._sums}  # after each of the newest steps
        self._size = 1  # steps in it, and sums

    def add(self, record: StepRecord) -> None:
        """Take one more step."""
        before = self._sums if record.after is None else self._after.get(record.after)
        if before is None:
            before = {name: replace(sums, known=False) for name, sums in self._sums.items()}
        going = {name: sums for name, sums in before.items() if sums.ended != record.branch}
        for part in record.requests:
            sums = going.get(part.request) or _Sums(known=part.index == 0)  # else its first steps are missing
            if (counts := StepCounts.of(part)) is not None:
                why = None if counts.drafted else why_undrafted(self._run, record, part)
                sums = sums.plus(counts, why, record.end_ns)
            going[part.request] = sums if sums.ended is None else replace(sums, ended=None)
        for end in record.finished:
            going[end.info.id] = replace(going.get(end.info.id, _Sums()), ended=record.branch)
        while len(going) >= KEPT:  # their ends were lost
            del going[next(iter(going))]
        self._sums = self._after[record.step] = going
        self._size += 1 + len(going)
        while self._size > KEPT and len(self._after) > 1:
            self._size -= 1 + len(self._after.pop(next(iter(self._after))))

    def figures(self, end: RequestEnd) -> RequestFigures | None:
        """The figures of a request that ended in the newest step; None where they are not known."""
        sums = self._sums.get(end.info.id, _Sums())
        if not sums.known:
            return None
        counts, info = Acceptance.of(sums.row), end.info
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
            {reason.value: count for reason, count in sums.undrafted.items()},
            _seconds(arrival, info.admitted_ns),
            _seconds(arrival, sums.first_ns),
            _seconds(arrival, end.finished_ns),
        )


def _seconds(begin_ns: int, end_ns: int) -> float | None:
    """From one to the other; None where either is not known, or a clock was turned back."""
    return (end_ns - begin_ns) / 1e9 if 0 < begin_ns <= end_ns else None
