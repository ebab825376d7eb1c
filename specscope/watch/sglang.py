"""SGLang's log lines and the figures of its responses to aggregates.

A line has averages alone: `Decode batch, ... accept len: 2.31, accept rate: 0.44, ...`.
"""

from __future__ import annotations

import re
from datetime import datetime
from typing import Any

from msgspec import Struct

from specscope.trace.record.aggregate import Aggregate
from specscope.watch.counts import (
    Count,
    Histogram,
    ToldInterval,
    UnreadableError,
    Value,
    declared,
    declared_object,
    make_room,
    of_histogram,
)

SOURCE, RESPONSE = "SGLang log", "SGLang response"

_NUMBER = r"([0-9]{1,15}(?:\.[0-9]{1,9})?)"
_HEAD = re.compile(r"\[(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)((?: [A-Z]{2}\d{1,6})*)\]")
_FIELDS = {
    "sglang:spec_accept_length": re.compile(rf"\baccept len: {_NUMBER}"),
    "sglang:spec_accept_rate": re.compile(rf"\baccept rate: {_NUMBER}"),
    "sglang:spec_cap_length": re.compile(rf"\bcap len: {_NUMBER}"),
    "sglang:spec_block_accept_length": re.compile(rf"\bblock accept len: {_NUMBER}"),
    "sglang:gen_throughput": re.compile(rf"\bgen throughput \(token/s\): {_NUMBER}"),
}
_RUNNING, _WAITING = (re.compile(rf"#{name}: ([0-9]{{1,9}})") for name in ("running-req", "queue-req"))
_USAGE = re.compile(rf"\btoken usage: {_NUMBER}")


class SglangLog:
    """Takes lines in order. Each rank that writes its own lines is an engine, tensor parallel ranks apart."""

    words = "SGLang's log"

    def __init__(self, now: datetime) -> None:
        self._now = now
        self._ends: dict[str, int] = {}  # of each engine's last interval
        self.any = False

    def take(self, line: str, now: datetime | None = None) -> list[ToldInterval]:
        """The interval of a line."""
        self._now = now or self._now
        if "Decode batch" not in line or "accept len: " not in line:
            return []
        matches = {name: form.search(line) for name, form in _FIELDS.items()}
        averages = {name: float(match[1]) for name, match in matches.items() if match}
        if "sglang:spec_accept_length" not in averages:
            return []
        self.any = True
        head = _HEAD.search(line)
        engine = " ".join(rank for rank in head[2].split() if rank.startswith("DP")) if head else ""
        end = self._time(head)
        start = min(self._ends.get(engine, end), end)
        make_room(self._ends, engine)
        self._ends[engine] = end
        running, waiting, usage = (form.search(line) for form in (_RUNNING, _WAITING, _USAGE))
        aggregate = Aggregate(
            source=SOURCE,
            engine=engine,
            running=int(running[1]) if running else None,
            waiting=int(waiting[1]) if waiting else None,
            kv_usage=float(usage[1]) if usage and float(usage[1]) <= 1 else None,
            averages=averages,
        )
        return [ToldInterval("", start, end, aggregate)]

    def rest(self, *, last: bool = False) -> list[ToldInterval]:
        """Nothing is held."""
        return []

    def _time(self, head: re.Match[str] | None) -> int:
        try:
            time = datetime.fromisoformat(head[1]) if head else self._now
        except ValueError:
            time = self._now
        return max(int(time.timestamp() * 1e9), 0)


class SglangDetail(Struct, frozen=True):
    """SGLang's: steps are `spec_verify_ct`, drafted tokens are of chains or trees."""

    spec_verify_ct: Count
    spec_num_correct_drafts: Count | None = None
    spec_num_proposed_drafts: Count | None = None
    spec_correct_drafts_histogram: Histogram = []
    spec_accept_length: Value | None = None
    spec_accept_rate: Value | None = None


# The names of SglangDetail in older versions: until 0.5.10, and in 0.5.11; 0.5.12 has the last ones beside the new ones
RENAMED = {
    "spec_accept_token_num": "spec_num_correct_drafts",
    "spec_draft_token_num": "spec_num_proposed_drafts",
    "spec_accept_histogram": "spec_correct_drafts_histogram",
    "spec_accepted_drafts": "spec_num_correct_drafts",
    "spec_proposed_drafts": "spec_num_proposed_drafts",
}


def sglang_detail(value: Any) -> SglangDetail:  # noqa: ANN401
    """The figures of a request, under the names of whatever version. Raises UnreadableError."""
    names = {RENAMED.get(name, name): item for name, item in declared_object(value).items()}
    detail: SglangDetail = declared(names, SglangDetail)
    return detail


def of_sglang(detail: SglangDetail) -> Aggregate:
    """The counts of a request of SGLang. Its drafts may be trees, so how many reached a depth is not known."""
    histogram, steps = detail.spec_correct_drafts_histogram, detail.spec_verify_ct
    if histogram and sum(histogram) != steps:
        raise UnreadableError("spec_correct_drafts_histogram does not count spec_verify_ct steps")
    averages = {
        "spec_accept_length": detail.spec_accept_length,
        "spec_accept_rate": detail.spec_accept_rate,
    }
    return Aggregate(
        source=RESPONSE,
        drafts=steps,
        drafted=detail.spec_num_proposed_drafts,
        accepted=detail.spec_num_correct_drafts,
        accepted_at=of_histogram(histogram),
        averages={name: value for name, value in averages.items() if value is not None},
    )
