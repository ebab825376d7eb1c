"""The cached KV of a request beside KV computed afresh: what was found, as values and as text. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from specscope.trace.history.wording import plural
from specscope.trace.record.vocabulary import Vocabulary, printable

SHOWN = 8  # places that differ


@dataclass(frozen=True)
class KVPlace:
    """A place of a cache that does not hold what it should. Filled by live/check_kv.py."""

    position: int
    token: int  # the token whose KV it is
    slot: int | None  # None: the request's block table does not reach so far
    layer: int  # where the difference is largest
    apart: float  # of key or value, relative to its norm


@dataclass(frozen=True)
class KVCompared:
    model: str  # target, or drafter NAME
    places: int
    largest: float  # difference over all places
    tolerance: float
    differ: tuple[KVPlace, ...]  # all that do, by position

    @property
    def right(self) -> set[int]:
        return {*range(self.places)} - {place.position for place in self.differ}


@dataclass(frozen=True)
class KVCheck:
    request: str
    compared: tuple[KVCompared, ...]
    without: str = ""  # why there is nothing to compare of the drafter


def kv_check_text(check: KVCheck, vocabulary: Vocabulary, before: KVCheck | None = None, steps: str = "") -> str:
    """The check as text: what agrees, and the first places that do not. `before`: an earlier one; `steps`: of both."""
    right = {} if before is None else {cache.model: cache.right for cache in before.compared}
    lines = []
    for cache in check.compared:
        count = plural(cache.places, "place")
        if not cache.places:
            lines.append(f"{cache.model}: nothing of {printable(check.request)} is cached")
        elif not cache.differ:
            lines.append(f"{cache.model}: {cache.places} of {count} agree (largest difference {cache.largest:.1e})")
        else:
            worst = f" (largest difference {cache.largest:.2g}, tolerance {cache.tolerance:g})" if cache.largest else ""
            lines.append(f"{cache.model}: {len(cache.differ)} of {count} DIFFER from recomputed KV{worst}")
            lines += [_place(place, vocabulary) for place in cache.differ[:SHOWN]]
            more = len(cache.differ) - SHOWN
            lines += [f"  and {plural(more, 'more place')}"] if more > 0 else []
            if changed := [place.position for place in cache.differ if place.position in right.get(cache.model, ())]:
                lines.append(f"  changed {steps}: {plural(len(changed), 'place')}, the first at position {changed[0]}")
    return "\n".join([*lines, *([check.without] if check.without else [])])


def _place(place: KVPlace, vocabulary: Vocabulary) -> str:
    what = f"slot {place.slot}, most in layer {place.layer}, by {place.apart:.2g}"
    what = "counted as computed, but in no block" if place.slot is None else what
    return f"  position {place.position} {vocabulary.show(place.token)}: {what}"
