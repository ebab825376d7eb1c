"""Whether a step that was run again came out as it did the first time."""

from __future__ import annotations

from operator import attrgetter
from typing import Any

import numpy as np

from specscope.trace.record.declared import same
from specscope.trace.record.records import RequestStep, StepRecord, Verdict
from specscope.trace.record.rules import ROUNDING

_PLAN = attrgetter("request", "index", "context_len", "prefill_tokens", "drafter", "emitted")
_TREE = attrgetter("tree.token", "tree.parent", "tree.drawn")
_VERDICT = attrgetter("token", "kind", "final_coin", "outcome", "path", "coin", "forced")
_END = attrgetter("info.id", "reason", "stop", "error", "output")
_PROBABILITIES = attrgetter("p", "p_trial", "final_p")


def same_step(first: StepRecord, again: StepRecord, dtype: str) -> bool:
    """Everything that was decided is equal, and probabilities are within the rounding of the target's dtype.

    Numbers, times and branches are not compared. KV that was computed again in chunks of another size moves the last
    bits of a probability, which is no other history.
    """
    verdicts = ((a.verdict, b.verdict) for a, b in zip(first.requests, again.requests, strict=False))
    near = (_near(a, b, ROUNDING.get(dtype, 0.0)) for a, b in verdicts if a is not None and b is not None)
    return same(_decided(first), _decided(again)) and all(near)


def _decided(record: StepRecord) -> tuple[Any, ...]:
    admitted, ends = tuple(info.id for info in record.admitted), tuple(map(_END, record.finished))
    return record.running, record.waiting, record.preempted, admitted, ends, tuple(map(_of_part, record.requests))


def _of_part(part: RequestStep) -> tuple[Any, ...]:
    coin = None if part.notes is None else part.notes.coin
    return *_PLAN(part), *_TREE(part), coin, None if part.verdict is None else _VERDICT(part.verdict)


def _near(a: Verdict, b: Verdict, least: float) -> bool:
    pairs = zip(_PROBABILITIES(a), _PROBABILITIES(b), strict=True)
    return all(bool(np.all(np.abs(np.asarray(x, np.float64) - y) <= least)) for x, y in pairs)
