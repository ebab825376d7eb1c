"""Which drafted tokens are rejected most, and what the target took instead."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from specscope.analyze.evidence.arrays import Indices
from specscope.analyze.questions.evidence import Evidence
from specscope.analyze.questions.groups import Examples, Share, by_value

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
    rows = tuple(_tokens(evidence, tried, nodes)) if known else ()
    return Rejections(Share(len(nodes), len(tried)), rows, evidence.notes(of_tokens=True))


def _tokens(evidence: Evidence, tried: Indices, nodes: Indices) -> Iterator[RejectedToken]:
    """A row for each token, the most rejections first."""
    c = evidence.columns
    tokens, groups = by_value(c.token[nodes])
    ordered = np.sort(c.token[tried])
    total = np.searchsorted(ordered, tokens, "right") - np.searchsorted(ordered, tokens, "left")
    rejected, taken, depth = groups.counts(), groups.commonest(evidence.taken[nodes]), groups.commonest(c.depth[nodes])
    raw, rank = groups.medians(evidence.raw_p[nodes]), groups.medians(evidence.rank[nodes])
    examples = groups.examples(c, nodes, evidence.confidence[nodes], nodes=True)
    for row in np.argsort(-np.array(rejected), kind="stable").tolist():
        share, most = Share(rejected[row], int(total[row])), tuple(Count(*pair) for pair in taken[row][:TAKEN])
        yield RejectedToken(int(tokens[row]), share, most, raw[row], rank[row], depth[row][0][0], examples[row])
