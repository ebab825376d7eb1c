"""Samples of metrics to readings, and the difference of two readings of one engine to an interval.

Counters are sums: their growth is what happened in the interval. Gauges are averages over the engine's own intervals,
and kept as averages. `names.py` has what each engine calls them. The labels of an engine's counts of speculation are
its name: servers that differ in any of them are several. A series that comes again begins another reading.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from msgspec import Struct
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from specscope.trace.checked import short
from specscope.trace.record.aggregate import Aggregate, full_chains
from specscope.watch.counts import (
    ENGINES,
    MOST,
    NAME,
    POSITIONS,
    Count,
    ToldInterval,
    UnreadableError,
    count,
    declared,
    load_of,
)
from specscope.watch.names import BY_PREFIX, NOT_V0, V0, Names, named

LONGEST = 2**16  # characters of a line: the parser copies the rest of the line for each label
IN_SECONDS = 2**27  # of 1974: OpenMetrics has seconds where the text that the parser knows has thousandths of them
ROUNDED_FROM = 10**6  # counts of a page of six digits
SPECULATED = ("drafts", "drafted", "accepted")
COUNTS = (*SPECULATED, "emitted", "requests")
# Labels that do not tell servers apart: they are within an engine, or say how a collector or Ray came to it
WITHIN = re.compile(r"model_name|position|pid|engine|__name__|otel_scope_.*|Version|SessionName")

_OURS = re.compile(rf"^[> \t]*(?:#[ \t]+(?:HELP|TYPE)[ \t]+)?(?:ray_)?(?:{'|'.join(BY_PREFIX)})[:_].*", re.MULTILINE)
_EXEMPLAR = re.compile(r" # \{.*")  # of OpenMetrics, behind a sample
_ANY = re.compile(r"^[ \t]*(?:#|[a-zA-Z_:][\w:]*(?:[ \t]|\{))", re.MULTILINE)


@dataclass
class Reading:
    """One engine's metrics at one time."""

    source: str
    engine: str
    model: str
    time_ns: int
    counters: dict[str | int, int] = field(default_factory=dict)  # accepted tokens by position, from 0, too
    gauges: dict[str, float] = field(default_factory=dict)  # and when its counters began, in seconds: "created"
    averages: dict[str, float] = field(default_factory=dict)
    six_digits: bool = False  # counts from a million on are rounded

    @property
    def key(self) -> tuple[str, str, str]:
        return self.source, self.engine, self.model

    @property
    def speculates(self) -> bool:
        """Whether there is anything about speculation in it. SGLang's averages are 0 without."""
        averages = [value for name, value in self.averages.items() if "spec_" in name]
        is_idle = bool(averages) and not self.counters.get("emitted")
        return bool({"drafts", "drafted"} & self.counters.keys()) or any(averages) or is_idle

    @property
    def at_depth(self) -> tuple[int, ...]:
        """Accepted tokens by depth; empty where a position is missing."""
        known = sorted(position for position in self.counters if isinstance(position, int))
        return tuple(self.counters[position] for position in known) if known == list(range(len(known))) else ()

    def take(self, names: Names, name: str, sample: Sample) -> None:
        """One more of its numbers. Raises UnreadableError."""
        self.time_ns = max(self.time_ns, _ns(sample, 0))
        if name in names.counters or name == names.accepted_at:
            position = sample.labels.get("position", "")
            if name not in names.counters and (not position.isdecimal() or int(position[:9]) >= POSITIONS):
                raise UnreadableError(f"{name} has the position {position[:40]!r}")
            counter = names.counters.get(name) or int(position[:9])
            self.counters[counter] = self.counters.get(counter, 0) + count(sample.value, name)
        elif math.isfinite(sample.value):  # else a gauge that has no value yet
            into = self.gauges if name in names.gauges else self.averages
            into[names.gauges.get(name, name)] = sample.value


def read_metrics(text: str, time_ns: int) -> list[Reading]:
    """The readings in Prometheus text, in its order. Raises UnreadableError for text that is not a page of metrics."""
    # a page may hold a million lines of others, and stand in a quotation
    lines = [_EXEMPLAR.sub("", line.lstrip("> \t")) for line in _OURS.findall(text)]
    if not lines and text.strip() and not _ANY.search(text):
        raise UnreadableError(f"this is not Prometheus text ({short(text.strip())})")
    if any(len(line) > LONGEST for line in lines):
        raise UnreadableError(f"this is not Prometheus text: a line has more than {LONGEST:,} characters")
    try:
        families = list(text_string_to_metric_families("".join(f"{line}\n" for line in lines)))
    except (ValueError, KeyError, IndexError, TypeError) as error:  # of the parser: it raises any of these
        raise UnreadableError(f"this is not Prometheus text ({short(str(error))})") from None
    pages: list[list[Sample]] = [[]]
    seen: set[tuple[str, frozenset[tuple[str, str]]]] = set()
    for sample in (sample for family in families for sample in family.samples):
        if sample.timestamp and float(sample.timestamp) < IN_SECONDS:
            sample = sample._replace(timestamp=1000 * float(sample.timestamp))
        series = sample.name, frozenset(sample.labels.items())
        if series in seen:
            seen.clear()
            pages.append([])
        seen.add(series)
        pages[-1].append(sample)
    return sorted((each for page in pages for each in readings(page, time_ns)), key=lambda reading: reading.time_ns)


class Metric(Struct, frozen=True):
    """One of `llm.get_metrics()`: a counter or gauge has a value, a vector values."""

    name: str
    labels: dict[str, str] = {}
    value: float | None = None
    values: list[Count] = []


class OverTime(Struct, frozen=True):
    """One of an answer of Prometheus: its last value, or its values over time."""

    metric: dict[str, str]
    value: tuple[float, str] | None = None
    values: list[tuple[float, str]] = []


def read_prometheus(value: Any, time_ns: int) -> list[Reading]:  # noqa: ANN401
    """The readings in what Prometheus answers to a query, in the order of time. Raises UnreadableError."""
    pages: defaultdict[float, list[Sample]] = defaultdict(list)
    for series in declared(value, list[OverTime]):
        for time, text in [*([series.value] if series.value else ()), *series.values]:
            try:
                number = float(text)
            except ValueError:
                raise UnreadableError(f"a value that is not a number ({short(text)})") from None
            pages[time].append(Sample(series.metric.get("__name__", ""), series.metric, number, time))
    return [reading for time in sorted(pages) for reading in readings(pages[time], time_ns)]


def read_get_metrics(values: Sequence[Any], time_ns: int) -> list[Reading]:
    """The readings in `llm.get_metrics()`, each engine by its labels. Raises UnreadableError."""
    samples = []
    for metric in (declared(value, Metric) for value in values if named(str(value.get("name", "")))):
        places = [Sample(metric.name, {**metric.labels, "position": str(at)}, n) for at, n in enumerate(metric.values)]
        samples += places or [Sample(metric.name, metric.labels, metric.value or 0.0)]
    return readings(samples, time_ns, "vLLM get_metrics()")


def readings(samples: Iterable[Sample], time_ns: int, source: str = "") -> list[Reading]:
    """A reading for each engine in the samples of one time. Raises UnreadableError."""
    known, telling, found = [], defaultdict[str, set[str]](set), dict[tuple[str, str, str], Reading]()
    for sample in samples:
        if V0 in sample.name:
            raise UnreadableError(NOT_V0)
        if (own := named(sample.name)) and not own[0].left_out.items() & sample.labels.items():
            known.append((*own, sample))
            telling[own[0].source] |= sample.labels.keys() if own[0].tells_engines(own[1]) else set()
    for names, name, sample in known:
        engine = _engine(names, sample.labels, sorted(telling[names.source]))
        key = (source or names.source, engine, sample.labels.get("model_name", ""))
        reading = found.setdefault(key, Reading(*key, _ns(sample, time_ns), six_digits=names.six_digits))
        reading.take(names, name, sample)
    for reading in found.values():
        if reading.counters.get("accepted", 0) > reading.counters.get("drafted", MOST):
            raise UnreadableError(f"more tokens accepted than drafted{f' by {reading.engine}' * bool(reading.engine)}")
    return [reading for reading in found.values() if reading.speculates]


def _ns(sample: Sample, otherwise: int) -> int:
    """When a sample was taken, nanoseconds. Raises UnreadableError."""
    seconds = float(sample.timestamp or 0)
    if not 0 <= seconds < 2**33:
        raise UnreadableError(f"an invalid time ({short(seconds)})")
    return int(seconds * 1e9) or otherwise


def _engine(names: Names, labels: Mapping[str, str], telling: Iterable[str]) -> str:
    """Which engine a sample belongs to. vLLM's own label goes without its name, and first."""
    parts = [
        f"{label} {labels[label]}"
        for label in telling
        if labels.get(label) not in (None, "", names.plain.get(label))
        and not WITHIN.fullmatch(label)
        and (label == names.rank or not label.endswith("_rank"))
    ]
    return " ".join(filter(None, (labels.get("engine", ""), *parts)))[:NAME]


def difference(before: Reading | None, after: Reading) -> ToldInterval:
    """What happened between two readings of one engine; before None: since its counters began."""
    reset = before is not None and _restarted(before, after)
    then = {} if before is None or reset else before.counters
    told = any(then.get(name) for name in SPECULATED)
    # a counter that is new counts from 0, but where the others had counted before it was told
    grown = {name: value - then.get(name, 0) for name, value in after.counters.items()}
    grown = {name: value for name, value in grown.items() if name in then or name not in SPECULATED or not told}
    at_depth = tuple(grown[position] for position in range(len(after.at_depth)))
    if after.six_digits and at_depth:
        grown["accepted"] = sum(at_depth)  # of smaller numbers, which are not rounded
    began = min(int(after.gauges.get("created", 0) * 1e9) or after.time_ns, after.time_ns)
    drafts, drafted = grown.get("drafts"), grown.get("drafted")
    if drafts is None or any(b > a for a, b in pairwise((drafts, *at_depth))):
        at_depth = ()  # the server counted on while it wrote its page
    aggregate = Aggregate(
        after.source,
        after.engine,
        **{name: grown[name] for name in COUNTS if name in grown},  # type: ignore[arg-type]
        accepted_at=at_depth,
        proposed_at=full_chains(drafts, drafted, len(at_depth)),
        **load_of(after.gauges.get("running"), after.gauges.get("waiting"), after.gauges.get("kv_usage", -1)),
        averages=dict(after.averages),
        reset=reset,
        rounded=after.six_digits and any(after.counters[name] >= ROUNDED_FROM for name in grown if name in COUNTS),
    )
    return ToldInterval(after.model, before.time_ns if before else max(began, 0), after.time_ns, aggregate)


def _restarted(before: Reading, after: Reading) -> bool:
    """Whether the counters of the second reading do not continue those of the first."""
    began = {reading.gauges["created"] for reading in (before, after) if "created" in reading.gauges}
    if len(began) > 1 or len(after.at_depth) < len(before.at_depth):
        return True
    return any(value < before.counters.get(name, 0) for name, value in after.counters.items())


def continues(before: Reading, after: Reading) -> bool:
    """Whether a second page of one server is the later: no counter is less, and one is more."""
    return not _restarted(before, after) and before.counters != after.counters


class Intervals:
    """Turns the readings of one server into the intervals between them."""

    def __init__(self, before: Iterable[Reading] = ()) -> None:
        self._last = {reading.key: reading for reading in before}

    def take(self, readings: Sequence[Reading]) -> list[ToldInterval]:
        intervals: list[ToldInterval] = []
        for reading in readings:
            if (before := self._last.get(reading.key)) is not None:
                if any(name in before.counters and name not in reading.counters for name in SPECULATED):
                    continue  # its page is not whole: the next one counts what happened since the last
                intervals.append(difference(before, reading))
            self._last[reading.key] = reading
        if len(self._last) > 4 * ENGINES:  # of a server that gives them new names again and again
            self._last = {reading.key: self._last[reading.key] for reading in readings}
        return intervals


def saved(readings: Sequence[Reading], since: Sequence[Reading] = ()) -> Iterator[ToldInterval]:
    """The intervals between an engine's readings; of one that is alone, what its counters count since they began.

    `since`: readings of before, from which the counters of these engines go on.
    """
    times, intervals = Counter(reading.key for reading in (*since, *readings)), Intervals(since)
    for reading in readings:
        yield from [difference(None, reading)] if times[reading.key] == 1 else intervals.take([reading])


def engines(readings: Iterable[Reading]) -> str:
    """The engines of these readings, in words."""
    names: dict[str, dict[str, None]] = defaultdict(dict)
    for reading in readings:
        names[reading.source][f"engine {reading.engine}" if reading.engine else ""] = None
    return "; ".join(", ".join([source, *filter(None, each)]) for source, each in names.items())
