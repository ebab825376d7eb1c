"""What was left out of a capture or of what engines sent, and why: each kind of fault once, with a count."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from specscope.trace.record.vocabulary import printable

KINDS = 20  # kinds of fault that are told apart
LONGEST = 200  # characters of a message


@dataclass
class Faults:
    """DamagedError spans and lines by kind."""

    total: int = 0
    _counts: dict[str, int] = field(default_factory=dict)
    _first: dict[str, str] = field(default_factory=dict)  # the message of the first of each kind
    _known: dict[tuple[str, str], str] = field(default_factory=dict)  # the kind of some that were counted
    _due: dict[str, int] = field(default_factory=dict)  # the count at which `news` reports it again

    def add(self, what: str, why: str) -> None:
        """Count one: `what` was left out, `why` names the attribute. Texts that differ only in numbers are one kind."""
        self.total += 1
        alike = what.rstrip("0123456789"), why
        if (known := self._known.get(alike)) is not None:  # quick: there may be millions of one kind
            self._counts[known] += 1
            return
        text = printable(" ".join(f"{what}: {why}"[: 2 * LONGEST].split()))
        text = text if len(text) <= LONGEST else text[: LONGEST - 1] + "…"
        kind = re.sub(r"[0-9]+", "0", text)
        if kind not in self._counts and len(self._counts) >= KINDS:
            kind, text = "", "faults of other kinds"
        self._known |= {alike: kind} if len(self._known) < 1000 else {}
        self._counts[kind] = self._counts.get(kind, 0) + 1
        self._first.setdefault(kind, text)

    def lines(self) -> list[str]:
        """A line for each kind: the first of it, and how many there were."""
        return [f"left out {count:,}×: {self._first[kind]}" for kind, count in self._counts.items()]

    def news(self) -> list[str]:
        """The lines to print now: kinds that are new, and kinds whose count has grown tenfold."""
        kinds = [kind for kind, count in self._counts.items() if count >= self._due.get(kind, 1)]
        lines = [f"left out {self._counts[kind]:,}×: {self._first[kind]}" for kind in kinds]
        self._due |= {kind: 10 * self._counts[kind] for kind in kinds}
        return lines
