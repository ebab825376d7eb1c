"""One operation as an engine and as a reference have it, and a pass as a sequence of them.

Where a whole layer differs, the operations inside it are compared before it is named.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from specscope.analyze.findings import Reference
from specscope.analyze.locate.located import FedRow, Held, Stage, operation
from specscope.analyze.locate.model.reference import FLOOR, relative

OF_QUERIES, OF_KEYS = ("q_proj", ".query", ".attention", "o_proj:in"), ("k_proj", "v_proj", ".key", ".value", " read")
LAYERS = re.compile(r"(midlayer|layers\.\d+)$")
AMPLIFIED = 10.0  # by how much an operation may magnify what its input is off; 7 was seen in logits
MOST_AMPLIFIED = 30.0  # by how much rounding may grow beyond what is usual, over all layers
LAYER = 100.0  # by how much a layer of a head may magnify it; 70 was seen in a head of random weights


@dataclass(frozen=True)
class HeldPair:
    """One operation of both sides."""

    name: str
    ours: Tensor  # [rows, width]; of attention's weights [rows, heads, keys]
    right: Tensor
    rows: tuple[FedRow, ...]
    heads: int = 1
    keys: tuple[FedRow, ...] = ()  # of attention's weights
    exact: bool = False  # whether no rounding is allowed
    allowed: float | None = None  # what rounding explains; None: as the pass has it
    certain: bool = True  # False: a region of several operations
    tokens: Tensor | None = field(default=None, repr=False)  # [rows, width] whose values these are, where they differ
    inside: Callable[[float], Iterable[HeldPair]] | None = None  # of a layer its operations, by what it is allowed

    @cached_property
    def errors(self) -> Tensor:
        """[rows, parts] how far ours is off: relative; of weights the sum over keys; of exact values 0 or 1."""
        if self.exact:
            return (self.ours != self.right).float().flatten(1)
        if self.keys:
            return (self.ours - self.right).abs().sum(-1)
        known = self.right.isneginf() == self.ours.isneginf()
        errors = relative(_finite(self.ours), _finite(self.right), self.heads)
        return errors if bool(known.all()) else errors.masked_fill(~known.all(1)[:, None], 1.0)


@dataclass(frozen=True)
class Allowances:
    """What rounding explains: of an operation by itself, and as the error before it may have grown."""

    usual: Mapping[str, float]
    layer: float = AMPLIFIED
    most: float = MOST_AMPLIFIED
    slack: float = 1.0  # by how much more than usual rounding moves this pass

    def of(self, pair: HeldPair, seen: float) -> float:
        """`seen`: the error of the operation before it."""
        if pair.exact:
            return 0.0
        if pair.allowed is not None:
            return pair.allowed
        usual = self.usual.get(pair.name, self.usual.get("norm", FLOOR)) * self.slack
        grown = (self.layer if LAYERS.match(pair.name) else AMPLIFIED) * seen
        return min(max(usual, grown), self.most * usual)


@dataclass
class ComparedPass:
    """One pass of a model for one request, up to what differs first."""

    stage: Stage
    where: Reference
    rows: tuple[FedRow, ...]
    limits: Allowances
    held: list[Held] = field(default_factory=list)
    wrong: HeldPair | None = None

    def compare(self, pairs: Iterable[HeldPair]) -> bool:
        """Hold operations against each other in their order, up to the first that differs; whether one does."""
        for pair in pairs:
            if not len(pair.rows):
                continue
            limit = self.limits.of(pair, next((held.error for held in reversed(self.held) if held.allowed), 0.0))
            errors, place = pair.errors, operation(self.stage, pair.name)
            wrong, largest = int((errors > limit).any(1).sum()), float(errors.max()) if errors.numel() else 0.0
            if wrong and pair.inside is not None and self.compare(pair.inside(limit)):
                return True
            self.held.append(Held(place, limit, largest, len(errors), wrong, np.asarray(errors.numpy(), np.float32)))
            if wrong:
                self.wrong = pair
                return True
        return False

    @property
    def bad(self) -> list[FedRow]:
        """The rows that differ."""
        assert self.wrong is not None
        off = (self.wrong.errors > self.held[-1].allowed).any(1)
        return [self.wrong.rows[place] for place in off.nonzero()[:, 0].tolist()]


def heads_of(name: str, heads: int, kv_heads: int) -> int:
    """How many parts the rows of an operation inside a layer have."""
    return heads if name.endswith(OF_QUERIES) else kv_heads if name.endswith(OF_KEYS) else 1


def _finite(x: Tensor) -> Tensor:
    return torch.nan_to_num(x, nan=torch.nan, neginf=0.0)
