"""What is rejected, and how often drafts are accepted: by token, by the drafter's probability, by place in the tree."""

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
    """A drafted token that was rejected. Figures are over its rejections."""

    token: int
    rejected: Share  # of the times it was tried
    taken: tuple[Count, ...]  # what the target put in its place, the commonest first
    raw_p: float | None  # the median of the target's raw p; None where it is not known
    rank: float | None  # likewise its rank; infinite: below the likeliest that the evidence names
    depth: int  # the commonest one
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
    return Rejections(Share(len(nodes), len(tried)), tuple(rows), evidence.notes(of_tokens=True))


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
        groups.medians(evidence.raw_p[nodes]),
        groups.medians(evidence.rank[nodes]),
        [depths[0][0] for depths in groups.commonest(c.depth[nodes])],
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
        notes.append(f"left out: {left_out} whose numbers are not probabilities (specscope verify names them)")
    if unknown.any():
        left_out = plural(int(unknown.sum()), "deterministic node")
        notes.append(f"left out: {left_out} whose drafter gives no probability")
    if not evidence.columns.walks[evidence.columns.step[judged]].all():
        notes.append("expected acceptance is known only for standard and match: other rules look at more than one node")
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
    others = groups.counts(~c.walks[c.step[nodes]])
    expected = zip(groups.means(c.accept_prob[nodes]), others, strict=True)
    columns: Sequence[Sequence[Any]] = (
        [plotted] * groups.groups,
        (filled / BINS).tolist(),
        ((filled + 1) / BINS).tolist(),
        groups.means(values),
        groups.shares(c.accepted[nodes]),
        [None if by_others else mean for mean, by_others in expected],
        groups.means(c.p[nodes]),
        groups.examples(values + 2 * c.rejected[nodes], lambda item: c.at_node(nodes[item])),
    )
    return map(Bin, *columns)


# Acceptance by depth and sibling: which node of a tree is not worth its row.
#
# Every drafted node takes a row of the target's pass, tried or not, and gives a token where it is on the accepted path.
# So a cell of the tree, a depth and a place among siblings in draw order, is worth accepted / drafted tokens a row.
# Cells are ranked by the upper end of their interval, the least worth first, so that none is condemned by a few rows. A
# cell that is dropped takes all below it with it.


FEWEST_ROWS = 20  # rows below which a cell is not named as one of the least worth
NAMED = 3


@dataclass(frozen=True)
class TreeCell:
    """The nodes at one depth and at one place among their siblings."""

    depth: int  # 1 for the root's children
    sibling: int  # its place in draw order, from 1
    accepted: Share  # on the accepted path, of all that were drafted
    tried: int  # of those drafted
    draft_p: float | None  # mean of the drafter's probability; None where it is not known
    examples: Examples  # clearest: rejected where the drafter was surest; accepted where none was rejected

    @property
    def of_tried(self) -> Share:
        """Accepted, of those tried."""
        return Share(self.accepted.count, self.tried)


@dataclass(frozen=True)
class TreeCells:
    """All cells of the trees, the least worth first."""

    cells: tuple[TreeCell, ...]
    notes: tuple[str, ...] = ()

    @property
    def worst(self) -> tuple[TreeCell, ...]:
        """Those that are least worth their rows, of those with enough; none where there is but one cell."""
        enough = [cell for cell in self.cells if cell.accepted.total >= FEWEST_ROWS]
        return tuple(enough[: min(NAMED, len(enough) - 1)]) if enough else ()


def by_cell(evidence: Evidence) -> TreeCells:
    """Acceptance in every cell of the trees."""
    if lacking := evidence.lacking(evidence.drafts):
        return TreeCells((), lacking)
    c = evidence.columns
    nodes = np.flatnonzero(evidence.drafts[c.step])
    span = int(c.sibling.max()) + 1
    keys, groups = by_value(c.depth[nodes] * span + c.sibling[nodes])
    sure = np.nan_to_num(evidence.confidence[nodes], nan=0.0, posinf=0.0, neginf=0.0)
    columns: Sequence[Sequence[Any]] = (
        (keys // span).tolist(),
        (keys % span + 1).tolist(),
        groups.shares(c.on_path[nodes]),
        groups.counts(c.tried[nodes]),
        groups.means(c.draft_prob[nodes]),
        groups.examples(sure + 2 * c.rejected[nodes], lambda item: c.at_node(nodes[item])),
    )
    return TreeCells(tuple(sorted(map(TreeCell, *columns), key=_worth)), evidence.notes())


def _worth(cell: TreeCell) -> tuple[float, float, int, int]:
    """The least worth first; of equal ones the deeper and the later."""
    interval = cell.accepted.interval or (0.0, 1.0)
    return interval[1], cell.accepted.value or 0.0, -cell.depth, -cell.sibling
