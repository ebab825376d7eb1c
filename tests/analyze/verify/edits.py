"""One edit of a real record: what a check must see."""

import dataclasses

import numpy as np

from specscope.analyze.findings import CheckResult
from specscope.analyze.verify.trial import judge
from specscope.trace.record.records import FinalKind
from tests.analyze.judges.edits import changed, decode_steps


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
    """A copy with one value replaced."""
    copy = array.copy()
    copy[at] = value
    return copy


def edited(history, change):
    """The history with the first step replaced that `change` gives something for: a part, or None."""
    able = (number for number, part in enumerate(decode_steps(history)) if change(part) is not None)
    return changed(history, change, {next(able)})


def failed(history, **options):
    """The names of the checks that fail."""
    return [check.name for check in judge(history, source="run.jsonl", **options).failed]


def check(history, name):
    """One check of a trial."""
    return next(one for one in judge(history, source="run.jsonl").checks if one.name == name)


def passed(history, name):
    """Whether a check looked at something and found nothing."""
    return check(history, name).result is CheckResult.PASSED


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


def valued(value, *where):
    return value(*where) if callable(value) else value


def at(outcome, where=lambda part, i: True, **values):
    """An edit of the first such node of a step; values of its arrays, or what gives them of step and node."""

    def change(part):
        i = node(part, outcome, where)
        if i is None:
            return None
        arrays = {name: getattr(getattr(part, name.split("__")[0]), name.split("__")[1]) for name in values}
        return replaced(part, **{name: put(arrays[name], i, valued(values[name], part, i)) for name in values})

    return change


def of(where=lambda part: True, **values):
    """An edit of the first such step: fields, or what gives them of the step."""
    return lambda part: replaced(part, **{k: valued(v, part) for k, v in values.items()}) if where(part) else None


def recovered(part):
    return part.verdict.kind is FinalKind.RECOVERED
