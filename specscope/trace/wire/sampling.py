"""Trace sampling: a filter in front of what sends spans, that hands on a share of the requests.

The share is OpenTelemetry's ParentBased(TraceIdRatioBased(ratio)): every service that samples the same trace by the
same ratio decides alike. We write no `ot=th:` into the trace state: that promises a threshold over 56 other bits.

Steps that do not go on may be where a branch begins: `after` names the last step before it that does.
"""

from __future__ import annotations

import dataclasses
import re
from bisect import bisect_right
from collections import Counter
from typing import Annotated

from msgspec import Meta

from specscope.trace.checked import checked
from specscope.trace.history.history import KEPT
from specscope.trace.history.wording import plural
from specscope.trace.record.aggregate import LeftOut, Reason, Sampled
from specscope.trace.record.records import StepRecord
from specscope.trace.wire.spans import own_trace

ID_SPACE = 2**64  # the ids that the ratio is taken of
SAMPLED_FLAG = 1  # of W3C trace flags
REMEMBERED = 20_000  # decisions that are kept for parts that come late, or on another branch

Ratio = Annotated[float, Meta(ge=0, le=1, description="between 0 and 1, such as 0.01")]


def read_ratio(text: str | None, name: str) -> float | None:
    """The share that a flag or variable called `name` asks for; None where it is not given. Raises UserError."""
    if text is None:
        return None
    is_number = re.fullmatch(r"([0-9]{1,40}\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]{1,3})?", text)  # float takes more
    return float(checked(float(text) if is_number else text, Ratio, name))


def sampling_text(ratio: float) -> str:
    return f"ratio {ratio:g}"


def ratio_keeps(trace_id: int, traceparent: str, ratio: float) -> Reason | None:
    """Why this trace is in the share; None where it is not. `traceparent`: of the caller's span, "" for none."""
    _, trace, span, flags = (int(part, 16) for part in (traceparent or "00-0-0-00").split("-"))
    if trace and span:
        return Reason.PARENT if flags & SAMPLED_FLAG else None
    return Reason.RATIO if trace_id % ID_SPACE < round(ratio * ID_SPACE) else None


class Sampler:
    """Gives of each StepRecord what goes on: the requests that are kept, and counts of the others."""

    def __init__(self, run_id: str, ratio: float) -> None:
        self.kept = Counter[Reason]()  # requests; counted on the sink's thread, read anywhere
        self.left_out = 0  # requests
        self._run_id, self._ratio = run_id, ratio
        self._decided: dict[str, Sampled | None] = {}  # the last used at the end
        self._path: list[int] = []  # steps that went on, on the branch of the last of them
        self._skipped = 0  # steps since then that did not
        self._turned = self._rewound = False  # what one of them told: that a branch begins; that the run went back

    @property
    def text(self) -> str:  # kept 12 of 400 requests (4 by ratio, 8 by parent)
        total = self.kept.total()
        how = ", ".join(f"{count:,} by {reason.value}" for reason in Reason if (count := self.kept[reason]))
        return f"kept {total:,} of {plural(total + self.left_out, 'request')}" + (f" ({how})" if how else "")

    def __call__(self, record: StepRecord) -> StepRecord | None:
        """What goes on of one more step; None for nothing."""
        ended, admitted = [end.info for end in record.finished], {info.id for info in record.admitted}
        callers = {info.id: info.traceparent for info in (*ended, *record.admitted)}
        names = dict.fromkeys((*callers, *(part.request for part in record.requests), *record.preempted))
        decided = ((name, self._sampled(name, callers.get(name, ""), is_new=name in admitted)) for name in names)
        kept = {name: sampled for name, sampled in decided if sampled is not None}
        if record.after is not None:
            del self._path[bisect_right(self._path, record.after) :]
            self._turned = True
        self._rewound |= record.rewound
        if not kept and record.aggregate is None:
            self._skipped += 1
            return None
        gone = [part for part in record.requests if part.request not in kept]
        left_out = LeftOut(
            steps=self._skipped,
            requests=len(gone),
            prefill_tokens=sum(part.prefill_tokens for part in gone),
            drafted=sum(len(part.tree) for part in gone),
            accepted=sum(part.verdict.accepted for part in gone if part.verdict is not None),
            emitted=sum(part.emitted for part in gone),
        )
        before, ends = self._path[-1] if self._path else -1, [end for end in record.finished if end.info.id in kept]
        sampled = dataclasses.replace(
            record,
            admitted=tuple(info for info in record.admitted if info.id in kept),
            requests=tuple(part for part in record.requests if part.request in kept),
            preempted=tuple(name for name in record.preempted if name in kept),
            finished=tuple(dataclasses.replace(end, sampled=kept[end.info.id]) for end in ends),
            after=before if self._turned else None,
            rewound=self._rewound,
            left_out=left_out if left_out != LeftOut() else None,
        )
        self._skipped, self._turned, self._rewound = 0, False, False
        self._path.append(record.step)
        if len(self._path) > KEPT:
            del self._path[: KEPT // 4]
        return sampled

    def _sampled(self, name: str, caller: str, *, is_new: bool) -> Sampled | None:
        """Why a request is kept; None where it is not. One that comes late follows what was decided."""
        is_known, sampled = name in self._decided, self._decided.pop(name, None)
        if is_new or not is_known:
            reason = ratio_keeps(own_trace(self._run_id, name), caller, self._ratio)
            share = self._ratio if reason is Reason.RATIO else 0.0
            sampled = None if reason is None else Sampled(reason, share)
        if not is_known:
            self.kept.update([] if sampled is None else [sampled.reason])
            self.left_out += sampled is None
        self._decided[name] = sampled
        if len(self._decided) > REMEMBERED:
            del self._decided[next(iter(self._decided))]
        return sampled
