"""Aggregates in spans: the attributes of their engine_step, and what those must look like when they are read."""

from __future__ import annotations

from itertools import pairwise
from typing import Annotated, Any

from msgspec import Meta, field

from specscope.trace.record.aggregate import Aggregate
from specscope.trace.wire.schema import EngineStep, Name, Short

PREFIX = "specscope.aggregate."
MAX_DEPTH = 4096  # positions
MAX_AVERAGES = 256

Sum = Annotated[int, Meta(ge=0, lt=2**53)]
AtDepth = Annotated[list[Sum], Meta(max_length=MAX_DEPTH)]
Share = Annotated[float, Meta(ge=0, le=1)]
Value = Annotated[float, Meta(ge=-1e300, le=1e300)]


def attributes(told: Aggregate) -> dict[str, Any]:
    """What an engine_step span says of an aggregate: nothing of what is not told."""
    plain: dict[str, Any] = {
        **{name: getattr(told, name) for name in ("engine", "request")},
        **{name: list(getattr(told, name)) for name in ("accepted_at", "proposed_at")},
        "averages": list(told.averages),
        "average_values": [float(value) for value in told.averages.values()],
        **{name: getattr(told, name) or None for name in ("reset", "rounded")},
    }
    counts = {name: getattr(told, name) for name in ("drafts", "drafted", "accepted", "emitted", "running", "waiting")}
    kept = {name: value for name, value in plain.items() if value} | {k: v for k, v in counts.items() if v is not None}
    if told.kv_usage is not None:
        kept["kv_usage"] = float(told.kv_usage)
    return {PREFIX + name: value for name, value in {"source": told.source, **kept}.items()}


class AggregateStep(EngineStep, frozen=True, kw_only=True):
    """An engine step that is an interval, with its counts."""

    source: Name = field(name=PREFIX + "source")
    engine: Short = field(name=PREFIX + "engine", default="")
    request: Short = field(name=PREFIX + "request", default="")
    drafts: Sum | None = field(name=PREFIX + "drafts", default=None)
    drafted: Sum | None = field(name=PREFIX + "drafted", default=None)
    accepted: Sum | None = field(name=PREFIX + "accepted", default=None)
    emitted: Sum | None = field(name=PREFIX + "emitted", default=None)
    accepted_at: AtDepth = field(name=PREFIX + "accepted_at", default_factory=list)
    proposed_at: AtDepth = field(name=PREFIX + "proposed_at", default_factory=list)
    told_running: Sum | None = field(name=PREFIX + "running", default=None)
    told_waiting: Sum | None = field(name=PREFIX + "waiting", default=None)
    kv_usage: Share | None = field(name=PREFIX + "kv_usage", default=None)
    averages: Annotated[list[Name], Meta(max_length=MAX_AVERAGES)] = field(
        name=PREFIX + "averages", default_factory=list
    )
    average_values: Annotated[list[Value], Meta(max_length=MAX_AVERAGES)] = field(
        name=PREFIX + "average_values", default_factory=list
    )
    reset: bool = field(name=PREFIX + "reset", default=False)
    rounded: bool = field(name=PREFIX + "rounded", default=False)

    def weight(self) -> int:
        """As of the others."""
        return super().weight() + 16 * (len(self.accepted_at) + len(self.proposed_at)) + 100 * len(self.averages)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.accepted_at:
            self._check_positions()
        elif self.proposed_at:
            raise ValueError(f"`{PREFIX}proposed_at` without `{PREFIX}accepted_at`")
        if len(self.averages) != len(self.average_values) or len(set(self.averages)) != len(self.averages):
            raise ValueError(f"`{PREFIX}average_values` are not one for each name in `{PREFIX}averages`")

    def _check_positions(self) -> None:
        if self.drafts is None or max(self.accepted_at) > self.drafts:
            raise ValueError(f"`{PREFIX}accepted_at` counts more than `{PREFIX}drafts`")
        if any(after > before for before, after in pairwise(self.accepted_at)):
            raise ValueError(f"`{PREFIX}accepted_at` rises: a token is accepted only after the one before it")
        if self.proposed_at and len(self.proposed_at) != len(self.accepted_at):
            raise ValueError(f"`{PREFIX}proposed_at` holds {len(self.proposed_at)} values, not {len(self.accepted_at)}")

    def told(self) -> Aggregate:
        """The record's form."""
        return Aggregate(
            source=self.source,
            engine=self.engine,
            request=self.request,
            drafts=self.drafts,
            drafted=self.drafted,
            accepted=self.accepted,
            emitted=self.emitted,
            accepted_at=tuple(self.accepted_at),
            proposed_at=tuple(self.proposed_at),
            running=self.told_running,
            waiting=self.told_waiting,
            kv_usage=self.kv_usage,
            averages=dict(zip(self.averages, self.average_values, strict=True)),
            reset=self.reset,
            rounded=self.rounded,
        )
