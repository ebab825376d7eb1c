"""Running totals of a run and of requests, and why steps drafted nothing: one of a few reasons, from their records.

RunningTotals has a row of sums after each step, so that any stretch is a difference. RequestTally has the figures that
go onto a request's own span.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from functools import lru_cache
from typing import Any

from specscope.plans.kinds import model_part, text_part
from specscope.plans.plan import read_plan
from specscope.trace.history.stats import AT_DEPTH, SUMS, Acceptance, Counted, StepCounts
from specscope.trace.history.wording import plural
from specscope.trace.record.aggregate import DEPTHS, RequestFigures
from specscope.trace.record.records import FinalKind, Preceded, RequestEnd, RequestStep, RunInfo, StepRecord


class Undrafted(StrEnum):
    """The reasons: the name that JSON has, and what people read."""

    about: str

    def __new__(cls, name: str, about: str = "") -> Undrafted:
        reason = str.__new__(cls, name)
        reason._value_, reason.about = name, about
        return reason

    NO_DRAFTER = "no drafter", "no drafter"
    OFF = "off", "drafting was off"
    COST = "cost", "no draft would pay"
    NOT_KEPT = "not kept", "no node worth verifying"
    PROMPT = "prompt", "first token after the prompt"
    NO_MATCH = "no match", "no match in the text"
    NOTHING = "nothing", "the drafter proposed nothing"
    FORM = "form", "nothing that the form allows"
    BUDGET = "budget", "beyond the step's budget"
    NO_ROOM = "no room", "no room in the context"
    UNKNOWN = "unknown", "not recorded"


def why_undrafted(run: RunInfo | None, record: StepRecord, part: RequestStep) -> Undrafted | None:
    """Why this request's step drafted nothing; None where it did, and for a prefill chunk without a verdict."""
    counts = StepCounts.of(part)
    if counts is None or counts.drafted:
        return None
    drafter, ours = ("", True) if run is None else (run.drafter, run.is_ours)
    if not record.speculation:
        return Undrafted.NO_DRAFTER if run is not None and drafter in ("", "none") else Undrafted.OFF
    if part.form is not None and part.form.pruned:
        return Undrafted.FORM
    first = part.preceded in (Preceded.PREFILL, Preceded.PREEMPTION) or part.prefill_tokens > 0
    if part.sizing and ours:  # of an adaptive tree
        return Undrafted.COST if part.notes is None else Undrafted.NOT_KEPT
    if part.sizing and not first:  # vLLM's: drafts that were not valid. Behind a preemption it has none, and fills up
        return Undrafted.FORM
    if record.budget == 0 or (part.method is not None and part.method.unverified):
        return Undrafted.BUDGET
    if run is not None and first and (run.aux_layers or not ours):  # a head waits for the target's hidden states
        return Undrafted.PROMPT
    if run is not None and 0 < run.max_context <= part.position + 1 + _deepest(drafter, run.tree):
        return Undrafted.NO_ROOM
    if run is None or not ours or model_part(drafter) or drafter.startswith("synthetic:"):
        return Undrafted.UNKNOWN
    return Undrafted.NO_MATCH if text_part(drafter) else Undrafted.NOTHING  # of a drafter of somebody's own


@lru_cache(maxsize=16)
def _deepest(drafter: str, tree: str) -> int:
    """The longest path that a draft may have; combined with a model, a text may go as deep as there are nodes."""
    plan = read_plan(tree)
    if plan is None:
        return 0
    return plan.max_nodes if text_part(drafter) and model_part(drafter) else plan.max_depth


def count_undrafted(
    run: RunInfo | None, records: Iterable[StepRecord], request: str | None = None
) -> Counter[Undrafted]:
    """The request steps without drafts in these records, by the reason; of all requests, or of one."""
    parts = ((record, part) for record in records for part in record.requests if request in (None, part.request))
    reasons = (why_undrafted(run, record, part) for record, part in parts)
    return Counter(reason for reason in reasons if reason is not None)


def shares(counts: Counter[Undrafted]) -> list[tuple[Undrafted, float]]:
    """The reasons that occur with their shares of these steps, commonest first."""
    total = counts.total()
    return [(reason, count / total) for reason, count in counts.most_common() if count]


def undrafted_text(counts: Counter[Undrafted], steps: int) -> str:
    """`47 of 70 steps drafted nothing: no draft would pay 87%, first token after the prompt 13%`; "" where none did."""
    if not counts.total():
        return ""
    reasons = ", ".join(f"{reason.about} {share:.0%}" for reason, share in shares(counts))
    return f"{counts.total():,} of {plural(steps, 'step')} drafted nothing: {reasons}"


REASONS = tuple(Undrafted)
OWN = len(REASONS)  # numbers of a row before those of Acceptance
EMITTED = OWN + Acceptance(emitted=-1).row().index(-1)
# What an item of RunningTotals is made of: request steps or sums, and why those drafted nothing
Item = tuple[Iterable[Counted], Iterable[Undrafted | None]]


class RunningTotals:
    """Sums after each item (a step of the engine or of one request), made when first asked for; row 0 is before all."""

    def __init__(self, counted: Callable[[int], Item] = lambda number: ((), ())) -> None:
        """`counted`: gives an item by its number."""
        self.positions: list[int] = []  # of each item in History.steps
        self._counted = counted
        self._rows = [array("q", [*[0] * OWN, *Acceptance().row()])]

    def take_back(self) -> None:
        self.positions.pop()
        del self._rows[len(self.positions) + 1 :]

    def _row(self, count: int) -> array[int]:
        rows, known = self._rows, min(count, len(self._rows) - 1)
        row = rows[known]
        reasons, total = row[:OWN], Acceptance.of(row[OWN:]) if known < count else Acceptance()
        for number in range(known, count):
            parts, undrafted = self._counted(number)
            for reason in undrafted:
                if reason is not None:
                    reasons[REASONS.index(reason)] += 1
            for part in parts:
                total.add(part)
            row = reasons + array("q", total.row())
            if len(rows) > number:  # another thread may add the same, or take rows back
                rows[number + 1 : number + 2] = [row]
        return row

    @property
    def total(self) -> Acceptance:
        return Acceptance.of(self._row(len(self.positions))[OWN:])

    def count(self, position: int) -> int:
        """How many items there were by a position in History.steps."""
        return bisect_right(self.positions, position)

    def undrafted_upto(self, count: int) -> Counter[Undrafted]:
        counts = zip(REASONS, self._row(count)[:OWN], strict=True)
        return Counter({reason: count for reason, count in counts if count})

    def upto(self, position: int) -> Acceptance:
        """The sums by a position in History.steps."""
        return Acceptance.of(self._row(self.count(position))[OWN:])

    def emitted(self, count: int) -> int:
        return self._row(count)[EMITTED]

    def tau(self, begin: int, end: int) -> float | None:
        """Mean acceptance length over the items from `begin` to before `end`."""
        first, last = self._row(begin)[OWN:], self._row(end)[OWN:]
        return Acceptance.of([after - before for before, after in zip(first, last, strict=False)]).tau


KEPT = 20_000  # requests of which sums are kept


@dataclass
class _Sums:
    counts: Acceptance = field(default_factory=Acceptance)
    undrafted: Counter[Undrafted] = field(default_factory=Counter)
    first_ns: int = 0  # when the step with its first token ended; 0 before it


class RequestTally:
    """Takes a run's records in order, and gives the figures of requests that end, but of none that a rewind met."""

    def __init__(self, run: RunInfo) -> None:
        self._run = run
        self._sums: dict[str, _Sums] = {}  # of requests whose first step came

    def add(self, record: StepRecord) -> None:
        if record.after is not None:
            self._sums.clear()
        for part in record.requests:
            sums = self._sums.setdefault(part.request, _Sums()) if not part.index else self._sums.get(part.request)
            if sums is not None and (counts := StepCounts.of(part)) is not None:
                sums.counts.add(counts)
                if (why := why_undrafted(self._run, record, part)) is not None:
                    sums.undrafted[why] += 1
                sums.first_ns = sums.first_ns or (record.end_ns if counts.emitted else 0)
        while len(self._sums) > KEPT:  # their ends were lost
            del self._sums[next(iter(self._sums))]

    def figures(self, end: RequestEnd) -> RequestFigures | None:
        """The figures of a request that ended in the newest step; None where they are not known."""
        sums = self._sums.pop(end.info.id, None if end.info.admitted_ns else _Sums())
        if sums is None:
            return None
        counts, info = sums.counts, end.info
        arrival = info.arrival_ns
        told: dict[str, Any] = {name: getattr(counts, name) for name in ("steps", *SUMS, "depth", "tau", "rate")}
        told |= {name: tuple(getattr(counts, name)[:DEPTHS]) for name in AT_DEPTH}
        return RequestFigures(
            **told,
            bonus=counts.kinds[FinalKind.BONUS],
            recovered=counts.kinds[FinalKind.RECOVERED],
            undrafted={reason.value: count for reason, count in sums.undrafted.items()},
            queue_s=_seconds(arrival, info.admitted_ns),
            first_s=_seconds(arrival, sums.first_ns),
            total_s=_seconds(arrival, end.finished_ns),
        )


def _seconds(begin_ns: int, end_ns: int) -> float | None:
    """From one to the other; None where either is not known, or a clock was turned back."""
    return (end_ns - begin_ns) / 1e9 if 0 < begin_ns <= end_ns else None
