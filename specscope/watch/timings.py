"""llama.cpp's `timings`, in its answers and in the chunks of its streams.

An answer has sums. With `timings_per_token`, each chunk has the sums until then: every draft is a difference of two,
as long as there is a chunk for each token.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Annotated

from msgspec import Meta, Struct

from specscope.trace.record.aggregate import Aggregate
from specscope.watch.llamacpp import Drafts, by_depth, sums
from specscope.watch.told import MOST, POSITIONS, UnreadableError

SOURCE = "llama.cpp response"

_Count = Annotated[int, Meta(ge=0, lt=MOST)]


class Timings(Struct, frozen=True):
    """Sums of a request until now. A request without drafts has neither of the last two."""

    predicted_n: _Count  # output tokens
    draft_n: _Count = 0
    draft_n_accepted: _Count = 0


@dataclass
class ChunkDrafts:
    """The drafts of a stream, taken chunk by chunk."""

    drafts: Drafts = field(default_factory=Counter)
    exact: bool = True  # whether no chunk holds more than one step
    _last: Timings = field(default_factory=lambda: Timings(0))

    def take(self, timings: Timings) -> None:
        """The sums of the next chunk."""
        drafted = timings.draft_n - self._last.draft_n
        accepted = timings.draft_n_accepted - self._last.draft_n_accepted
        fits = 0 <= accepted <= drafted <= POSITIONS and 0 <= timings.predicted_n - self._last.predicted_n <= 1
        self.exact &= fits
        if fits and drafted:
            self.drafts[accepted, drafted] += 1
        self._last = timings


def of_llamacpp(timings: Timings, chunks: ChunkDrafts | None = None) -> Aggregate:
    """The counts of a request. Raises UnreadableError where they contradict each other."""
    accepted, drafted = timings.draft_n_accepted, timings.draft_n
    if accepted > drafted:
        raise UnreadableError(f"timings with {accepted} of {drafted} draft tokens accepted")
    known = chunks is not None and chunks.exact and sums(chunks.drafts) == (accepted, drafted)
    drafts = chunks.drafts if chunks is not None and known else Counter[tuple[int, int]]()
    accepted_at, proposed_at = by_depth(drafts)
    return Aggregate(
        source=SOURCE,
        drafts=drafts.total() if known else None,
        drafted=drafted,
        accepted=accepted,
        emitted=timings.predicted_n,
        accepted_at=accepted_at,
        proposed_at=proposed_at,
    )
