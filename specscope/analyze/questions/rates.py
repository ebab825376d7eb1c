"""What is rejected, and how often drafts are accepted by the drafter's probability."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np

from specscope.analyze.evidence.arrays import Indices
from specscope.analyze.questions.evidence import Evidence
from specscope.analyze.questions.groups import Examples, Share, by_value
from specscope.trace.history.wording import plural

TAKEN = 3  # tokens that a row names


@dataclass(frozen=True)
class Count:
    """A token, and how often."""

    token: int
    count: int


@dataclass(frozen=True)
class RejectedToken:
    """A drafted token that was rejected."""

    token: int
    rejected: Share  # of the times it was tried
    taken: tuple[Count, ...]  # what the target put in its place, the commonest first
    examples: Examples  # clearest: where the drafter was surest of it


@dataclass(frozen=True)
class Rejections:
    """The rejections among all nodes that were judged."""

    rejected: Share  # of the nodes tried
    tokens: tuple[RejectedToken, ...]  # the most rejections first
    notes: tuple[str, ...] = ()


def rejections(evidence: Evidence) -> Rejections:
    """The tokens rejected most."""
    if lacking := evidence.lacking(evidence.judged):
        return Rejections(Share(0, 0), (), lacking)
    tried = np.flatnonzero(evidence.judged)
    nodes = np.flatnonzero(evidence.judged & evidence.columns.rejected)
    known = evidence.columns.named[nodes].all()
    rows = _tokens(evidence, tried, nodes) if known else []
    return Rejections(Share(len(nodes), len(tried)), tuple(rows), evidence.notes)


def _tokens(evidence: Evidence, tried: Indices, nodes: Indices) -> list[RejectedToken]:
    """A row for each token, the most rejections first."""
    c = evidence.columns
    tokens, groups = by_value(c.token[nodes])
    ordered = np.sort(c.token[tried])
    total = np.searchsorted(ordered, tokens, "right") - np.searchsorted(ordered, tokens, "left")
    columns: Sequence[Sequence[Any]] = (
        tokens.tolist(),
        list(map(Share, groups.counts(), total.tolist())),
        [tuple(Count(*pair) for pair in taken[:TAKEN]) for taken in groups.commonest(evidence.taken[nodes])],
        groups.examples(evidence.confidence[nodes], lambda item: c.at_node(nodes[item])),
    )
    return sorted(map(RejectedToken, *columns), key=lambda row: -row.rejected.count)


# How well the drafter's probability predicts what will be accepted.
#
# Two probabilities are plotted, each for its own nodes: q as drawn for sampled nodes; the drafter's own probability for
# deterministic ones, whose q is 1. A deterministic node is accepted with probability p, so a calibrated drafter is
# accepted as often as it is sure. A sampled node is accepted with probability min(1, p / q), so a calibrated drafter,
# whose q equals p, is always accepted. The error of both is therefore how far the drafter's probability is from the
# target's p: the expected calibration error, the mean of |mean p - mean of the drafter's| over the bins, weighted by
# their nodes.


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
        notes.append(f"left out: {left_out} whose numbers are not probabilities (specscope verify names them)")
    if unknown.any():
        left_out = plural(int(unknown.sum()), "deterministic node")
        notes.append(f"left out: {left_out} whose drafter gives no probability")
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
    filled, groups = by_value(np.clip((values * BINS).astype(np.int64), 0, BINS - 1))
    columns: Sequence[Sequence[Any]] = (
        [plotted] * groups.groups,
        (filled / BINS).tolist(),
        ((filled + 1) / BINS).tolist(),
        groups.means(values),
        groups.shares(c.accepted[nodes]),
        groups.means(c.p[nodes]),
        groups.examples(values + 2 * c.rejected[nodes], lambda item: c.at_node(nodes[item])),
    )
    return map(Bin, *columns)
