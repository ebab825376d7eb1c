"""Costs: what a step and a drafting pass take on one machine with one model. No torch.

They are measured once and kept in a file (engine/cost_file.py): what follows from them is then the same in every run.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from specscope.trace.costs import CostPoint, at

KIND = "specscope engine costs"


@dataclass(frozen=True)
class Costs:
    """Seconds. Points are by rows in all."""

    about: Mapping[str, str]  # machine, models and settings: a file is good for these alone
    step: tuple[CostPoint, ...]  # forward and verification of one request, by rows
    batches: tuple[tuple[CostPoint, ...], ...]  # the same of more requests: as many as a curve's first point has rows
    first: float  # a drafting pass over one request's root; 0 for a drafter that is no model
    first_request: float
    passes: tuple[CostPoint, ...]  # each later pass, by rows
    quiet: bool = True  # whether nothing else kept the machine busy
    kind: str = KIND

    def step_seconds(self, rows: int, batch: int) -> float:
        """Of a step without drafting: on the line between the batches that were measured, or beyond the last two."""
        curves = (self.step, *self.batches)
        if len(curves) == 1:
            return at(self.step, rows)
        sizes = [1, *(curve[0].rows for curve in self.batches)]
        above = min(max(bisect_left(sizes, batch), 1), len(sizes) - 1)
        plain, trees = [], []
        for size, curve in zip(sizes[above - 1 : above + 1], curves[above - 1 : above + 1], strict=True):
            plain.append(curve[0].seconds if size > 1 else at(curve, size))
            trees.append(self._along(curve, size + rows - batch) - plain[-1])
        share = (batch - sizes[above - 1]) / (sizes[above] - sizes[above - 1])
        further = max(plain[1] - plain[0], 0.0) * share
        return plain[0] + further + trees[0] + min(share, 1.0) * (trees[1] - trees[0])

    def _along(self, curve: tuple[CostPoint, ...], rows: int) -> float:
        """At so many rows; beyond the last that was measured, rows take what they take of one request."""
        last = curve[-1].rows
        return at(curve, rows) if rows <= last else curve[-1].seconds + at(self.step, rows) - at(self.step, last)

    def first_tree_seconds(self, batch: int) -> float:
        """What the first tree adds beyond its rows, however small it is."""
        none, one, two = (self.step_seconds(batch + nodes, batch) for nodes in range(3))
        return max(one - none - (two - one), 0.0)

    def first_seconds(self, batch: int) -> float:
        """Of the first drafting pass, with all that drafting takes once; so much more for each further request."""
        return self.first + (batch - 1) * self.first_request

    def pass_seconds(self, rows: int) -> float:
        """Of a later drafting pass."""
        return at(self.passes, rows)

    @property
    def digest(self) -> str:
        """By which a capture names the costs that its trees follow from."""
        return hashlib.blake2b(msgspec.json.encode(self), digest_size=6).hexdigest()
