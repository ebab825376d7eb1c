"""Captures that hold counts only, compared: their figures side by side, and nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from specscope.analyze.tables import NONE, Table, number, percent, share, told
from specscope.errors import UserError
from specscope.trace.reading import read_capture
from specscope.trace.stats import Acceptance
from specscope.trace.vocabulary import printable

NOTE = (
    "Counts only on one side or both: no requests are paired, and whether a difference is beyond chance is not judged."
)


@dataclass(frozen=True)
class CountsSide:
    """The captures of one side, summed."""

    sources: tuple[str, ...]
    acceptance: Acceptance
    warnings: tuple[str, ...]


@dataclass(frozen=True)
class CountsComparison:
    """Both sides. Differences are B - A."""

    a: CountsSide
    b: CountsSide

    def table(self) -> Table:
        """Figure, A, B and B - A."""
        a, b = self.a.acceptance, self.b.acceptance
        rows = [
            ("mean acceptance length τ", number(a.tau), number(b.tau), _signed(a.tau, b.tau)),
            ("draft acceptance rate", percent(a.rate), percent(b.rate), _signed(a.rate, b.rate, share=True)),
        ]
        rates_a, rates_b = a.per_position, b.per_position
        for at in range(max(len(rates_a), len(rates_b))):
            one, other = (rates[at] if at < len(rates) else None for rates in (rates_a, rates_b))
            both = share(one, a.drafts), share(other, b.drafts)
            rows.append((f"accepted at depth {at + 1}, of the drafts", *both, _signed(one, other, share=True)))
        rows += [(name, told(a.told(name)), told(b.told(name)), "") for name in ("drafts", "drafted", "accepted")]
        return Table("Acceptance", ("", "A", "B", "B - A"), rows, NOTE)

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        sides = {
            name: {"source": list(side.sources), "acceptance": side.acceptance.to_dict()}
            for name, side in (("a", self.a), ("b", self.b))
        }
        return {"counts_only": True, "note": NOTE, **sides}


def compare_counts(a: Sequence[str], b: Sequence[str]) -> CountsComparison | None:
    """Both sides; None where none of the captures holds counts only. Raises UserError."""
    sides = [_side(paths) for paths in (a, b)]
    if not any(side.acceptance.aggregates for side in sides):
        return None
    return CountsComparison(*sides)


def _side(paths: Sequence[str]) -> CountsSide:
    total, warnings = Acceptance(), []
    for path in paths:
        reader = read_capture(path)
        if not reader.history.acceptance.drafts and not reader.history.acceptance.aggregates:
            raise UserError(f"{path} holds no decode steps and no counts: there is nothing to compare")
        total.merge(reader.history.acceptance)
        warnings += reader.warnings
    return CountsSide(tuple(map(printable, paths)), total, tuple(warnings))


def _signed(a: float | None, b: float | None, *, share: bool = False) -> str:
    if a is None or b is None:
        return NONE
    return f"{100 * (b - a):+.1f}%" if share else f"{b - a:+.2f}"
