"""Prometheus text to readings, and the difference of two readings of one engine to an Aggregate.

vLLM has counters: their growth is what happened in the interval. SGLang has gauges: averages over its own intervals,
kept as averages.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise, zip_longest

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from specscope.trace.checked import short
from specscope.trace.record.aggregate import Aggregate, full_chains
from specscope.watch.told import ENGINES, POSITIONS, ToldInterval, UnreadableError, count

VLLM, SGLANG = "vLLM /metrics", "SGLang /metrics"

COUNTERS = {
    "vllm:spec_decode_num_drafts_total": "drafts",
    "vllm:spec_decode_num_draft_tokens_total": "drafted",
    "vllm:spec_decode_num_accepted_tokens_total": "accepted",
    "vllm:generation_tokens_total": "emitted",
}
PER_POSITION = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
CREATED = "vllm:spec_decode_num_drafts_created"
GAUGES = {
    "vllm:num_requests_running": "running",
    "vllm:num_requests_waiting": "waiting",
    "vllm:kv_cache_usage_perc": "kv_usage",
    "vllm:gpu_cache_usage_perc": "kv_usage",  # before 0.11
    "sglang:num_running_reqs": "running",
    "sglang:num_queue_reqs": "waiting",
    "sglang:token_usage": "kv_usage",
}
AVERAGES = (
    "sglang:spec_accept_length",
    "sglang:spec_accept_rate",
    "sglang:spec_cap_length",
    "sglang:spec_block_accept_length",
    "sglang:spec_num_steps",
    "sglang:spec_num_draft_tokens",
    "sglang:gen_throughput",
)
LONGEST = 2**16  # characters of a line: the parser copies the rest of the line for each label
RANKS = ("dp_rank", "tp_rank", "pp_rank", "engine_type")  # labels that distinguish SGLang's schedulers


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

    @property
    def at_depth(self) -> tuple[int, ...]:
        """Accepted tokens by depth; empty where a position is missing."""
        known = sorted(self.accepted_at)
        return tuple(self.accepted_at[position] for position in known) if known == list(range(len(known))) else ()

    @property
    def speculates(self) -> bool:
        """Whether there is anything about speculation in it."""
        return "drafts" in self.counters or any(name.startswith("sglang:spec_accept") for name in self.averages)


def read_metrics(text: str, time_ns: int) -> list[Reading]:
    """A reading for each engine in the text. Raises UnreadableError for text that is not a page of metrics."""
    readings: dict[tuple[str, str, str], Reading] = {}
    if any(len(line) > LONGEST for line in text.split("\n")):
        raise UnreadableError(f"this is not Prometheus text: a line has more than {LONGEST:,} characters")
    try:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                _take(sample, time_ns, readings)
    except UnreadableError:
        raise
    except (ValueError, KeyError, IndexError, TypeError) as error:  # of the parser: it raises any of these
        raise UnreadableError(f"this is not Prometheus text ({short(str(error))})") from None
    return [reading for reading in readings.values() if reading.speculates]


def _take(sample: Sample, time_ns: int, readings: dict[tuple[str, str, str], Reading]) -> None:
    name, labels = sample.name, sample.labels
    known = name in COUNTERS or name in GAUGES or name in AVERAGES or name in (PER_POSITION, CREATED)
    if not known:
        return
    key = _engine(name, labels)
    reading = readings.setdefault(key, Reading(*key, time_ns=time_ns))
    if name in COUNTERS:
        counter = COUNTERS[name]
        reading.counters[counter] = reading.counters.get(counter, 0) + count(sample.value, name)
    elif name == PER_POSITION:
        position = labels.get("position", "")
        if not position.isdecimal():
            raise UnreadableError(f"{name} has the position {position[:40]!r}")
        index = int(position[:9])
        if index >= POSITIONS:
            raise UnreadableError(f"{name} has more than {POSITIONS} positions")
        reading.accepted_at[index] = reading.accepted_at.get(index, 0) + count(sample.value, name)
    elif name == CREATED:
        reading.created = sample.value
    elif not math.isfinite(sample.value):
        return  # a gauge that has no value yet
    elif name in GAUGES:
        reading.gauges[GAUGES[name]] = sample.value
    else:
        reading.averages[name] = sample.value


def _engine(name: str, labels: Mapping[str, str]) -> tuple[str, str, str]:
    """(source, engine, model) that a sample belongs to."""
    model = labels.get("model_name", "")
    if name.startswith("vllm:"):
        return VLLM, labels.get("engine", ""), model
    return SGLANG, " ".join(f"{rank} {labels[rank]}" for rank in RANKS if labels.get(rank)), model


def difference(before: Reading | None, after: Reading) -> ToldInterval:
    """What happened between two readings of one engine; before None: since its counters began."""
    reset = before is not None and _restarted(before, after)
    past = None if before is None or reset else before
    counts = {name: value - (past.counters.get(name, 0) if past else 0) for name, value in after.counters.items()}
    at_depth = after.at_depth
    if past is not None:
        at_depth = tuple(now - then for then, now in zip_longest(past.at_depth, at_depth, fillvalue=0))
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
        accepted_at=at_depth,
        proposed_at=full_chains(drafts, drafted, len(at_depth)) if at_depth else (),
        running=_whole(after.gauges.get("running")),
        waiting=_whole(after.gauges.get("waiting")),
        kv_usage=kv_usage if kv_usage is not None and 0 <= kv_usage <= 1 else None,
        averages=dict(after.averages),
        reset=reset,
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
            if key in self._last:
                intervals.append(difference(self._last[key], reading))
            self._last[key] = reading
            known.add(key)
        if len(self._last) > 4 * ENGINES:  # of a server that gives them new names again and again
            self._last = {key: self._last[key] for key in known}
        return intervals


def engines(readings: Iterable[Reading]) -> str:
    """The engines of these readings, in words."""
    names: dict[str, list[str]] = defaultdict(list)
    for reading in readings:
        names[reading.source].append(" ".join(part for part in ("engine", reading.engine) if reading.engine))
    return "; ".join(", ".join([source, *filter(None, each)]) for source, each in names.items())
