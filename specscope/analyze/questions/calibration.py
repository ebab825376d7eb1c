"""How well the drafter's probability predicts what will be accepted.

Two probabilities are plotted, each for its own nodes: q as drawn for sampled nodes; the drafter's own probability for
deterministic ones, whose q is 1. A deterministic node is accepted with probability p, so a calibrated drafter is
accepted as often as it is sure. A sampled node is accepted with probability min(1, p / q), so a calibrated drafter,
whose q equals p, is always accepted. The error of both is therefore how far the drafter's probability is from the
target's p: the expected calibration error, the mean of |mean p - mean of the drafter's| over the bins, weighted by
their nodes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from specscope.analyze.evidence.arrays import Indices
from specscope.analyze.questions.evidence import Evidence
from specscope.analyze.questions.groups import Examples, Share, by_value
from specscope.trace.history.wording import plural

BINS = 10


class Plotted(StrEnum):
    """Which of the drafter's probabilities is plotted."""

    Q = "q"
    OWN = "draft p"


ABOUT = {Plotted.Q: "q of sampled nodes", Plotted.OWN: "the drafter's probability of deterministic nodes, whose q is 1"}


@dataclass(frozen=True)
class Bin:
    """Nodes to which the drafter gave a probability in this range."""

    plotted: Plotted
    low: float
    high: float
    mean: float  # of the drafter's probability
    accepted: Share  # of the nodes tried
    expected: float | None  # mean accept probability; None where another rule than the standard one decided
    target_p: float  # mean p of the nodes for the target, before any rejection
    examples: Examples  # clearest: rejected where the drafter was surest; accepted where all were


@dataclass(frozen=True)
class CalibrationCurve:
    """All bins of one probability that have nodes, from low to high."""

    plotted: Plotted
    accepted: Share
    error: float  # expected calibration error
    bins: tuple[Bin, ...]


@dataclass(frozen=True)
class Calibration:
    """A curve for sampled nodes, one for deterministic ones, where there are any."""

    curves: tuple[CalibrationCurve, ...]
    notes: tuple[str, ...] = ()


def calibration(evidence: Evidence) -> Calibration:
    """The calibration curves, and what they leave out."""
    if lacking := evidence.lacking(evidence.judged):
        return Calibration((), lacking)
    odd = evidence.judged & ~evidence.sound
    judged, sampled = evidence.judged & ~odd, evidence.columns.sampled
    unknown = judged & np.isnan(evidence.confidence)
    notes: list[str] = []
    if odd.any():
        left_out = plural(int(odd.sum()), "node")
        notes.append(f"left out: {left_out} whose numbers are no probabilities (specscope verify names them)")
    if unknown.any():
        left_out = plural(int(unknown.sum()), "deterministic node")
        notes.append(f"left out: {left_out} whose drafter gives no probability")
    if not evidence.columns.walks[evidence.columns.step[judged]].all():
        notes.append("expected acceptance is known for standard and match only: other rules look at more than one node")
    curves = []
    for plotted, chosen in ((Plotted.Q, judged & sampled & ~unknown), (Plotted.OWN, judged & ~sampled & ~unknown)):
        if chosen.any():
            curves.append(_curve(evidence, plotted, np.flatnonzero(chosen)))
    return Calibration(tuple(curves), tuple(notes))


def _curve(evidence: Evidence, plotted: Plotted, nodes: Indices) -> CalibrationCurve:
    bins = tuple(_bins(evidence, plotted, nodes))
    error = sum(abs(bin_.target_p - bin_.mean) * bin_.accepted.total for bin_ in bins) / len(nodes)
    return CalibrationCurve(plotted, Share(int(evidence.columns.accepted[nodes].sum()), len(nodes)), error, bins)


def _bins(evidence: Evidence, plotted: Plotted, nodes: Indices) -> Iterator[Bin]:
    c = evidence.columns
    values = evidence.confidence[nodes]
    places = np.clip((values * BINS).astype(np.int64), 0, BINS - 1)
    filled, groups = by_value(places)
    total, accepted = groups.counts(), groups.counts(c.accepted[nodes])
    mean, target_p = groups.means(values), groups.means(c.p[nodes])
    walked = np.where(c.walks[c.step[nodes]], 0.0, np.nan)
    expected = groups.means(c.accept_prob[nodes] + walked)
    mixed = groups.counts(np.isnan(walked))
    examples = groups.examples(c, nodes, values + 2 * c.rejected[nodes], nodes=True)
    for index, place in enumerate(filled.tolist()):
        yield Bin(
            plotted,
            place / BINS,
            (place + 1) / BINS,
            mean[index] or 0.0,
            Share(accepted[index], total[index]),
            None if mixed[index] else expected[index],
            target_p[index] or 0.0,
            examples[index],
        )
