"""SGLang's log lines to aggregates: `Decode batch, ... accept len: 2.31, accept rate: 0.44, ...`, averages alone."""

from __future__ import annotations

import re
from datetime import datetime

from specscope.trace.record.aggregate import Aggregate
from specscope.watch.told import ToldInterval, make_room

SOURCE = "SGLang log"

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
