"""Costs: what a step and a drafting pass take on one machine with one model. No torch.

They are measured once and kept in a file (engine/cost_file.py): what follows from them is then the same in every run.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from specscope.trace.costs import Point, at

KIND = "specscope engine costs"


@dataclass(frozen=True)
class Costs:
    """Seconds. Points are by rows in all; a batch of B requests takes B - 1 times what a further request adds."""

    about: Mapping[str, str]  # machine, models and settings: a file is good for these alone
    step: tuple[Point, ...]  # forward and verification of one request, by rows
    step_request: float  # what each further request of a batch adds to a step
    tree_request: float  # and where trees are verified
    first: float  # a drafting pass over one request's root; 0 for a drafter that is no model
    first_request: float
    passes: tuple[Point, ...]  # each later pass, by rows
    quiet: bool = True  # whether nothing else kept the machine busy
    kind: str = KIND

    def step_seconds(self, rows: int, batch: int) -> float:
        """Of a step without drafting."""
        return at(self.step, rows) + (batch - 1) * (self.tree_request if rows > batch else self.step_request)

    def first_tree_seconds(self, batch: int) -> float:
        """Of that, what the first tree adds beyond its rows, however small it is."""
        return max(self.tree_request - self.step_request, 0.0) * (batch - 1)

    def first_seconds(self, batch: int) -> float:
        """Of the first drafting pass, with all that drafting takes once."""
        return self.first + (batch - 1) * self.first_request

    def pass_seconds(self, rows: int) -> float:
        """Of a later drafting pass."""
        return at(self.passes, rows)

    @property
    def digest(self) -> str:
        """By which a capture names the costs that its trees follow from."""
        return hashlib.blake2b(msgspec.json.encode(self), digest_size=6).hexdigest()
