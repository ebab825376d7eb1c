"""Running totals of a run or a request: after each of its steps a row of sums, so that any stretch is a difference."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import numpy as np

from specscope.trace.history.stats import Acceptance, Counted
from specscope.trace.history.undrafted import Undrafted
from specscope.trace.record.aggregate import Aggregate

REASONS = tuple(Undrafted)
DRAFTS, ACCEPTED, OWN = 0, 1, 2 + len(REASONS)  # columns: counts where both are told, then reasons; then Acceptance's
EMITTED = OWN + len(Acceptance(emitted=-1).row()[: Acceptance(emitted=-1).row().index(-1)])


class RunningTotals:
    """Sums after each item (an engine step, or a step of one request); row 0 is before the first."""

    def __init__(self) -> None:
        self.total = Acceptance()  # after the last
        self._rows = np.zeros((8, OWN + len(self.total.row())), np.int64)
        self._count = 0  # of items

    def add(self, parts: Iterable[Counted], reasons: Iterable[Undrafted | None] = ()) -> None:
        """Take one more item, made of these request steps or sums. `reasons`: why they drafted nothing."""
        own = self._rows[self._count, :OWN].copy()
        for reason in reasons:
            if reason is not None:
                own[2 + REASONS.index(reason)] += 1
        drafts, accepted, known = self.total.drafts, self.total.accepted, True
        for part in parts:
            self.total.add(part)
            known &= not isinstance(part, Aggregate) or None not in (part.drafts, part.accepted)
        if known:
            own[:2] += (self.total.drafts - drafts, self.total.accepted - accepted)
        row = self.total.row()
        self._count += 1
        more = (len(self._rows) if self._count == len(self._rows) else 0, max(OWN + len(row) - self._rows.shape[1], 0))
        if any(more):
            self._rows = np.pad(self._rows, ((0, more[0]), (0, more[1])))
        self._rows[self._count, :OWN] = own
        self._rows[self._count, OWN : OWN + len(row)] = row

    def take_back(self) -> None:
        """Remove the last item."""
        self._rows[self._count] = 0
        self._count -= 1
        self.total = self.upto(self._count)

    def undrafted_upto(self, count: int) -> Counter[Undrafted]:
        """Why steps of the first `count` items drafted nothing."""
        counts = self._rows[min(count, self._count), 2:OWN].tolist()
        return Counter({reason: count for reason, count in zip(REASONS, counts, strict=True) if count})

    def upto(self, count: int) -> Acceptance:
        """The full counts over the first `count` items."""
        return Acceptance.of(self._rows[min(count, self._count), OWN:].tolist())

    def emitted(self, count: int) -> int:
        """Output tokens of the first `count` items."""
        return int(self._rows[count, EMITTED])

    def tau(self, begin: int, end: int) -> float | None:
        """Mean acceptance length over the items from `begin` to before `end`."""
        drafts, accepted = (self._rows[end, :2] - self._rows[begin, :2]).tolist()
        return Acceptance(drafts=drafts, accepted=accepted).tau
