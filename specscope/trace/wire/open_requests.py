"""The requests of a run that have not ended. Whatever ends the run, their ends are written.

An engine that is told to end cancels its requests and says so in a last step. One that cannot (it failed, its process
was killed, or a step takes longer than the process has left) says nothing: then whoever writes its records does.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace

import numpy as np

from specscope.trace.record.records import FinishReason, RequestEnd, RequestInfo, StepRecord


@dataclass
class _Open:
    """A request that runs."""

    info: RequestInfo
    step: int  # in which it was admitted
    output: list[tuple[int, list[int]]] = field(default_factory=list)  # by step

    def end(self, now_ns: int) -> RequestEnd:
        """The request's end if it were cancelled now."""
        tokens = [token for _, emitted in self.output for token in emitted]
        return RequestEnd(self.info, now_ns, FinishReason.CANCELLED, "", np.array(tokens, np.int32))


class OpenRequests:
    """A sink. `ends` gives the step that the engine still owes, None where every request has ended."""

    def __init__(self) -> None:
        self._open: dict[str, _Open] = {}
        self._last: StepRecord | None = None

    def __call__(self, record: StepRecord) -> None:
        """Take a step."""
        if record.after is not None:
            self._go_back(record.after)
        for info in record.admitted:
            self._open[info.id] = _Open(info, record.step)
        for part in record.requests:
            if (known := self._open.get(part.request)) is not None:
                known.output.append((record.step, part.output()))
        for end in record.finished:
            self._open.pop(end.info.id, None)
        self._last = record

    def _go_back(self, after: int) -> None:
        """Go back to a step: a branch begins, and what came later belongs to another one."""
        self._open = {name: known for name, known in self._open.items() if known.step <= after}
        for known in self._open.values():
            known.output = [(step, emitted) for step, emitted in known.output if step <= after]

    def ends(self) -> StepRecord | None:
        """A step in which nothing runs and every open request is cancelled."""
        if self._last is None or not self._open:
            return None
        now_ns = max(time.time_ns(), self._last.end_ns)
        return replace(
            self._last,
            step=self._last.step + 1,
            phases=tuple(replace(phase, start_ns=now_ns, end_ns=now_ns) for phase in self._last.phases),
            running=0,
            waiting=0,
            admitted=(),
            requests=(),
            preempted=(),
            finished=tuple(known.end(now_ns) for known in self._open.values()),
            passes=(),
            device_ns=(),
            after=None,
            rewound=False,
            budget=None,
            flight=None,
            queried=0,
        )
