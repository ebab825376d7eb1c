"""What a request's step says of the engine's step that it was part of, so that its trace stands by itself.

One attribute of short text, because every step has it: `batch=3 kv=12/1444 ns=73900,2302/12963,1692/32255`. A count
that is absent is 0, and `running` is the batch. Of each phase it has the length in nanoseconds, before it the gap after
the phase before, where there is one; the first begins with the span. Phases have names (`ns=load:73900`) where they are
others than PHASES, in this order. The drafter's passes, an asynchronous step's flight
and a device's times are told by the engine step's own span alone.
"""

from __future__ import annotations

from itertools import zip_longest
from typing import Annotated, Any
from urllib.parse import quote, unquote

import msgspec
from msgspec import Meta, Struct, field

from specscope.trace.record.declared import Count, Int64, Name, Short, Time
from specscope.trace.record.records import PHASES, Phase, StepRecord
from specscope.trace.wire.codec import DamagedError, check_times, plain_error
from specscope.trace.wire.schema import ENGINE

NO_TIMES = "unknown"  # the one phase of a step of which nothing but its start and end is known


class EngineNotes(Struct, frozen=True, forbid_unknown_fields=True):
    """The text, read."""

    batch: Count  # requests that took part
    phases: Annotated[tuple[tuple[Name, Int64, Time], ...], Meta(min_length=1, max_length=64)]  # name, gap, length
    running: Count | None = None
    waiting: Count = 0
    blocks_used: Count = field(name="used", default=0)
    blocks_free: Count = field(name="free", default=0)
    blocks_cached: Count = field(name="cached", default=0)
    queried: Count = 0
    budget: Count | None = None
    after: Annotated[int, Meta(ge=-1, lt=2**53)] | None = None
    rewound: bool = False
    off: Short | None = None  # why nothing was drafted; None where drafting was on

    def fields(self, start_ns: int) -> dict[str, Any]:
        """The fields of a StepRecord that began then. Raises DamagedError."""
        phases, begin = [], start_ns
        for name, gap, length in self.phases:
            phases.append(Phase(name, begin + gap, begin + gap + length))
            begin = phases[-1].end_ns
            check_times(phases[-1].start_ns, begin)
        told = {name: getattr(self, name) for name in self.__struct_fields__ if name not in ("batch", "off")}
        running = self.batch if self.running is None else self.running
        off = {"speculation": self.off is None, "speculation_off": self.off or ""}
        return {**told, **off, "running": running, "phases": tuple(phases)}


def engine_text(record: StepRecord) -> str:
    """The text of a step."""
    counts = {
        "running": record.running if record.running != record.batch else None,
        "waiting": record.waiting or None,
        "kv": f"{record.blocks_used}/{record.blocks_free}",
        "cached": record.blocks_cached or None,
        "queried": record.queried or None,
        "budget": record.budget,
        "after": record.after,
        "rewound": int(record.rewound) or None,
        "off": None if record.speculation else quote(record.speculation_off, errors="replace"),
    }
    words = {"batch": record.batch} | {name: value for name, value in counts.items() if value is not None}
    times, last = [], record.start_ns
    usual = tuple(phase.name for phase in record.phases) == PHASES
    for phase in record.phases:
        name = "" if usual else f"{quote(phase.name, safe='', errors='replace')}:"
        gap = f"{phase.start_ns - last}/" if phase.start_ns != last else ""
        times.append(f"{name}{gap}{phase.end_ns - phase.start_ns}")
        last = phase.end_ns
    return " ".join(f"{name}={value}" for name, value in {**words, "ns": ",".join(times)}.items())


def read_engine(text: str) -> EngineNotes:
    """The text, checked. Raises DamagedError."""
    words: dict[str, Any] = dict(word.partition("=")[::2] for word in text.split(" "))
    words["used"], _, words["free"] = words.pop("kv", "0/0").partition("/")
    if "off" in words:
        words["off"] = unquote(words["off"])
    words["phases"] = []
    for phase, usual in zip_longest(words.pop("ns", "").split(","), PHASES):
        if phase is None:
            break
        name, _, times = phase.rpartition(":")
        gap, _, length = times.rpartition("/")
        words["phases"].append((unquote(name) or usual, gap or "0", length))
    try:
        return msgspec.convert(words, EngineNotes, strict=False)
    except msgspec.ValidationError as error:
        raise DamagedError(f"`{ENGINE}`: {plain_error(error)}") from None
