"""Whether a step that was run again came out as it did the first time."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from specscope.trace.record.records import RequestEnd, RequestStep, StepRecord, Verdict
from specscope.trace.record.rules import ROUNDING


def same_step(first: StepRecord, again: StepRecord, dtype: str) -> bool:
    """Everything that was decided is equal, and probabilities are within the rounding of the target's dtype.

    Numbers, times and branches are not compared. KV that was computed again in chunks of another size moves the last
    bits of a probability, which is no other history.
    """
    return (
        (first.running, first.waiting, first.preempted) == (again.running, again.waiting, again.preempted)
        and [info.id for info in first.admitted] == [info.id for info in again.admitted]
        and list(map(_end, first.finished)) == list(map(_end, again.finished))
        and len(first.requests) == len(again.requests)
        and all(_same_part(a, b, dtype) for a, b in zip(first.requests, again.requests, strict=True))
    )


def _end(end: RequestEnd) -> tuple[object, ...]:
    return end.info.id, end.reason, end.stop, end.error, end.output.tolist()


def _same_part(a: RequestStep, b: RequestStep, dtype: str) -> bool:
    return _plan(a) == _plan(b) and _same_verdict(a.verdict, b.verdict, dtype)


def _plan(part: RequestStep) -> tuple[object, ...]:
    tree = part.tree
    arrays = (tree.token.tolist(), tree.parent.tolist(), tree.drawn.tolist())
    coins = [] if part.notes is None else part.notes.coin.tolist()
    return part.request, part.index, part.context_len, part.prefill_tokens, part.drafter, part.emitted, arrays, coins


def _same_verdict(a: Verdict | None, b: Verdict | None, dtype: str) -> bool:
    if a is None or b is None:
        return a is b
    least = ROUNDING.get(dtype, 0.0)

    def near(x: ArrayLike, y: ArrayLike) -> bool:
        return bool(np.all(np.abs(np.asarray(x, np.float64) - np.asarray(y, np.float64)) <= least))

    exact = all(
        np.array_equal(getattr(a, name), getattr(b, name)) for name in ("outcome", "path", "coin", "forced")
    ) and (a.token, a.kind, a.final_coin) == (b.token, b.kind, b.final_coin)
    return exact and near(a.p, b.p) and near(a.p_trial, b.p_trial) and near(a.final_p, b.final_p)
