"""Which drafted tokens are rejected most, and what the target took instead.

A rejected token is judged by what the target thought of it before any rule:

near      its raw p is at least a tenth of the likeliest token's, or it is among the three likeliest with raw p >= 0.01
nonsense  its raw p is below 0.001, and it is no near miss
unlikely  anything between
unknown   the evidence does not have raw p
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from specscope.analyze.evidence.arrays import Indices
from specscope.analyze.evidence.columns import KINDS
from specscope.analyze.questions.evidence import POSITIONS, Evidence
from specscope.analyze.questions.groups import Examples, Grouping, Share, by_value
from specscope.trace.record.notes import SOURCES

NEAR, NEAR_RANK, NEAR_LEAST = 0.1, 3, 0.01
NONSENSE = 0.001
TAKEN = 3  # tokens that a row names


class Miss(StrEnum):
    """How far off a rejected token was."""

    NEAR = "near"
    UNLIKELY = "unlikely"
    NONSENSE = "nonsense"
    UNKNOWN = "unknown"


MISSES = tuple(Miss)


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
    misses: dict[Miss, int]
    raw_p: float | None  # the median of the target's raw p; None where it is not known
    rank: float | None  # likewise its rank; infinite: below the likeliest that the evidence names
    depth: int  # the commonest one
    kind: str  # likewise the label `kind` of the request
    position: float | None  # the median place in the output, from 0
    examples: Examples  # clearest: where the drafter was surest of it


@dataclass(frozen=True)
class RejectionGroup:
    """The rejections of one depth, kind, kind of final token, position or miss."""

    by: str
    value: str
    rejected: Share  # of the nodes tried there; of a miss: of all rejections
    misses: dict[Miss, int]
    token: Count | None  # rejected most
    taken: Count | None  # put in its place most
    examples: Examples


@dataclass(frozen=True)
class Rejections:
    """The rejections among all nodes that were judged."""

    rejected: Share  # of the nodes tried
    misses: dict[Miss, int]
    tokens: tuple[RejectedToken, ...]  # the most rejections first
    groups: tuple[RejectionGroup, ...]
    notes: tuple[str, ...] = ()


def rejections(evidence: Evidence) -> Rejections:
    """The tokens rejected most, and the rejections by group."""
    if lacking := evidence.lacking(evidence.judged):
        return Rejections(Share(0, 0), {}, (), (), lacking)
    c = evidence.columns
    tried = np.flatnonzero(evidence.judged)
    nodes = np.flatnonzero(evidence.judged & c.rejected)
    miss = _misses(evidence, nodes)
    every = Grouping(np.zeros(len(nodes), np.int64), 1)
    return Rejections(
        Share(len(nodes), len(tried)),
        _counted(every, miss)[0],
        tuple(_tokens(evidence, tried, nodes, miss)),
        tuple(_groups(evidence, tried, nodes, miss)) if len(nodes) else (),
        evidence.notes(of_tokens=True),
    )


def _misses(evidence: Evidence, nodes: Indices) -> Indices:
    """The place in MISSES of each of these nodes."""
    raw, top, rank = evidence.raw_p[nodes], evidence.top_p[nodes], evidence.rank[nodes]
    near = (raw >= NEAR * top) | ((rank <= NEAR_RANK) & (raw >= NEAR_LEAST))
    kind = np.where(near, 0, np.where(raw < NONSENSE, 2, 1))
    return np.where(np.isnan(raw), 3, kind).astype(np.int64)


def _counted(groups: Grouping, miss: Indices) -> list[dict[Miss, int]]:
    """How many misses of each kind every group has."""
    columns = [groups.counts(miss == kind) for kind in range(len(MISSES))]
    return [dict(zip(MISSES, row, strict=True)) for row in zip(*columns, strict=True)]


def _tokens(evidence: Evidence, tried: Indices, nodes: Indices, miss: Indices) -> Iterator[RejectedToken]:
    """A row for each token, the most rejections first."""
    c = evidence.columns
    if not c.named[nodes].all():
        return
    tokens, groups = by_value(c.token[nodes])
    total, rejected = _times(tokens, c.token[tried]), groups.counts()
    taken, misses = groups.commonest(evidence.taken[nodes]), _counted(groups, miss)
    raw, rank = groups.medians(evidence.raw_p[nodes]), groups.medians(evidence.rank[nodes])
    depth, label = groups.commonest(c.depth[nodes]), groups.commonest(evidence.label[c.step[nodes]])
    position = groups.medians(evidence.position[nodes])
    examples = groups.examples(c, nodes, evidence.confidence[nodes], nodes=True)
    for row in np.argsort(-np.array(rejected), kind="stable").tolist():
        yield RejectedToken(
            int(tokens[row]),
            Share(rejected[row], total[row]),
            tuple(Count(*pair) for pair in taken[row][:TAKEN]),
            misses[row],
            raw[row],
            rank[row],
            depth[row][0][0],
            evidence.label_names[label[row][0][0]],
            position[row],
            examples[row],
        )


def _groups(evidence: Evidence, tried: Indices, nodes: Indices, miss: Indices) -> Iterator[RejectionGroup]:
    """Rows by depth, by the request's kind, by the kind of final token, by position, and by miss."""
    c = evidence.columns
    place = POSITIONS.place(evidence.position)
    label, kind = evidence.label[c.step], c.kind[c.step].astype(np.int64)
    yield from _rows(evidence, "depth", c.depth[tried], nodes, c.depth[nodes], miss, str)
    yield from _rows(evidence, "kind", label[tried], nodes, label[nodes], miss, evidence.label_names.__getitem__)
    yield from _rows(evidence, "final", kind[tried], nodes, kind[nodes], miss, lambda number: KINDS[number].value)
    yield from _rows(evidence, "position", place[tried], nodes, place[nodes], miss, POSITIONS.name)
    if (c.source >= 0).any():  # drafts come from a text beside a model
        source = c.source.astype(np.int64)
        names = (*SOURCES, "one drafter")  # the last is also number -1: steps with one drafter alone
        yield from _rows(evidence, "source", source[tried], nodes, source[nodes], miss, names.__getitem__)
    yield from _rows(evidence, "miss", None, nodes, miss, miss, lambda number: MISSES[number].value)


def _rows(
    evidence: Evidence,
    by: str,
    trials: Indices | None,
    nodes: Indices,
    value: Indices,
    miss: Indices,
    name: Callable[[int], str],
) -> Iterator[RejectionGroup]:
    """A row for each value that has rejections.

    `trials`: the values of all nodes tried, of which the share is; None: the share is of all rejections.
    """
    c = evidence.columns
    values, groups = by_value(value)
    total = [len(nodes)] * len(values) if trials is None else _times(values, trials)
    rejected, misses = groups.counts(), _counted(groups, miss)
    token, taken = groups.commonest(c.token[nodes]), groups.commonest(evidence.taken[nodes])
    examples = groups.examples(c, nodes, evidence.confidence[nodes], nodes=True)
    for row, key in enumerate(values.tolist()):
        taken_most = Count(*taken[row][0]) if taken[row] else None
        share = Share(rejected[row], total[row])
        rejected_most = Count(*token[row][0]) if token[row] else None
        yield RejectionGroup(by, name(key), share, misses[row], rejected_most, taken_most, examples[row])


def _times(values: Indices, among: Indices) -> list[int]:
    """How often each of these ascending values is among others."""
    ordered = np.sort(among)
    times: list[int] = (np.searchsorted(ordered, values, "right") - np.searchsorted(ordered, values, "left")).tolist()
    return times
