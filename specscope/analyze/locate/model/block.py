"""The part of a tensor that differs, on both sides, and when a prediction explains it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from specscope.analyze.locate.located import FedRow

MOST = 0.95  # a relation holds where it explains this share of the rows
FEWEST_CHANNELS = 8  # that one number must explain before it is taken for a rule
FEWEST_ROWS = 4


def name_of(factor: float, tolerance: float) -> str:
    """A factor as the simple form it has, " = 1/sqrt(3)", or ""."""
    forms: dict[str, float] = {}
    for number in (*range(2, 17), 32, 64, 80, 96, 128, 256, 512):
        forms |= {str(number): number, f"1/{number}": 1 / number}
        forms |= {f"sqrt({number})": number**0.5, f"1/sqrt({number})": number**-0.5}
    size, sign = abs(factor), "-" if factor < 0 else ""
    name = next((name for name, value in forms.items() if abs(size - value) <= tolerance * value), "")
    return f" = {sign}{name}" if name and f"{sign}{name}" != figure(factor) else ""


def figure(value: float) -> str:
    """Three digits."""
    return f"{value:.3g}"


@dataclass(frozen=True)
class Block:
    """Rows and channels that differ."""

    ours: Tensor  # [n, w]
    right: Tensor  # [n, w]
    rows: Sequence[FedRow]  # n of them
    heads: int  # that the w channels are of
    allowed: float
    known: Tensor  # [m, w] right values of all rows that were fed, then of others
    fed: Sequence[FedRow]  # the first of `known`
    vectors: Mapping[str, Tensor] = field(default_factory=dict)  # [n, w] each

    def narrowed(self, columns: Tensor, heads: int) -> Block:
        """Some channels of it."""
        return replace(
            self,
            ours=self.ours[:, columns],
            right=self.right[:, columns],
            heads=heads,
            known=self.known[:, columns],
            vectors={name: vector[:, columns] for name, vector in self.vectors.items()},
        )

    @property
    def tolerance(self) -> Tensor:
        """[n] how far a prediction of a row may be off: what rounding explains, or a 50th of the difference.

        Never more than a fifth of the difference, or a prediction of no change would explain a small one.
        """
        difference = (self.ours - self.right).norm(dim=1)
        rounding = self.allowed * torch.maximum(self.ours.norm(dim=1), self.right.norm(dim=1))
        return torch.minimum(torch.maximum(rounding, 0.02 * difference), 0.2 * difference)

    def explained(self, predicted: Tensor) -> str:
        """What `counted` says of the rows that a prediction [n, w] explains."""
        return self.counted(int(((self.ours - predicted).norm(dim=1) <= self.tolerance).sum()))

    def counted(self, count: int, share: float = MOST) -> str:
        """ "at 37 of 37 rows", or "" where it is too few."""
        number = len(self.rows)
        return f"at {count} of {number} {'row' if number == 1 else 'rows'}" if count >= max(share * number, 1) else ""
