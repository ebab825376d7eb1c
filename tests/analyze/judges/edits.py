"""Edits of whole captures: what several judges must say the same of."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path

from specscope.analyze.verify.trial import Case, judge
from specscope.trace.history.history import History
from specscope.trace.wire.reading import read_capture

TRACES = Path(__file__).parents[3] / "traces"


def sample(name: str) -> History:
    """A sample capture."""
    return read_capture(TRACES / f"{name}.jsonl").history


def rebuilt(history: History, change) -> History:
    """Every record through `change`, which gives the record that stands in its place, or None for none."""
    out = History(run=history.run, vocabulary=history.vocabulary, lost=history.lost)
    for record in history.steps:
        if (new := change(record)) is not None:
            out.append(new)
    return out


def changed(history: History, change, steps=None) -> History:
    """The history with `change` (a part, or None to leave it) put for its decode steps: all, or those so numbered."""
    number = itertools.count()

    def step(part):
        chosen = part.verdict is not None and (next(number) in steps if steps is not None else True)
        return (change(part) if chosen else None) or part

    return rebuilt(history, lambda one: dataclasses.replace(one, requests=tuple(map(step, one.requests))))


def decode_steps(history):
    """All of them."""
    return [part for record in history.steps for part in record.requests if part.verdict is not None]


def under(history, **params):
    """The same run, said to have had other parameters."""

    def change(record):
        infos = (dataclasses.replace(i, params=dataclasses.replace(i.params, **params)) for i in record.admitted)
        return dataclasses.replace(record, admitted=tuple(infos))

    return rebuilt(history, change)


def with_verdict(part, **values):
    """The part with fields of its verdict replaced."""
    return dataclasses.replace(part, verdict=dataclasses.replace(part.verdict, **values))


def case_of(history: History) -> Case:
    """A capture laid out."""
    return Case(history, judge(history, source=""))
