"""Aggregates in spans: the attributes of their engine_step, and what those must look like when they are read."""

from __future__ import annotations

from itertools import pairwise
from typing import Annotated, Any

from msgspec import Meta, field

from specscope.trace.record.aggregate import Aggregate
from specscope.trace.record.declared import Name, Value
from specscope.trace.wire.codec import checks, first, read, written
from specscope.trace.wire.schema import EngineStep

PREFIX = "specscope.aggregate."
MAX_AVERAGES = 256
FIRST = ("source", "engine", "request", "accepted_at", "proposed_at", "averages", "average_values", "reset", "rounded")


def attributes(aggregate: Aggregate) -> dict[str, Any]:
    """The attributes of an aggregate in its engine_step span: only what the source reports."""
    averages: dict[str, Any] = {}
    if aggregate.averages:
        values = [float(value) for value in aggregate.averages.values()]
        averages = {PREFIX + "averages": list(aggregate.averages), PREFIX + "average_values": values}
    return first([PREFIX + name for name in FIRST], written(aggregate, by_hand={"averages": averages}))


@checks(Aggregate)
class AggregateStep(EngineStep, frozen=True, kw_only=True):
    """An engine step that is an interval, with its counts."""

    averages: Annotated[list[Name], Meta(max_length=MAX_AVERAGES)] = field(
        name=PREFIX + "averages", default_factory=list
    )
    average_values: Annotated[list[Value], Meta(max_length=MAX_AVERAGES)] = field(
        name=PREFIX + "average_values", default_factory=list
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.averages) != len(self.average_values) or len(set(self.averages)) != len(self.averages):
            raise ValueError(f"`{PREFIX}average_values` are not one for each name in `{PREFIX}averages`")
        aggregate = self.told()
        if aggregate.accepted_at:
            _check_positions(aggregate)
        elif aggregate.proposed_at:
            raise ValueError(f"`{PREFIX}proposed_at` without `{PREFIX}accepted_at`")

    def told(self) -> Aggregate:
        """The Aggregate that these attributes describe."""
        averages = dict(zip(self.averages, self.average_values, strict=True))
        return read(self, Aggregate, {"averages": averages})


def _check_positions(aggregate: Aggregate) -> None:
    if aggregate.drafts is None or max(aggregate.accepted_at) > aggregate.drafts:
        raise ValueError(f"`{PREFIX}accepted_at` counts more than `{PREFIX}drafts`")
    if any(after > before for before, after in pairwise(aggregate.accepted_at)):
        raise ValueError(f"`{PREFIX}accepted_at` rises: a token is accepted only after the one before it")
    if aggregate.proposed_at and len(aggregate.proposed_at) != len(aggregate.accepted_at):
        raise ValueError(
            f"`{PREFIX}proposed_at` holds {len(aggregate.proposed_at)} values, not {len(aggregate.accepted_at)}"
        )
