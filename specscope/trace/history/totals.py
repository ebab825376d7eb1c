"""Running totals of a run or a request: after each of its steps a row of sums, so that any stretch is a difference."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable

from specscope.trace.history.stats import Acceptance, Counted
from specscope.trace.history.undrafted import Undrafted
from specscope.trace.record.aggregate import Aggregate

REASONS = tuple(Undrafted)
DRAFTS, ACCEPTED, OWN = 0, 1, 2 + len(REASONS)  # counts where both are told, then reasons; then those of Acceptance
EMITTED = OWN + Acceptance(emitted=-1).row().index(-1)


class RunningTotals:
    """Sums after each item (an engine step, or a step of one request); row 0 is before the first."""

    def __init__(self) -> None:
        self.total = Acceptance()  # after the last
        self._own = [0] * OWN  # likewise
        self._rows = array("q", [*self._own, *self.total.row()])  # one after the other, filled up with 0
        self._width = len(self._rows)

    def add(self, parts: Iterable[Counted], reasons: Iterable[Undrafted | None] = ()) -> None:
        """Take one more item, made of these request steps or sums. `reasons`: why they drafted nothing."""
        for reason in reasons:
            if reason is not None:
                self._own[2 + REASONS.index(reason)] += 1
        drafts, accepted, known = self.total.drafts, self.total.accepted, True
        for part in parts:
            self.total.add(part)
            known &= not isinstance(part, Aggregate) or None not in (part.drafts, part.accepted)
        if known:
            self._own[DRAFTS] += self.total.drafts - drafts
            self._own[ACCEPTED] += self.total.accepted - accepted
        row = [*self._own, *self.total.row()]
        if len(row) > self._width:  # a tree is deeper than any before it
            rows = [self._row(count) for count in range(len(self._rows) // self._width)]
            self._rows = array("q", [value for each in rows for value in (*each, *[0] * (len(row) - self._width))])
            self._width = len(row)
        self._rows.extend(row + [0] * (self._width - len(row)))

    def _row(self, count: int) -> array[int]:
        """The sums after the first `count` items; after all where there are fewer."""
        begin = min(count * self._width, len(self._rows) - self._width)
        return self._rows[begin : begin + self._width]

    def take_back(self) -> None:
        """Remove the last item."""
        del self._rows[-self._width :]
        last = self._rows[-self._width :]
        self._own, self.total = last[:OWN].tolist(), Acceptance.of(last[OWN:])

    def undrafted_upto(self, count: int) -> Counter[Undrafted]:
        """Why steps of the first `count` items drafted nothing."""
        counts = zip(REASONS, self._row(count)[2:OWN], strict=True)
        return Counter({reason: count for reason, count in counts if count})

    def upto(self, count: int) -> Acceptance:
        """The full counts over the first `count` items."""
        return Acceptance.of(self._row(count)[OWN:])

    def emitted(self, count: int) -> int:
        """Output tokens of the first `count` items."""
        return self._rows[count * self._width + EMITTED]

    def tau(self, begin: int, end: int) -> float | None:
        """Mean acceptance length over the items from `begin` to before `end`."""
        first, last = begin * self._width, end * self._width
        drafts, accepted = (self._rows[last + place] - self._rows[first + place] for place in (DRAFTS, ACCEPTED))
        return Acceptance(drafts=drafts, accepted=accepted).tau
