"""Causes in what fed an EAGLE head, from the norms of its rows alone: features that are zero, or were seen before."""

from __future__ import annotations

from specscope.analyze.diagnose.case import Case
from specscope.analyze.diagnose.causes import Cause
from specscope.analyze.diagnose.diagnosis import CERTAIN, Suspect
from specscope.analyze.findings import Reference
from specscope.trace.records import DraftNotes
from specscope.trace.wording import plural

FEWEST = 3  # rows, and this share of all: fewer say nothing
SHARE = 0.01


def features_missing(case: Case) -> Suspect | None:
    """Rows whose features are all zero: no layer of a model gives that."""
    rows, zero, example = 0, 0, None
    for step in case.drafting:
        notes = step.part.notes
        if notes is None or not notes.fed_norms.size:
            continue
        missing = int((notes.fed_norms == 0).all(axis=1).sum())
        rows, zero = rows + len(notes.fed_norms), zero + missing
        example = example or (step.reference() if missing else None)
    if not _many(zero, rows):
        return None
    said = f"the features are zero at {zero:,} of {plural(rows, 'row')} that fed the head"
    return Suspect(Cause.FEATURES_MISSING, CERTAIN, (said,), example=example)


def features_stale(case: Case) -> Suspect | None:
    """Rows of another position with exactly the norms of the row before them: its features, fed once more."""
    rows, stale = 0, 0
    example: Reference | None = None
    last: dict[str, tuple[int, tuple[float, ...]]] = {}  # of each request: position and norms of its last row
    for step in case.drafting:
        notes = step.part.notes
        if notes is None or not notes.fed_norms.size:
            continue
        before = last.get(step.request)
        for position, norms in _rows(notes):
            if before is not None and position == before[0] + 1 and any(norms):
                rows += 1
                again = norms == before[1]
                stale += again
                example = example or (step.reference() if again else None)
            before = position, norms
        if before is not None:
            last[step.request] = before
    if not _many(stale, rows):
        return None
    said = f"{stale:,} of {plural(rows, 'row')} that fed the head hold the features of the row before them"
    return Suspect(Cause.FEATURES_STALE, CERTAIN, (said,), example=example)


def _rows(notes: DraftNotes) -> list[tuple[int, tuple[float, ...]]]:
    """Position and norms of each row."""
    return list(zip(notes.fed_position.tolist(), map(tuple, notes.fed_norms.tolist()), strict=True))


def _many(count: int, of: int) -> bool:
    return count >= FEWEST and count > SHARE * of
