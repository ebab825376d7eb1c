"""What a source reports: an aggregate, its interval, and its engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from specscope.trace.record.aggregate import Aggregate

ENGINES = 64  # that are distinguished: a page or log names them, and each has a capture
POSITIONS = 256  # of a draft
MOST = 2**53  # of any count: beyond it a float, which metrics are, no longer distinguishes consecutive integers


class UnreadableError(ValueError):
    """A reading, a line or a response that cannot be read. The message is one line."""


@dataclass(frozen=True)
class ToldInterval:
    """One interval of one engine. `aggregate.engine` says which, together with the model."""

    model: str  # "" where the source does not name it
    start_ns: int  # wall clock
    end_ns: int
    aggregate: Aggregate


def make_room(known: dict[Any, Any], name: object) -> None:
    """Make room for one more name: with too many, the oldest is removed."""
    if name not in known and len(known) >= ENGINES:
        del known[next(iter(known))]


def count(value: float, name: str) -> int:
    """A count that came as a float. Raises UnreadableError."""
    if not 0 <= value < MOST or value != int(value):
        raise UnreadableError(f"{name} is {value}, which is no count")
    return int(value)
