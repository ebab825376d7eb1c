"""Whether what was recorded are probabilities at all, and whether every step was judged by the run's rule.

A value of the right type that no probability can have is evidence: the first thing to convict. What would be computed
from it says nothing, so that other checks leave its step out.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from specscope.analyze.evidence.columns import Columns, in_range, rows_in_range
from specscope.analyze.findings import Check
from specscope.analyze.verify.exact import found
from specscope.trace.record.records import RunInfo


def probabilities(c: Columns) -> Check:
    """Every step whose figures are not numbers, or no probabilities."""
    details = {int(step): text for step, text in _wrong(c)}
    bad = np.isin(np.arange(len(c)), list(details))
    return found(
        "probabilities",
        "every p, q, coin and entropy is a number in its range",
        bad,
        np.ones(len(c), np.bool_),
        c.steps,
        lambda step: details[step],
    )


def _wrong(c: Columns) -> Iterator[tuple[int, str]]:
    """Steps with a figure that is wrong, and which; several times where there are several."""
    for name, values in c.figures_of_nodes().items():
        for node in np.flatnonzero(~in_range(values)).tolist():
            yield int(c.step[node]), f"{name} of node {c.node[node]} is {values[node]:.6g}"
    for name, values in c.figures_of_finals().items():
        for step in np.flatnonzero(~in_range(values)).tolist():
            yield step, f"{name} of the final token is {values[step]:.6g}"
    for name, values in (("a", c.accept_prob), ("residual mass", c.residual_mass)):
        for node in np.flatnonzero(~np.isfinite(values)).tolist():
            yield int(c.step[node]), f"{name} of node {c.node[node]} is {values[node]:.6g}"
    e = c.parents
    for name, table in e.shares().items():
        for parent in np.flatnonzero(~rows_in_range(table)).tolist():
            yield int(e.step[parent]), f"{name} of a parent is {np.round(table[parent], 6).tolist()}"
    for name, values in e.nats().items():
        for parent in np.flatnonzero(~(np.isfinite(values) & (values > -0.01))).tolist():
            yield int(e.step[parent]), f"{name} of a parent is {values[parent]:.6g}"


def rule_of_the_run(c: Columns, run: RunInfo | None, *, edited: bool) -> Check:
    """Each step's rule is the one that the header names. `edited`: a debugger may have changed it on the way."""
    known = run is not None and run.is_ours and not edited
    bad = np.array([run is not None and visit.part.rule != run.rule for visit in c.visits], np.bool_)
    return found(
        "rule of verification",
        "every step was judged by the rule that the run names",
        bad,
        np.full(len(c), known),
        c.steps,
        lambda step: f"says {c.visits[step].part.rule}, the run {'' if run is None else run.rule}",
        note="" if known else "the run was edited" if edited else "another engine's rule is told step by step",
    )
