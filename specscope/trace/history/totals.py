"""Running totals of a run or a request after any number of its steps, without counting all steps again.

Totals for what every request and every bucket of a plot needs, and checkpoints of the full counts: so a screen that is
dragged through ten thousand steps adds up a few hundred at most for each place it stops at.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from specscope.trace.history.stats import Acceptance, Counted
from specscope.trace.history.undrafted import Undrafted
from specscope.trace.record.aggregate import Aggregate

EVERY = 512  # request steps between two checkpoints


def _zero() -> array[int]:
    return array("q", [0])


@dataclass
class RunningTotals:
    """Running totals after each item (an engine step, or a step of one request); index 0 is before the first."""

    drafts: array[int] = field(default_factory=_zero)
    accepted: array[int] = field(default_factory=_zero)
    emitted: array[int] = field(default_factory=_zero)
    total: Acceptance = field(default_factory=Acceptance)
    marks: list[tuple[int, Acceptance]] = field(default_factory=lambda: [(0, Acceptance())])
    unmarked: int = 0  # request steps since the last checkpoint
    undrafted: dict[Undrafted, array[int]] = field(default_factory=dict)  # of each such step the item that it is in

    def add(self, parts: Iterable[Counted], reasons: Iterable[Undrafted | None] = ()) -> None:
        """Take one more item, made of these request steps or sums. `reasons`: why they drafted nothing."""
        for reason in reasons:
            if reason is not None:
                self.undrafted.setdefault(reason, array("q")).append(len(self.drafts) - 1)
        drafts, accepted, known = self.total.drafts, self.total.accepted, True
        for part in parts:
            self.total.add(part)
            self.unmarked += 1
            known &= not isinstance(part, Aggregate) or None not in (part.drafts, part.accepted)
        self.drafts.append(self.drafts[-1] + (self.total.drafts - drafts if known else 0))
        self.accepted.append(self.accepted[-1] + (self.total.accepted - accepted if known else 0))
        self.emitted.append(self.total.emitted)
        if self.unmarked >= EVERY:
            self.unmarked = 0
            self.marks.append((len(self.drafts) - 1, _copy(self.total)))

    def take_back(self, parts: Iterable[Counted]) -> None:
        """Remove the last item, which was made of these steps."""
        for part in parts:
            self.total.take_back(part)
            self.unmarked = max(self.unmarked - 1, 0)
        for totals in (self.drafts, self.accepted, self.emitted):
            totals.pop()
        while self.marks[-1][0] >= len(self.drafts):
            self.marks.pop()
        for items in self.undrafted.values():
            while items and items[-1] >= len(self.drafts) - 1:
                items.pop()

    def undrafted_upto(self, count: int) -> Counter[Undrafted]:
        """Why steps of the first `count` items drafted nothing."""
        return Counter({reason: bisect_left(items, count) for reason, items in self.undrafted.items()})

    def upto(self, count: int, item: Callable[[int], Iterable[Counted]]) -> Acceptance:
        """The full counts over the first `count` items; `item(i)` gives what `add` was given."""
        if count >= len(self.drafts) - 1:
            return self.total
        begin, mark = self.marks[bisect_right(self.marks, count, key=lambda mark: mark[0]) - 1]
        total = _copy(mark)
        for index in range(begin, count):
            for part in item(index):
                total.add(part)
        return total

    def tau(self, begin: int, end: int) -> float | None:
        """Mean acceptance length over the items from `begin` to before `end`."""
        drafts = self.drafts[end] - self.drafts[begin]
        return Acceptance(drafts=drafts, accepted=self.accepted[end] - self.accepted[begin]).tau


def _copy(counts: Acceptance) -> Acceptance:
    new = Acceptance()
    new.merge(counts)
    return new
