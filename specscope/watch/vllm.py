"""vLLM's log lines and the figures of its responses to aggregates.

A `SpecDecoding metrics: ...` line follows one with the engine's load. It rounds: it does not give the number of drafts,
and the rates have three digits. Counts are inferred from what it gives: exactly where only one number of drafts fits,
else by the nearest that fits, and the aggregate says so (`rounded`).
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import Annotated

from msgspec import Meta, Struct

from specscope.trace.record.aggregate import DEPTH, LENGTH, SYNTHETIC, Aggregate, full_chains
from specscope.watch.counts import (
    ENGINES,
    Count,
    Histogram,
    ToldInterval,
    UnreadableError,
    count,
    make_room,
    of_histogram,
    rates_of,
    work_out,
)

SOURCE, RESPONSE, METRICS = "vLLM log", "vLLM response", "vLLM get_metrics()"
PerStep = Annotated[list[Count], Meta(max_length=2**22)]
MARK = "SpecDecoding metrics:"
LOAD = "Avg generation throughput:"
# Of the configuration that it prints when it starts: verdicts are then made up
IS_SYNTHETIC = re.compile(r"rejection_sample_method['\"]?\s{0,4}[:=]\s{0,4}['\"]?synthetic\b")

_NUMBER = r"([0-9]{1,15}(?:\.[0-9]{1,9})?)"
_NAN = "nan"  # older versions write it for an interval in which nothing was drafted
_TIME = re.compile(r"\b(\d\d)-(\d\d) (\d\d):(\d\d):(\d\d)\b")
_PROCESS = re.compile(r"\(\w{1,80} pid=\d{1,12}\)")
_ENGINE = re.compile(r"\bEngine (\d{1,9}): ")
_FIELDS = {
    "length": re.compile(rf"Mean acceptance length: ({_NUMBER[1:-1]}|{_NAN})(?=,|\s|$)"),
    "accepted": re.compile(r"Accepted: ([0-9]{1,15}) tokens"),
    "drafted": re.compile(r"Drafted: ([0-9]{1,15}) tokens"),
    "rates": re.compile(r"Per-position acceptance rate: ([0-9na., ]++)(?:Avg|\s*$)"),  # ++: never looked at twice
    "depth": re.compile(r"Current speculative depth: ([0-9]{1,4})\b"),
    "speed": re.compile(rf"Drafted throughput: {_NUMBER} tokens/s"),
}
_LOAD = {
    "generation tokens/s": re.compile(rf"Avg generation throughput: {_NUMBER} tokens/s"),
    "prompt tokens/s": re.compile(rf"Avg prompt throughput: {_NUMBER} tokens/s"),
    "running": re.compile(r"Running: ([0-9]{1,9}) reqs"),
    "waiting": re.compile(r"Waiting: ([0-9]{1,9}) reqs"),
    "kv": re.compile(rf"KV cache usage: {_NUMBER}%"),
}


@dataclass
class _Process:
    """A process that writes to the log, and the engines that it reports on."""

    engine: str = ""  # of the line before
    load: dict[str, float] = field(default_factory=dict)  # of that line; used by one line of metrics
    engines: set[str] = field(default_factory=set)  # all that it has named
    held: list[ToldInterval] | None = None  # from before it is known whether there are several
    began: bool = False
    unnamed: str | None = None  # the engine kept without a name: intervals of it were reported before it was named


class VllmLog:
    """Takes lines in order. `now`: the newest time that a line may be of; vLLM writes no year.

    A line of metrics belongs to the engine that the line before it names. A log may begin between the two: then its
    intervals are held until the process names an engine for the second time. If it named only one, they are its own.
    """

    words = "vLLM's log"

    def __init__(self, now: datetime) -> None:
        self.any = False  # whether there was a line of metrics
        self._source = SOURCE
        self._now = now
        self._processes: dict[str, _Process] = {}
        self._ends: dict[str, int] = {}  # of each engine's last interval

    def take(self, line: str, now: datetime | None = None) -> list[ToldInterval]:
        """The intervals of a line, and those held until now. Raises UnreadableError where it is cut or changed."""
        self._now = now or self._now
        if IS_SYNTHETIC.search(line):
            self._source = f"{SOURCE}, {SYNTHETIC}"
        if MARK not in line and LOAD not in line:
            return []
        self.any |= MARK in line
        writer = match[0] if (match := _PROCESS.search(line)) else ""
        make_room(self._processes, writer)
        process = self._processes.setdefault(writer, _Process())
        if MARK in line:
            return self._of_process(process, line)
        name = match[1] if (match := _ENGINE.search(line)) else ""
        matches = {name: form.search(line) for name, form in _LOAD.items()}
        process.load = {name: float(hit[1]) for name, hit in matches.items() if hit}
        if not process.engines and process.began and process.held is None:
            process.unnamed = name
        process.engine = "" if name == process.unnamed else name
        again = process.engine in process.engines
        if len(process.engines) < ENGINES:
            process.engines.add(process.engine)
        return self._released(process) if again else []

    def rest(self, *, last: bool = False) -> list[ToldInterval]:
        """The intervals still held: there are no more lines (`last`), or none for now."""
        return [interval for process in self._processes.values() for interval in self._released(process)]

    def _of_process(self, process: _Process, line: str) -> list[ToldInterval]:
        interval = self._metrics(line, process.engine, process.load)
        process.load = {}
        is_first, process.began = not process.began, True
        if is_first and not process.engines:
            process.held = []
        if len(process.engines) > 1:
            process.engine = ""
        if process.held is None:
            return [interval]
        process.held.append(interval)
        waits = is_first or (process.engines and len(process.held) < ENGINES)
        return [] if waits else self._released(process)  # nothing here names an engine

    def _released(self, process: _Process) -> list[ToldInterval]:
        held, process.held = process.held or [], None
        only = next(iter(process.engines)) if len(process.engines) == 1 else ""
        return [
            replace(interval, aggregate=replace(interval.aggregate, engine=interval.aggregate.engine or only))
            for interval in held
        ]

    def _metrics(self, line: str, engine: str, values: dict[str, float]) -> ToldInterval:
        line_counts = aggregate(line)
        speed = _FIELDS["speed"].search(line)
        end = self._time(line)
        seconds = (line_counts.drafted or 0) / float(speed[1]) if speed and float(speed[1]) else None
        start = self._ends.get(engine, end) if seconds is None else end - int(seconds * 1e9)
        make_room(self._ends, engine)
        self._ends[engine] = end
        kv = values.get("kv", -1.0) / 100
        whole = Aggregate(
            **vars(line_counts)
            | {
                "source": self._source,
                "engine": engine,
                "running": int(values["running"]) if "running" in values else None,
                "waiting": int(values["waiting"]) if "waiting" in values else None,
                "kv_usage": kv if 0 <= kv <= 1 else None,
                "averages": {**line_counts.averages, **{k: v for k, v in values.items() if k.endswith("tokens/s")}},
            }
        )
        return ToldInterval("", max(min(start, end), 0), end, whole)

    def _time(self, line: str) -> int:
        """Nanoseconds; the newest year in which the time has been. Now where the line has none."""
        match = _TIME.search(line)
        for year in range(self._now.year, self._now.year - 9, -1) if match else ():
            try:
                time = datetime(year, *map(int, match.groups()))  # type: ignore[union-attr,arg-type]
            except ValueError:  # the 29th of February, or no time at all
                continue
            if time <= self._now + timedelta(days=1):
                return int(time.timestamp() * 1e9)
        return int(self._now.timestamp() * 1e9)


def aggregate(line: str) -> Aggregate:
    """The counts of one line. Raises UnreadableError."""
    matches = {name: form.search(line) for name, form in _FIELDS.items()}
    length, accepted, drafted = matches["length"], matches["accepted"], matches["drafted"]
    if length is None or accepted is None or drafted is None:
        missing = next(name for name in ("length", "accepted", "drafted") if matches[name] is None)
        raise UnreadableError(f"a `{MARK}` line without its {missing}: it is cut off, or of another version")
    given = (count(float(accepted[1]), "Accepted"), count(float(drafted[1]), "Drafted"))
    averages = {DEPTH: float(matches["depth"][1])} if matches["depth"] else {}
    if length[1] == _NAN:
        if any(given):
            raise UnreadableError(f"a `{MARK}` line whose length is no number, though tokens were drafted")
        return Aggregate(source=SOURCE, drafts=0, drafted=0, accepted=0, averages=averages)
    rates = rates_of(matches["rates"][1], MARK) if matches["rates"] else ()
    drafts, alone = work_out(*given, length[1], rates)
    if matches["depth"]:  # vLLM has a rate of 0 at the depths that it no longer drafts
        rates = rates[: max(int(matches["depth"][1]), sum(float(rate) > 0 for rate in rates))]
    at_depth = () if drafts is None else tuple(round(float(rate) * drafts) for rate in rates)
    return Aggregate(
        source=SOURCE,
        drafts=drafts,
        drafted=given[1],
        accepted=given[0],
        accepted_at=at_depth,
        proposed_at=full_chains(drafts, given[1], len(at_depth)) if at_depth else (),
        averages={LENGTH: float(length[1]), **averages},
        rounded=drafts is not None and not alone,
    )


class Detail(Struct, frozen=True):
    """vLLM's figures of one request, as its server and as its Python class name them."""

    num_draft_tokens: Count
    acceptance_histogram: Histogram = []
    histogram: Histogram = []
    per_step_accepted: PerStep = []
    per_step_drafted: PerStep = []


def of_vllm(detail: Detail) -> Aggregate:
    """The counts of a request of vLLM. Raises UnreadableError where they contradict each other."""
    histogram = detail.acceptance_histogram or detail.histogram
    steps, drafts, depth = detail.per_step_accepted, sum(histogram), len(histogram) - 1
    proposed = full_chains(drafts, detail.num_draft_tokens, depth)
    if not histogram:
        raise UnreadableError("figures of a request without their histogram")
    if steps or detail.per_step_drafted:
        drafted = detail.per_step_drafted
        if len(steps) != len(drafted) or sum(drafted) != detail.num_draft_tokens:
            raise UnreadableError("per_step_accepted, per_step_drafted and num_draft_tokens do not fit together")
        if any(a > d for a, d in zip(steps, drafted, strict=True)) or max(drafted) > depth:
            raise UnreadableError("per_step_accepted holds more than was drafted")
        if [Counter(steps)[n] for n in range(depth + 1)] != histogram:
            raise UnreadableError("acceptance_histogram is not that of per_step_accepted")
        proposed = tuple(sum(1 for d in drafted if d >= level) for level in range(1, depth + 1))
    return Aggregate(
        source=RESPONSE,
        drafts=drafts,
        drafted=detail.num_draft_tokens,
        accepted=sum(n * times for n, times in enumerate(histogram)),
        accepted_at=of_histogram(histogram),
        proposed_at=proposed,
    )
