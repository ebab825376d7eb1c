"""What a source reports: intervals of an engine, and counts, which some of them round or tell in other forms."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from specscope.trace.record.aggregate import LENGTH, Aggregate, full_chains
from specscope.trace.wire.codec import plain_error

ENGINES = 64  # that are distinguished: a page or log names them, and each has a capture
POSITIONS = 256  # of a draft
MOST = 2**53  # of any count: beyond it a float, which metrics are, no longer distinguishes consecutive integers
DIGITS = 20  # characters of a rate
MOST_TRIED = 20_000  # numbers of drafts that are tried
NAME = 1000  # characters of an engine, a model, a request

Count = Annotated[int, Meta(ge=0, lt=MOST)]
Value = Annotated[float, Meta(ge=0, lt=MOST)]
Drafts = Counter[tuple[int, int]]  # how many, by (accepted, drafted) tokens


class UnreadableError(ValueError):
    """A reading, a line or a response that cannot be read. The message is one line."""


@dataclass(frozen=True)
class ToldInterval:
    """One interval of one engine. `aggregate.engine` says which, together with the model."""

    model: str  # "" where the source does not name it
    start_ns: int  # wall clock
    end_ns: int
    aggregate: Aggregate

    def of(self, *names: str, source: str = "") -> ToldInterval:
        """The same, of the engine that has these names."""
        engine = " ".join(filter(None, names))[:NAME]
        return replace(self, aggregate=replace(self.aggregate, engine=engine, source=source or self.aggregate.source))


def make_room(known: dict[Any, Any], name: object) -> None:
    """Make room for one more name: with too many, the oldest is removed."""
    if name not in known and len(known) >= ENGINES:
        del known[next(iter(known))]


def count(value: float, name: str) -> int:
    """A count that came as a float. Raises UnreadableError."""
    if not 0 <= value < MOST or value != int(value):
        raise UnreadableError(f"{name} is {value}, which is not a count")
    return int(value)


def load_of(running: float | str | None, waiting: float | str | None, kv_usage: float) -> dict[str, Any]:
    """An Aggregate's load; without what is no number of requests, or no share."""
    told = {"running": running, "waiting": waiting}
    known = {name: int(float(each)) for name, each in told.items() if each is not None and 0 <= float(each) < 2**31}
    return known | ({"kv_usage": kv_usage} if 0 <= kv_usage <= 1 else {})


def declared(value: Any, kind: Any) -> Any:  # noqa: ANN401
    """A value of a declared type. Raises UnreadableError."""
    try:
        return msgspec.convert(value, kind, strict=True)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise UnreadableError(plain_error(error)) from None


def of_drafts(drafts: Drafts) -> dict[str, Any]:
    """The counts of an Aggregate over these drafts."""
    deepest = max((drafted for _, drafted in drafts), default=0)
    accepted_at, proposed_at = (
        tuple(sum(times for pair, times in drafts.items() if pair[side] >= depth) for depth in range(1, deepest + 1))
        for side in (0, 1)
    )
    sums = {"drafts": drafts.total(), "accepted": sum(accepted_at), "drafted": sum(proposed_at)}
    return {**sums, "accepted_at": accepted_at, "proposed_at": proposed_at}


def rates_of(text: str, line: str) -> tuple[str, ...]:
    """The rates by position that a line has, as written. Raises UnreadableError that names the kind of line."""
    rates = tuple(part.strip() for part in text.strip(", ").split(",", POSITIONS))
    if len(rates) > POSITIONS:
        raise UnreadableError(f"a `{line}` line of more than {POSITIONS} positions")
    try:
        if max(map(len, rates)) > DIGITS:
            raise ValueError
        values = [float(rate) for rate in rates]
    except ValueError:
        raise UnreadableError(f"a `{line}` line whose rates are not numbers") from None
    if any(not 0 <= value <= before for before, value in pairwise((1.0, *values))):
        raise UnreadableError(f"a `{line}` line whose rates by position rise or are not between 0 and 1")
    return rates


def worked_out(
    source: str, accepted: int, drafted: int, length: str, rates: Sequence[str], shown: int = POSITIONS
) -> Aggregate:
    """The counts that fit these tokens, a mean length as written and rates by position, of which `shown` are there."""
    drafts, alone = work_out(accepted, drafted, length, rates) if length else (None, False)
    at_depth = () if drafts is None else tuple(round(float(rate) * drafts) for rate in rates[:shown])
    return Aggregate(
        source,
        drafts=drafts,
        drafted=drafted,
        accepted=accepted,
        accepted_at=at_depth,
        proposed_at=full_chains(drafts, drafted, len(at_depth)) if at_depth else (),
        averages={LENGTH: float(length)} if length else {},
        rounded=drafts is not None and not alone,
    )


def work_out(accepted: int, drafted: int, length: str, rates: Sequence[str]) -> tuple[int | None, bool]:
    """(the number of drafts that fits these figures best, whether no other fits); None where none does."""
    if not drafted:
        return (None, False) if accepted else (0, True)
    smallest, largest = max(-(-drafted // max(len(rates), 1)) if rates else 1, 1), drafted
    digits = len(length.partition(".")[2])
    over, half = float(length) - 1, 0.5 / 10**digits
    if accepted:
        smallest = max(smallest, int(accepted / (over + half)))
        largest = min(largest, int(accepted / (over - half)) + 1) if over > half else largest
    elif not rates:
        return None, False
    else:  # nothing was accepted, so the number of drafts is not known: all of full length is the fewest
        return (smallest, smallest == largest) if float(length) == 1 else (None, False)
    if largest - smallest > MOST_TRIED:  # so many that any of them is within the rounding
        return min(max(round(accepted / over), smallest), largest) if over > 0 else None, False
    fitting = [n for n in range(smallest, largest + 1) if _fits(n, accepted, length, digits, rates)]
    if not fitting:
        return None, False
    full = drafted // len(rates) if rates and drafted % len(rates) == 0 else 0
    best = full if full in fitting else min(fitting, key=lambda n: abs(n - accepted / over) if over > 0 else n)
    return best, len(fitting) == 1


def _fits(drafts: int, accepted: int, length: str, digits: int, rates: Sequence[str]) -> bool:
    """Whether this number of drafts gives these figures, digit for digit."""
    if f"{1 + accepted / drafts:.{digits}f}" != length:
        return False
    counts = []
    for rate in rates:
        counts.append(round(float(rate) * drafts))
        if f"{counts[-1] / drafts:.{len(rate.partition('.')[2])}f}" != rate:
            return False
    return drafts >= 1000 or not rates or sum(counts) == accepted  # with more, a rate stands for several counts
