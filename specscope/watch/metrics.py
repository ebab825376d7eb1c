"""Prometheus text to readings, and the difference of two readings of one engine to an Aggregate.

Counters are sums: their growth is what happened in the interval. Gauges are averages over the engine's own intervals,
and kept as averages. `names.py` has what each engine calls them.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise, zip_longest

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from specscope.trace.checked import short
from specscope.trace.record.aggregate import Aggregate, full_chains
from specscope.watch.counts import ENGINES, POSITIONS, ToldInterval, UnreadableError, count
from specscope.watch.names import BY_PREFIX, Names, named

LONGEST = 2**16  # characters of a line: the parser copies the rest of the line for each label
COARSE = 20  # of the last digit: an interval in which a rounded count grew by less goes on
ROUNDED_FROM = 10**6  # counts of a page of six digits


_NAMES = "|".join(map(re.escape, BY_PREFIX))
_OURS = re.compile(rf"^[ \t]*(?:#[ \t]+(?:HELP|TYPE)[ \t]+)?(?:{_NAMES}).*", re.MULTILINE)
_ANY = re.compile(r"^[ \t]*(?:#|[a-zA-Z_:][\w:]*(?:[ \t]|\{))", re.MULTILINE)


@dataclass
class Reading:
    """One engine's metrics at one time."""

    source: str
    engine: str
    model: str
    time_ns: int
    counters: dict[str, int] = field(default_factory=dict)
    accepted_at: dict[int, int] = field(default_factory=dict)  # by position, from 0
    gauges: dict[str, float] = field(default_factory=dict)
    averages: dict[str, float] = field(default_factory=dict)
    created: float | None = None  # when the counters began, seconds
    six_digits: bool = False  # counts from a million on are rounded

    @property
    def at_depth(self) -> tuple[int, ...]:
        """Accepted tokens by depth; empty where a position is missing."""
        known = sorted(self.accepted_at)
        return tuple(self.accepted_at[position] for position in known) if known == list(range(len(known))) else ()

    @property
    def speculates(self) -> bool:
        """Whether there is anything about speculation in it."""
        if {"drafts", "drafted"} & self.counters.keys():
            return True
        averages = [value for name, value in self.averages.items() if "spec_" in name]
        return any(averages) or (
            bool(averages) and not self.counters.get("emitted")
        )  # SGLang's are 0 without speculation

    @property
    def totals(self) -> dict[str, int]:
        """The counters, and what follows from the counts by position."""
        totals, accepted = dict(self.counters), self.at_depth
        if self.six_digits and accepted:
            totals["accepted"] = sum(accepted)  # of smaller numbers, which are not rounded
        return totals

    @property
    def rounded(self) -> bool:
        """Whether one of its counters is written with fewer digits than it has."""
        return self.six_digits and any(value >= ROUNDED_FROM for value in self.counters.values())


def read_metrics(text: str, time_ns: int) -> list[Reading]:
    """A reading for each engine in the text. Raises UnreadableError for text that is not a page of metrics."""
    readings: dict[tuple[str, str, str], Reading] = {}
    lines = _OURS.findall(text)  # a page may hold a million lines of others
    if not lines and text.strip() and not _ANY.search(text):
        raise UnreadableError(f"this is not Prometheus text ({short(text.strip())})")
    if any(len(line) > LONGEST for line in lines):
        raise UnreadableError(f"this is not Prometheus text: a line has more than {LONGEST:,} characters")
    try:
        for family in text_string_to_metric_families("".join(f"{line}\n" for line in lines)):
            for sample in family.samples:
                _take(sample, time_ns, readings)
    except UnreadableError:
        raise
    except (ValueError, KeyError, IndexError, TypeError) as error:  # of the parser: it raises any of these
        raise UnreadableError(f"this is not Prometheus text ({short(str(error))})") from None
    return [reading for reading in readings.values() if reading.speculates]


def _take(sample: Sample, time_ns: int, readings: dict[tuple[str, str, str], Reading]) -> None:
    labels, name, names = sample.labels, sample.name, named(sample.name)
    if (
        names is None
        or not _reads(names, name)
        or any(labels.get(label) == value for label, value in names.left_out.items())
    ):
        return
    key = (names.source, _engine(names, labels), labels.get("model_name", ""))
    reading = readings.setdefault(key, Reading(*key, time_ns=time_ns, six_digits=names.six_digits))
    if name in names.counters:
        counter = names.counters[name]
        reading.counters[counter] = reading.counters.get(counter, 0) + count(sample.value, name)
    elif name == names.accepted_at:
        position = _position(name, labels.get("position", ""))
        reading.accepted_at[position] = reading.accepted_at.get(position, 0) + count(sample.value, name)
    elif name == names.created:
        reading.created = sample.value
    elif not math.isfinite(sample.value):
        return  # a gauge that has no value yet
    elif name in names.gauges:
        reading.gauges[names.gauges[name]] = sample.value
    else:
        reading.averages[name] = sample.value


def _reads(names: Names, name: str) -> bool:
    alone = (names.accepted_at, names.created)
    return name in names.counters or name in names.gauges or name in names.averages or name in alone


def _position(name: str, position: str) -> int:
    """The index of a position. Raises UnreadableError."""
    if not position.isdecimal():
        raise UnreadableError(f"{name} has the position {position[:40]!r}")
    index = int(position[:9])
    if index >= POSITIONS:
        raise UnreadableError(f"{name} has more than {POSITIONS} positions")
    return index


def _engine(names: Names, labels: Mapping[str, str]) -> str:
    """Which engine of the page a sample belongs to. The first label alone goes without its name, as vLLM's `engine`."""
    given = {label: labels[label] for label in names.labels if labels.get(label)}
    parts = [
        value if label == "engine" else f"{label} {value}"
        for label, value in given.items()
        if names.plain.get(label) != value
    ]
    return " ".join(parts)


def difference(before: Reading | None, after: Reading) -> ToldInterval:
    """What happened between two readings of one engine; before None: since its counters began."""
    reset = before is not None and _restarted(before, after)
    past = None if before is None or reset else before
    then = past.totals if past else {}
    counts = {name: value - then.get(name, 0) for name, value in after.totals.items()}
    grown = zip_longest(past.at_depth if past else (), after.at_depth, fillvalue=0)
    at_depth = tuple(now - then for then, now in grown)  # a position appears when it is first counted
    began = after.time_ns if not after.created else min(int(after.created * 1e9), after.time_ns)
    drafts, drafted = counts.get("drafts"), counts.get("drafted")
    if drafts is None or any(b > a for a, b in pairwise((drafts, *at_depth))):
        at_depth = ()  # the server counted on while it wrote its page
    kv_usage = after.gauges.get("kv_usage")
    aggregate = Aggregate(
        source=after.source,
        engine=after.engine,
        drafts=drafts,
        drafted=drafted,
        accepted=counts.get("accepted"),
        emitted=counts.get("emitted"),
        requests=counts.get("requests"),
        accepted_at=at_depth,
        proposed_at=full_chains(drafts, drafted, len(at_depth)),
        running=_whole(after.gauges.get("running")),
        waiting=_whole(after.gauges.get("waiting")),
        kv_usage=kv_usage if kv_usage is not None and 0 <= kv_usage <= 1 else None,
        averages=dict(after.averages),
        reset=reset,
        rounded=after.rounded,
    )
    return ToldInterval(after.model, before.time_ns if before else max(began, 0), after.time_ns, aggregate)


def _restarted(before: Reading, after: Reading) -> bool:
    """Whether the counters of the second reading do not continue those of the first."""
    if before.created is not None and after.created is not None and before.created != after.created:
        return True
    if len(after.at_depth) < len(before.at_depth):
        return True
    pairs = [(before.counters.get(name, 0), value) for name, value in after.counters.items()]
    pairs += zip_longest(before.at_depth, after.at_depth, fillvalue=0)  # a position appears when it is first counted
    return any(now < then for then, now in pairs)


def _lost_in_rounding(before: Reading, after: Reading) -> bool:
    """Whether something was drafted between them, and less than a page of six digits shows."""
    if not after.six_digits:
        return False
    then, now = before.totals, after.totals
    grown = {name: now[name] - then.get(name, 0) for name in ("drafts", "drafted") if name in now}
    if before.accepted_at == after.accepted_at and not any(grown.values()):
        return False
    return any(
        now[name] >= ROUNDED_FROM and 0 <= growth < COARSE * 10 ** (len(str(now[name])) - 6)
        for name, growth in grown.items()
    )


def _whole(value: float | None) -> int | None:
    return int(value) if value is not None and 0 <= value < 2**31 else None


class Intervals:
    """Turns the readings of one server into the intervals between them."""

    def __init__(self) -> None:
        self._last: dict[tuple[str, str, str], Reading] = {}

    def take(self, readings: Iterable[Reading]) -> list[ToldInterval]:
        """The intervals that these readings end; the first reading of an engine ends none."""
        intervals: list[ToldInterval] = []
        known: set[tuple[str, str, str]] = set()
        for reading in readings:
            key = (reading.source, reading.engine, reading.model)
            known.add(key)
            before = self._last.get(key)
            if before is not None and _lost_in_rounding(before, reading):
                continue
            if before is not None:
                intervals.append(difference(before, reading))
            self._last[key] = reading
        if len(self._last) > 4 * ENGINES:  # of a server that gives them new names again and again
            self._last = {key: self._last[key] for key in known}
        return intervals


def engines(readings: Iterable[Reading]) -> str:
    """The engines of these readings, in words."""
    names: dict[str, list[str]] = defaultdict(list)
    for reading in readings:
        names[reading.source].append(" ".join(part for part in ("engine", reading.engine) if reading.engine))
    return "; ".join(", ".join([source, *filter(None, each)]) for source, each in names.items())
