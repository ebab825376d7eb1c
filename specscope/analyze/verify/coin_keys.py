"""The keys that coins may follow from by mistake: another seed, stream or position than their own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from specscope.analyze.evidence.arrays import Indices
from specscope.analyze.evidence.columns import Columns
from specscope.analyze.verify.drafts import draw_numbers
from specscope.trace.record.coins import Stream, coins_at
from specscope.trace.record.tree import Doubles

MOSTLY = 0.8  # of the steps looked at: a key that fits fewer is none
BEFORE = "those of the request's step before"


@dataclass(frozen=True)
class Key:
    """What coins follow from: of each step its seed and position; and the stream."""

    seed: NDArray[np.uint64]
    stream: Stream
    position: Indices


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
        """The final token's coin, then those of the nodes."""
        step, number = np.concatenate([np.arange(len(c)), c.step]), np.concatenate([np.zeros(len(c)), c.node + 1])
        return CoinsOf(c, Stream.VERIFY, step, number.astype(np.int64), np.concatenate([c.final_coin, c.coin]))

    @staticmethod
    def drafts(c: Columns) -> CoinsOf:
        """The coins of drawn nodes."""
        number = draw_numbers(c)
        nodes = np.flatnonzero(c.drawn_by_coin & (number >= 0))
        return CoinsOf(c, Stream.DRAFT, c.step[nodes], number[nodes], c.draft_coin[nodes])

    @property
    def right(self) -> Key:
        """The key that they should have."""
        seed = np.array([params.seed for params in self.c.params], np.uint64)
        return Key(seed, self.stream, self.c.position.astype(np.int64))

    def keys(self) -> Mapping[str, Key]:
        """By what they are in words."""
        c, own = self.c, self.right
        of_draws = self.stream is Stream.DRAFT
        row = np.array([visit.row for visit in c.visits], np.int64)
        index = np.array([visit.part.index for visit in c.visits], np.int64)
        seeds = {
            "those of its row in the batch as seed": row.astype(np.uint64),
            "those of its seed plus its row": own.seed + row.astype(np.uint64),
            "those of seed 0": np.zeros_like(own.seed),
            "those of the first request's seed": np.full_like(own.seed, own.seed[0]),
        }
        positions = {
            BEFORE: own.position[np.where(c.before >= 0, c.before, np.arange(len(c)))],
            "those of its position plus its row": own.position + row,
            "those of the engine's step": c.batch,
            "those of the request's step": index,
            "those of the seed at another place": np.zeros_like(own.position),
        }
        other = "those of the verdict on them" if of_draws else "those that drew the drafts"
        return {
            **{name: Key(own.seed, self.stream, position) for name, position in positions.items()},
            **{name: Key(seed, self.stream, own.position) for name, seed in seeds.items()},
            other: Key(own.seed, Stream.VERIFY if of_draws else Stream.DRAFT, own.position),
        }

    def same(self, steps: Indices, key: Key) -> Doubles:
        """[steps], which rise: the share of each one's coins that are those of a key; 1 where it has none."""
        mine = np.isin(self.step, steps)
        at, number = np.searchsorted(steps, self.step[mine]), self.number[mine]
        counts = np.zeros(len(steps), np.int64)
        np.maximum.at(counts, at, number + 1)
        made = coins_at(key.seed[steps], key.stream, key.position[steps], counts)
        fits = made[(np.cumsum(counts) - counts)[at] + number] == self.value[mine]
        total = np.bincount(at, minlength=len(steps))
        return np.where(total > 0, np.bincount(at, fits, len(steps)) / np.maximum(total, 1), 1.0)

    def key_of(self, steps: Indices) -> tuple[str, int]:
        """The key that nearly all of these steps' coins follow from, and at how many they do; "" for none."""
        for name, key in self.keys().items() if len(steps) else ():
            fits = int((self.same(steps, key) == 1).sum())
            if fits > MOSTLY * len(steps):
                return name, fits
        return "", 0
