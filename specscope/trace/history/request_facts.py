"""A request as a whole, as far as it is known: the values of request_names.py."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import nan

from specscope.trace.history.stats import Acceptance
from specscope.trace.record.records import FinishReason, RequestEnd, RequestInfo, RequestStep

Part = tuple[RequestStep, int]  # a request's part in an engine step, and when that step ended


def request_facts(
    name: str, info: RequestInfo | None, parts: Iterable[Part], preempted: int, end: RequestEnd | None
) -> Mapping[str, object]:
    """What a condition can ask of a request. `end`: None while it runs.

    An unknown number is NaN, with which no comparison holds: in `tau < 1.5 or error` a request that failed before
    anything was drafted still is an error.
    """
    sums, steps, first_ns, last_ns, rule, forced = Acceptance(), 0, 0, 0, "", False
    for part, end_ns in parts:
        sums.add(part)
        steps += 1
        last_ns = end_ns
        if part.emitted and not first_ns:
            first_ns = end_ns
        if part.verdict is not None:
            rule = part.rule
            forced = forced or bool(len(part.verdict.forced))
    if end is not None:
        info, last_ns = info or end.info, end.finished_ns
    reason = None if end is None else end.reason
    return {
        "request": name,
        "tau": _known(sums.tau),
        "rate": _known(sums.rate),
        "drafts": sums.drafts,
        "nodes": sums.drafted,
        "accepted": sums.accepted,
        "emitted": sums.emitted if end is None else len(end.output),
        "steps": steps,
        "prompt": 0 if info is None else len(info.prompt_tokens),
        "error": reason is FinishReason.ERROR,
        "cancelled": reason is FinishReason.CANCELLED,
        "reason": "" if reason is None else reason.value,
        "ms": _since(info, last_ns),
        "queue_ms": _since(info, 0 if info is None else info.admitted_ns),
        "ttft_ms": _since(info, first_ns),
        "preempted": preempted,
        "forced": forced,
        "rule": rule,
        "labels": () if info is None else tuple(f"{key}={value}" for key, value in info.labels.items()),
    }


def _known(value: float | None) -> float:
    return nan if value is None else value


def _since(info: RequestInfo | None, moment_ns: int) -> float:
    """Milliseconds since its arrival; NaN where either is not known."""
    return nan if info is None or not moment_ns else (moment_ns - info.arrival_ns) / 1e6
