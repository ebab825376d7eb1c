"""A capture step by step, request by request: each decode step with the one before it and its place in the batch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from specscope.analyze.findings import Reference
from specscope.trace.history import History, RequestHistory
from specscope.trace.records import RequestStep, StepRecord


@dataclass(frozen=True)
class Visit:
    """A request's part in a step, and what lies around it."""

    request: RequestHistory
    record: StepRecord
    part: RequestStep
    row: int  # its place in the batch
    before: RequestStep | None  # the request's step before it; None for its first
    preempted: bool  # whether the request lost its KV between the two

    def reference(self, node: int | None = None) -> Reference:
        """Where to look."""
        return Reference(self.request.id, self.part.index, self.record.step, node)


def visits(history: History) -> Iterator[Visit]:
    """Every part of every step on the path, in the engine's order; prefill chunks among them."""
    last: dict[str, RequestStep] = {}
    lost: set[str] = set()
    for record in history.steps:
        lost.update(record.preempted)
        for row, part in enumerate(record.requests):
            request = history.requests[part.request]
            yield Visit(request, record, part, row, last.get(part.request), part.request in lost)
            last[part.request] = part
            lost.discard(part.request)
