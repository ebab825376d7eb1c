"""Edits of whole captures: what several judges must say the same of."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from specscope.analyze.verify.case import Case
from specscope.analyze.verify.trial import judge
from specscope.trace.history.history import History
from specscope.trace.wire.reading import read_capture

TRACES = Path(__file__).parents[3] / "traces"


def sample(name: str) -> History:
    """A sample capture."""
    return read_capture(TRACES / f"{name}.jsonl").history


def changed(history: History, change, steps=None) -> History:
    """The history with `change` (a part, or None to leave it) put for its decode steps: all, or those so numbered."""
    out = History(run=history.run, vocabulary=history.vocabulary)
    number = -1
    for record in history.steps:
        parts = list(record.requests)
        for row, part in enumerate(parts):
            if part.verdict is None:
                continue
            number += 1
            new = change(part) if steps is None or number in steps else None
            parts[row] = part if new is None else new
        out.append(dataclasses.replace(record, requests=tuple(parts)))
    return out


def with_verdict(part, **values):
    """The part with fields of its verdict replaced."""
    return dataclasses.replace(part, verdict=dataclasses.replace(part.verdict, **values))


def case_of(history: History) -> Case:
    """A capture laid out."""
    return Case(history, judge(history, source=""))
