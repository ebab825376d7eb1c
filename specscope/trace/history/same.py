"""Whether a step that was run again came out as it did the first time."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from specscope.trace.record.records import RequestStep, StepRecord, Verdict
from specscope.trace.record.rules import ROUNDING


def same_step(first: StepRecord, again: StepRecord, dtype: str) -> bool:
    """Everything that was decided is equal, and probabilities are within the rounding of the target's dtype.

    Numbers, times and branches are not compared. KV that was computed again in chunks of another size moves the last
    bits of a probability, which is no other history.
    """
    parts = zip(first.requests, again.requests, strict=False)
    return _decided(first) == _decided(again) and all(_near(a.verdict, b.verdict, dtype) for a, b in parts)


def _decided(record: StepRecord) -> tuple[object, ...]:
    ends = [(end.info.id, end.reason, end.stop, end.error, end.output.tolist()) for end in record.finished]
    admitted, parts = [info.id for info in record.admitted], [*map(_of_part, record.requests)]
    return record.running, record.waiting, record.preempted, admitted, ends, parts


def _of_part(part: RequestStep) -> tuple[object, ...]:
    tree, verdict = part.tree, part.verdict
    arrays: list[NDArray[Any]] = [
        tree.token,
        tree.parent,
        tree.drawn,
        np.zeros(0) if part.notes is None else part.notes.coin,
    ]
    final = None
    if verdict is not None:
        arrays += [verdict.outcome, verdict.path, verdict.coin, verdict.forced]
        final = verdict.token, verdict.kind, verdict.final_coin
    plan = part.request, part.index, part.context_len, part.prefill_tokens, part.drafter, part.emitted
    return *plan, final, [array.tolist() for array in arrays]


def _near(a: Verdict | None, b: Verdict | None, dtype: str) -> bool:
    if a is None or b is None:
        return a is b
    pairs = ((a.p, b.p), (a.p_trial, b.p_trial), (a.final_p, b.final_p))
    least = ROUNDING.get(dtype, 0.0)
    return all(bool(np.all(np.abs(np.asarray(x, np.float64) - y) <= least)) for x, y in pairs)
