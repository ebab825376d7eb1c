"""A capture step by step, request by request: each decode step with the one before it and its place in the batch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from specscope.analyze.findings import Reference
from specscope.trace.history.history import History, RequestHistory
from specscope.trace.history.stats import StepCounts
from specscope.trace.record.records import Preceded, RequestStep, StepRecord, followed_by


@dataclass(frozen=True)
class Visit:
    """A request's part in a step, and what lies around it."""

    request: RequestHistory
    record: StepRecord
    part: RequestStep
    row: int  # its place in the batch
    before: RequestStep | None  # the request's step before it; None for its first
    preempted: bool  # whether the request lost its KV between the two
    due: Preceded  # what came before a decode step, as it follows from the request's steps

    @property
    def preceded(self) -> Preceded:
        """What came before a decode step, as recorded; in older captures, as it follows from the steps."""
        return self.due if self.part.preceded is None else self.part.preceded

    def reference(self, node: int | None = None) -> Reference:
        """Where to look."""
        return Reference(self.request.id, self.part.index, self.record.step, node)


def visits(history: History) -> Iterator[Visit]:
    """Every part of every step on the path, in the engine's order; prefill chunks among them."""
    last: dict[str, RequestStep] = {}
    due: dict[str, Preceded] = {}
    lost: set[str] = set()
    for record in history.steps:
        lost.update(record.preempted)
        due.update(dict.fromkeys(record.preempted, Preceded.PREEMPTION))
        for row, part in enumerate(record.requests):
            name, request = part.request, history.requests[part.request]
            if history.in_part and _began_anew(last.get(name), part):
                lost.add(name)
                due[name] = Preceded.PREEMPTION
            before = due.get(name, Preceded.PREFILL)
            yield Visit(request, record, part, row, last.get(name), name in lost, before)
            last[name] = part
            lost.discard(name)
            if (counts := StepCounts.of(part)) is not None:
                due[name] = followed_by(counts.kind, counts.drafted, counts.accepted)


def _began_anew(before: RequestStep | None, part: RequestStep) -> bool:
    """Whether a request lost its KV before this step, where engine steps, which say so, may not be in the file."""
    if before is None or part.index != before.index + 1:
        return False
    if before.verdict is None:  # once more, while its tokens were fed again
        return part.prefill_tokens > 0 and part.context_len == part.found
    return part.verdict is None or part.preceded is Preceded.PREEMPTION
