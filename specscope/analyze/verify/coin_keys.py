"""The keys that coins follow from: their own, or by mistake another seed, stream or position."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from specscope.analyze.evidence.arrays import Indices
from specscope.analyze.evidence.columns import RECOVERED, Columns
from specscope.plans.plan import StaticPlan, read_plan
from specscope.trace.record.coins import Stream, coins_at, draw_number
from specscope.trace.record.tree import ROOT, Doubles

MOSTLY = 0.8  # of the steps looked at: a key that fits fewer is none
BEFORE = "those of the request's previous step"
Key = tuple[NDArray[np.uint64], Stream, Indices]  # what coins follow from: of each step its seed and position


def own_key(c: Columns, stream: Stream) -> Key:
    """The key that coins should have."""
    return np.array([params.seed for params in c.params], np.uint64), stream, c.position


def coins_of(key: Key, step: Indices, number: Indices) -> Doubles:
    """The coins of a key with these numbers, at these steps."""
    seed, stream, position = key
    steps, at = np.unique(step, return_inverse=True)
    counts = np.zeros(len(steps), np.int64)
    np.maximum.at(counts, at, number + 1)
    every = coins_at(seed[steps], stream, position[steps], counts)
    return np.asarray(every[(np.cumsum(counts) - counts)[at] + number])


def draw_numbers(c: Columns) -> Indices:
    """[N] the number of each node's draw, as our drafters count them; below 0 where it is none of the plan's."""
    plan = None if c.run is None else read_plan(c.run.tree)
    if plan is None:
        return np.full(len(c.token), -1, np.int64)
    if not isinstance(plan, StaticPlan):
        return draw_number(c.parent, c.sibling)
    none, width = ROOT - 1, int(c.sibling.max(initial=0)) + 1
    children = np.full((len(plan.shape) + 2, width), none, np.int64)  # of the root, of each node, and of `none`
    for node in range(ROOT, len(plan.shape)):
        some = plan.shape.children(node)[:width]
        children[node - ROOT, : len(some)] = some
    number = np.full(c.rows, ROOT)
    for depth in range(1, int(c.depth.max(initial=0)) + 1):
        nodes = np.flatnonzero(c.depth == depth)
        number[c.own_row[nodes]] = children[number[c.row[nodes]] - ROOT, c.sibling[nodes]]
    return number[c.own_row]


@dataclass(frozen=True)
class CoinsOf:
    """The coins of verdicts, or those that drew drafts: of each its step, its number and itself."""

    c: Columns
    stream: Stream
    step: Indices
    number: Indices
    value: Doubles

    @staticmethod
    def verdicts(c: Columns) -> CoinsOf:
        """The final token's coin, then those of the nodes.

        Under match tried siblings share the first one's coin, and so does a token recovered after them.
        """
        first, eldest = np.zeros(c.rows, np.int64), np.flatnonzero(c.sibling == 0)
        first[c.row[eldest]] = c.node[eldest] + 1
        nodes = np.where(c.match[c.step] & c.tried, first[c.row], c.node + 1)
        finals = np.where(c.match & (c.kind == RECOVERED), first[c.final_row], 0)
        step = np.concatenate([np.arange(len(c)), c.step])
        return CoinsOf(c, Stream.VERIFY, step, np.concatenate([finals, nodes]), np.concatenate([c.final_coin, c.coin]))

    @staticmethod
    def drafts(c: Columns) -> CoinsOf:
        """The coins of drawn nodes."""
        number = draw_numbers(c)
        nodes = np.flatnonzero(c.drawn_by_coin & (number >= 0))
        return CoinsOf(c, Stream.DRAFT, c.step[nodes], number[nodes], c.draft_coin[nodes])

    @property
    def right(self) -> Key:
        """The key that they should have."""
        return own_key(self.c, self.stream)

    def keys(self) -> Mapping[str, Key]:
        """Other keys, by what coins of them are in words."""
        c, (seed, stream, position) = self.c, self.right
        row = np.array([visit.row for visit in c.visits], np.int64)
        index = np.array([visit.part.index for visit in c.visits], np.int64)
        rows, before = row.astype(np.uint64), np.where(c.before >= 0, c.before, np.arange(len(c)))
        other, theirs = Stream.DRAFT, "those that drew the drafts"
        if stream is Stream.DRAFT:
            other, theirs = Stream.VERIFY, "those of the verdict on them"
        return {
            BEFORE: (seed, stream, position[before]),
            "those of its position plus its row": (seed, stream, position + row),
            "those of the engine's step": (seed, stream, c.batch),
            "those of the request's step": (seed, stream, index),
            "those of the seed at another place": (seed, stream, np.zeros_like(position)),
            "those with its row in the batch as seed": (rows, stream, position),
            "those of its seed plus its row": (seed + rows, stream, position),
            "those of seed 0": (np.zeros_like(seed), stream, position),
            "those of the first request's seed": (np.full_like(seed, seed[0]), stream, position),
            theirs: (seed, other, position),
        }

    def same(self, steps: Indices, key: Key) -> Doubles:
        """[steps], which rise: the share of each one's coins that are those of a key; 1 where it has none."""
        mine = np.isin(self.step, steps)
        step = self.step[mine]
        at, fits = np.searchsorted(steps, step), coins_of(key, step, self.number[mine]) == self.value[mine]
        total = np.bincount(at, minlength=len(steps))
        return np.where(total > 0, np.bincount(at, fits, len(steps)) / np.maximum(total, 1), 1.0)

    def key_of(self, steps: Indices) -> tuple[str, int]:
        """The key that nearly all of these steps' coins follow from, and at how many they do; "" for none."""
        for name, key in self.keys().items() if len(steps) else ():
            fits = int((self.same(steps, key) == 1).sum())
            if fits > MOSTLY * len(steps):
                return name, fits
        return "", 0
