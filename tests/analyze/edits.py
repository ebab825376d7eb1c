"""Edits of captures, whole or of one record: what judges must see, and must say the same of."""

import dataclasses
import itertools
from pathlib import Path

import numpy as np

from specscope.analyze.findings import CheckResult
from specscope.analyze.verify.trial import Case, judge
from specscope.trace.history.history import History
from specscope.trace.record.records import FinalKind
from specscope.trace.wire.reading import read_capture

TRACES = Path(__file__).parents[2] / "traces"


def sample(name):
    """A sample capture."""
    return read_capture(TRACES / f"{name}.jsonl").history


def rebuilt(history, change=lambda record: record, **run):
    """Every record through `change`, which gives the one in its place, or None for none. `run`: said of the run."""
    about = dataclasses.replace(history.run, **run) if run else history.run
    out = History(run=about, vocabulary=history.vocabulary, lost=history.lost)
    for record in history.steps:
        if (new := change(record)) is not None:
            out.append(new)
    return out


def changed(history, change, steps=None):
    """The history with `change` (a part, or None to leave it) put for its decode steps: all, or those so numbered."""
    number = itertools.count()

    def step(part):
        chosen = part.verdict is not None and (next(number) in steps if steps is not None else True)
        return (change(part) if chosen else None) or part

    return rebuilt(history, lambda one: dataclasses.replace(one, requests=tuple(map(step, one.requests))))


def decode_steps(history):
    """All of them."""
    return [part for record in history.steps for part in record.requests if part.verdict is not None]


def able(history, change):
    """The numbers of the decode steps that `change` gives something for."""
    return [number for number, part in enumerate(decode_steps(history)) if change(part) is not None]


def edited(history, change):
    """The history with the first step replaced that `change` gives something for: a part, or None."""
    return changed(history, change, {able(history, change)[0]})


def under(history, labels=None, **params):
    """The same run, said to have had other parameters, or labels."""

    def told(info):
        labelled = info.labels if labels is None else labels
        return dataclasses.replace(info, labels=labelled, params=dataclasses.replace(info.params, **params))

    return rebuilt(history, lambda one: dataclasses.replace(one, admitted=tuple(map(told, one.admitted))))


def replaced(part, **change):
    """A request's step with fields of its verdict, tree or parents replaced: `verdict__coin=...`."""
    values = {}
    for name, value in change.items():
        where, _, inner = name.rpartition("__")
        if where:
            values[where] = dataclasses.replace(values.get(where, getattr(part, where)), **{inner: value})
        else:
            values[name] = value
    return dataclasses.replace(part, **values)


def put(array, at, value):
    """A copy with one value replaced, or several."""
    copy = array.copy()
    copy[at] = value
    return copy


def valued(value, *where):
    return value(*where) if callable(value) else value


def of(where=lambda part: True, **values):
    """An edit of each such step: fields, or what gives them of the step."""
    return lambda part: replaced(part, **{k: valued(v, part) for k, v in values.items()}) if where(part) else None


def at(outcome, where=lambda part, i: True, **values):
    """An edit of the first such node of a step; values of its arrays, or what gives them of step and node."""

    def change(part):
        i = node(part, outcome, where)
        if i is None:
            return None
        arrays = {name: getattr(getattr(part, name.split("__")[0]), name.split("__")[1]) for name in values}
        return replaced(part, **{name: put(arrays[name], i, valued(values[name], part, i)) for name in values})

    return change


def node(part, outcome=None, where=lambda part, i: True):
    """The first node with that outcome of which `where` holds; None where there is none."""
    for i, found in enumerate(part.verdict.outcome.tolist()):
        if (outcome is None or found == outcome) and where(part, i):
            return i
    return None


def elder(part, i):
    """Whether a node has an elder sibling."""
    return bool(np.any(part.tree.parent[:i] == part.tree.parent[i]))


def renormalised(part, i):
    """Whether a later sibling's q is another than it was before the first draw."""
    return part.verdict.outcome[i] and elder(part, i) and part.verdict.q_trial[i] > part.tree.q[i] * 1.01


def recovered(part):
    return part.verdict.kind is FinalKind.RECOVERED


def case_of(history):
    """A capture laid out."""
    return Case(history, judge(history, source=""))


def failed(history):
    """The names of the checks that fail."""
    return [check.name for check in judge(history, source="run.jsonl").failed]


def checks(history):
    """All checks of a trial, by name."""
    return {one.name: one for one in judge(history, source="run.jsonl").checks}


def check(history, name):
    """One of them."""
    return checks(history)[name]


def passed(history, name):
    """Whether a check looked at something and found nothing."""
    return check(history, name).result is CheckResult.PASSED
