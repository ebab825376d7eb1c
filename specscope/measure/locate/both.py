"""One operation as the engine and as the reference have it, and a pass of a drafter as a sequence of them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from specscope.analyze.locate.located import FedRow, Held, Stage
from specscope.analyze.locate.model.reference import FLOOR
from specscope.analyze.locate.model.taps import relative
from specscope.measure.locate.target import AMPLIFIED, hold

LAYERS = re.compile(r"(midlayer|layers\.\d+)$")
LAYER = 100.0  # by how much a whole layer may magnify what its input is off; 70 was seen in a head of random weights
COMPILED = "the compiled layer gives something else than its own steps through torch's operators, which agree"


@dataclass(frozen=True)
class Both:
    """One operation of both sides."""

    name: str
    ours: Tensor  # [rows, width]; of attention's weights [rows, heads, keys]
    right: Tensor
    rows: tuple[FedRow, ...]
    heads: int = 1
    code: str = ""
    keys: tuple[FedRow, ...] = ()  # of attention's weights
    exact: bool = False  # whether no rounding is allowed
    looks: str = ""  # what the difference looks like, where the operation itself can say it
    certain: bool = True  # False: a region of several operations
    size: int = 0  # of attention's weights: channels of a head
    others: Tensor | None = field(default=None, repr=False)  # [m, width] right values at other positions

    @property
    def errors(self) -> Tensor:
        """[rows, parts] how far ours is off: relative; of weights the sum over keys; of exact values 0 or 1."""
        if self.exact:
            return (self.ours != self.right).float().flatten(1)
        if self.keys:
            return (self.ours - self.right).abs().sum(-1)
        known = self.right.isneginf() == self.ours.isneginf()
        errors = relative(_finite(self.ours), _finite(self.right), self.heads)
        return errors if bool(known.all()) else errors.masked_fill(~known.all(1)[:, None], 1.0)


@dataclass
class PassCompared:
    """One pass of a draft, up to what differs first."""

    rows: tuple[FedRow, ...]
    held: list[Held]
    wrong: Both | None = None

    def compare(self, operations: Iterable[Both], allowed: Mapping[str, float]) -> bool:
        """Hold operations against each other in their order, up to the first that differs; whether one does."""
        for both in operations:
            if not len(both.rows):
                continue
            limit = 0.0 if both.exact else max(allowed.get(both.name, FLOOR), self._grown(both.name))
            held = hold(both.name, both.errors, limit, code=both.code, stage=Stage.DRAFTER)
            self.held.append(held)
            if held.differs:
                self.wrong = both
                return True
        return False

    def _grown(self, name: str) -> float:
        """What the errors that were seen before may have grown to: by little in one operation, by more in a layer."""
        seen = [held.error for held in self.held if held.allowed]
        return (LAYER if LAYERS.match(name) else AMPLIFIED) * seen[-1] if seen else 0.0


def _finite(x: Tensor) -> Tensor:
    return torch.nan_to_num(x, nan=torch.nan, neginf=0.0)
