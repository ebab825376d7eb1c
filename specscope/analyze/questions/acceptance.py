"""Acceptance by output position, context length, the target's certainty, and batch size.

A draft is a step in which something was drafted (trace/history/stats.py). Its buckets: output tokens before it; tokens
of context before its root; the entropy of p, and the target's raw p of its likeliest token, both at the root; requests
in the batch. Intervals of tau are over requests, as the steps of one are alike; fewer than three give none.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from specscope.analyze.compare.bootstrap import FEWEST
from specscope.analyze.evidence.arrays import Indices
from specscope.analyze.plain import fields
from specscope.analyze.questions.evidence import POSITIONS, Evidence
from specscope.analyze.questions.groups import Buckets, Examples, Grouping, Share, by_value, doubling
from specscope.analyze.significance import t_quantile
from specscope.trace.record.tree import Doubles

LEVEL = 0.975  # of each side of an interval
CONTEXTS = doubling(64)
BATCHES = Buckets((1, 2, 3, 5, 9, 17, 33, 65), ("1", "2", "3–4", "5–8", "9–16", "17–32", "33–64", "65+"))
ENTROPIES = Buckets(
    (0, 1e-9, 0.1, 0.5, 1, 2, 4), ("0 (one token)", "0–0.1", "0.1–0.5", "0.5–1", "1–2", "2–4", "4+ nats")
)
CERTAINTIES = Buckets((0, 0.3, 0.5, 0.7, 0.9, 0.99), ("0–0.3", "0.3–0.5", "0.5–0.7", "0.7–0.9", "0.9–0.99", "0.99–1"))


@dataclass(frozen=True)
class Bucket:
    """Drafts in one range of a condition."""

    by: str
    value: str
    drafts: int
    drafted: int  # nodes
    accepted: int  # nodes
    interval: tuple[float, float] | None  # of tau
    first: Share  # drafts of which the first token was accepted
    examples: Examples  # clearest: the draft that lost most of its depth

    @property
    def tau(self) -> float:
        """Mean acceptance length."""
        return 1 + self.accepted / self.drafts

    @property
    def rate(self) -> float:
        """Draft acceptance rate."""
        return self.accepted / self.drafted

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {**fields(self), "mean_acceptance_length": self.tau, "draft_acceptance_rate": self.rate}


@dataclass(frozen=True)
class ByCondition:
    """Every condition's buckets, in the order of the condition."""

    buckets: tuple[Bucket, ...]
    notes: tuple[str, ...] = ()


def by_condition(evidence: Evidence) -> ByCondition:
    """Acceptance in every range of every condition."""
    if lacking := evidence.lacking(evidence.drafts):
        return ByCondition((), lacking)
    c, parents = evidence.columns, evidence.columns.parents
    top = parents.top_p[:, 0] if parents.top_p.size else np.zeros(0)
    conditions: tuple[tuple[str, Buckets, Doubles], ...] = (
        ("position", POSITIONS, evidence.output),
        ("context", CONTEXTS, c.position.astype(np.float64)),
        ("entropy", ENTROPIES, evidence.of_root(parents.entropy)),
        ("top p", CERTAINTIES, evidence.of_root(top)),
        ("batch", BATCHES, evidence.batch),
    )
    steps = np.flatnonzero(evidence.drafts)
    rows = [row for name, buckets, values in conditions for row in _rows(evidence, steps, name, buckets, values[steps])]
    return ByCondition(tuple(rows), evidence.notes())


def _rows(evidence: Evidence, steps: Indices, by: str, buckets: Buckets, values: Doubles) -> Iterator[Bucket]:
    c = evidence.columns
    places, groups = by_value(buckets.place(values))
    if places.tolist() == [len(buckets.edges)]:
        return  # nothing is known about it: the notes say so
    nodes = np.diff(c.start)[steps]
    accepted = np.bincount(c.step[c.on_path], minlength=len(c))[steps]
    depth = np.zeros(len(c), np.int64)
    np.maximum.at(depth, c.step, c.depth)
    drafts, drafted, taken = groups.counts(), groups.sums(nodes), groups.sums(accepted)
    first, intervals = groups.counts(accepted > 0), _intervals(groups, accepted, evidence.columns.request[steps])
    examples = groups.examples(c, steps, depth[steps] - accepted, nodes=False)
    for index, place in enumerate(places.tolist()):
        share = Share(first[index], drafts[index])
        counts = drafts[index], int(drafted[index]), int(taken[index])
        yield Bucket(by, buckets.name(place), *counts, intervals[index], share, examples[index])


def _intervals(groups: Grouping, accepted: Indices, request: Indices) -> list[tuple[float, float] | None]:
    """The interval of each group's tau, whose error is that of a ratio of sums over requests."""
    drafts = np.array(groups.counts(), np.float64)
    mean = groups.sums(accepted) / drafts
    off = accepted - mean[groups.group]
    span = int(request.max()) + 1
    pairs, place = np.unique(groups.group * span + request, return_inverse=True)
    by_request = np.bincount(place.reshape(-1), off)
    of_group = pairs // span
    squares = np.bincount(of_group, by_request**2, minlength=groups.groups)
    requests = np.bincount(of_group, minlength=groups.groups)
    intervals: list[tuple[float, float] | None] = []
    for m, n, square, k in zip(mean.tolist(), drafts.tolist(), squares.tolist(), requests.tolist(), strict=True):
        if k < FEWEST:
            intervals.append(None)
            continue
        half = t_quantile(LEVEL, k - 1) * math.sqrt(square * k / (k - 1)) / n
        intervals.append((max(1 + m - half, 1.0), 1 + m + half))
    return intervals
