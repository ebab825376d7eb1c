"""What the comparison's screens show: plain values that `specscope compare` fills, so that screens need no analysis."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

from specscope.trace.record.records import RequestStep
from specscope.trace.record.vocabulary import Vocabulary


@dataclass(frozen=True)
class ComparedPair:
    """A pair of requests, one from each side."""

    number: int  # its place in the comparison
    a: str
    b: str
    title: str
    tokens: tuple[int, int]
    tau: tuple[float | None, float | None]
    at: int | None  # output tokens before they part; None where the outputs are the same
    cause: str  # why they part, in a word; "" where they do not
    about: str  # the same in a sentence
    other: int | None  # output tokens before the first decision that differs; None where none does before they part


@dataclass(frozen=True)
class KnownCause:
    """Something that can make two outputs part."""

    name: str  # in a word, as ComparedPair.cause has it
    about: str
    harmless: bool  # whether it is to be expected, and no fault of either side


@dataclass(frozen=True)
class Compared:
    """A comparison."""

    sources: tuple[str, str]
    answer: str  # same, different, or anything else
    summary: str
    headline: str  # the acceptance length of both sides, its change and what is known of it
    reasons: tuple[str, ...]
    missing: tuple[str, ...]  # what was not compared, and why
    differences: tuple[tuple[str, str, str, str], ...]  # what, A, B, what it leads to
    undiffering: str  # what is said of the configuration where it has no differences
    changed: tuple[tuple[str, ...], ...]  # what changed most: what, A, B, B - A, interval, drafts, * or ""
    pairs: tuple[ComparedPair, ...]
    unpaired: str  # why there is none; "" where there is one
    vocabularies: tuple[Vocabulary, Vocabulary]
    dtypes: tuple[str, str]
    causes: tuple[KnownCause, ...]  # all that there are
    steps: Callable[[ComparedPair], tuple[list[RequestStep], list[RequestStep]]]  # decode steps of both sides


@dataclass(frozen=True)
class PairRow:
    """A place in the output at which a step of either side begins."""

    place: int  # output tokens before it
    parts: tuple[int | None, int | None]  # the steps that begin there


@dataclass(frozen=True)
class Beside:
    """Both sides of a pair, laid out by place in the output: steps do not line up where acceptance differs."""

    a: Sequence[RequestStep]
    b: Sequence[RequestStep]

    @cached_property
    def places(self) -> tuple[list[int], list[int]]:
        """Output tokens before each step."""
        return _places(self.a), _places(self.b)

    @cached_property
    def rows(self) -> list[PairRow]:
        """The rows in the order of the output."""
        index = [dict(zip(places, range(len(places)), strict=True)) for places in self.places]
        return [PairRow(place, (index[0].get(place), index[1].get(place))) for place in sorted({*index[0], *index[1]})]

    def part(self, side: int, place: int) -> int | None:
        """The step of a side that covers a place in the output."""
        index = bisect_right(self.places[side], place) - 1
        return index if index >= 0 else None

    def row_of(self, place: int) -> int:
        """The last row at or before a place."""
        return max(bisect_right([row.place for row in self.rows], place) - 1, 0)


def _places(steps: Sequence[RequestStep]) -> list[int]:
    places, done = [], 0
    for step in steps:
        places.append(done)
        done += step.emitted
    return places
