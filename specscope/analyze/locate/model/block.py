"""The part of a tensor that differs, on both sides, and when a prediction explains it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from specscope.analyze.locate.located import FedRow

MOST = 0.95  # a relation holds where it explains this share of the rows
SAMPLED = 32
NEAR_ZERO = 0.1  # of the median norm: below this, a row's own norm says nothing about the size of its rounding


def relative_errors(ours: Tensor, right: Tensor, heads: int = 1) -> Tensor:
    """[rows, heads] |ours - right| / |right|, each head by itself; both are [rows, width].

    A row near zero is divided by a tenth of the median norm of the rows of its head, for its rounding is as large as
    theirs. Equal values differ by nothing, infinite ones too; NaN on our side only is infinitely off. A width that the
    heads do not divide is one head.
    """
    rows, width = right.shape
    heads = heads if heads > 0 and width % heads == 0 else 1
    difference = torch.where(ours == right, 0.0, ours - right).reshape(rows, heads, -1).norm(dim=-1)
    norms = torch.nan_to_num(right, nan=0.0, posinf=0.0, neginf=0.0).reshape(rows, heads, -1).norm(dim=-1)
    if not rows:
        return torch.zeros(0, heads)
    floor = (NEAR_ZERO * norms.median(dim=0, keepdim=True).values).clamp_min(1e-30)
    errors: Tensor = difference / torch.maximum(norms, floor)
    return errors.nan_to_num(nan=torch.inf, posinf=torch.inf)


def names_of(factor: float, sizes: Sequence[int], tolerance: float) -> str:
    """A factor as the simple form it has, " = 1/sqrt(3)", or ""; sizes are widths whose root may stand in it."""
    forms: dict[str, float] = {}
    for number in (*range(2, 17), *sizes):
        root = number**0.5
        forms.setdefault(str(number), float(number))
        forms.setdefault(f"1/{number}", 1 / number)
        if root != int(root) or number in sizes:
            forms.setdefault(f"sqrt({number})", root)
            forms.setdefault(f"1/sqrt({number})", 1 / root)
    for over, under in ((3, 2), (2, 3), (3, 4), (4, 3)):
        forms[f"{over}/{under}"] = over / under
    size, sign = abs(factor), "-" if factor < 0 else ""
    fits = (name for name, value in forms.items() if abs(size - value) <= tolerance * value)
    name = next(fits, "")
    return f" = {sign}{name}" if name and f"{sign}{name}" != figure(factor) else ""


def figure(value: float) -> str:
    """Three digits."""
    return f"{value:.3g}"


@dataclass(frozen=True)
class Block:
    """Rows and channels that differ."""

    ours: Tensor  # [n, w]
    right: Tensor  # [n, w]
    rows: tuple[FedRow, ...]  # n of them
    heads: int  # that the w channels are of
    allowed: float
    known: Tensor  # [m, w] right values of all rows that were fed, then of others
    fed: tuple[FedRow, ...]  # the first of `known`
    whole: Tensor  # [n, width] the right values of all channels
    columns: Tensor  # [w] where the channels stand in the width
    size: int  # of a head, in the width
    vectors: Mapping[str, Tensor]  # [n, w] each

    @classmethod
    def of_rows(
        cls,
        ours: Tensor,
        right: Tensor,
        wrong: Tensor,
        rows: Sequence[FedRow],
        heads: int,
        others: Tensor | None,
        vectors: Mapping[str, Tensor],
        allowed: float,
    ) -> Block:
        """The rows that are wrong, in all channels; others and vectors that do not fit are left out."""
        width = ours.shape[1]
        fitting = others is not None and others.dim() == 2 and others.shape[1] == width
        known = torch.cat([right, others.float()]) if fitting and others is not None else right
        fits = {name: vector.float() for name, vector in vectors.items() if _fits(vector, right)}
        wide = {name: vector.expand_as(right)[wrong] for name, vector in fits.items()}
        bad = tuple(row for row, off in zip(rows, wrong.tolist(), strict=True) if off)
        columns = torch.arange(width)
        whole = right[wrong]
        return cls(ours[wrong], whole, bad, heads, allowed, known, tuple(rows), whole, columns, width // heads, wide)

    def narrowed(self, columns: Tensor, heads: int) -> Block:
        """Some channels of it."""
        if len(columns) == self.ours.shape[1]:
            return self
        return replace(
            self,
            ours=self.ours[:, columns],
            right=self.right[:, columns],
            heads=heads,
            known=self.known[:, columns],
            columns=columns,
            vectors={name: vector[:, columns] for name, vector in self.vectors.items()},
        )

    def sampled(self) -> Block:
        """A few rows of it, on which a relation is tried before it is over all of them."""
        chosen = torch.linspace(0, len(self.rows) - 1, min(len(self.rows), SAMPLED)).long()
        return replace(
            self,
            ours=self.ours[chosen],
            right=self.right[chosen],
            rows=tuple(self.rows[number] for number in chosen.tolist()),
            whole=self.whole[chosen],
            vectors={name: vector[chosen] for name, vector in self.vectors.items()},
        )

    @property
    def tolerance(self) -> Tensor:
        """[n] how far a prediction of a row may be off: what rounding explains, or a 50th of the difference.

        Never more than a fifth of the difference, or a prediction of no change would explain a small one.
        """
        difference = (self.ours - self.right).norm(dim=1)
        rounding = self.allowed * torch.maximum(self.ours.norm(dim=1), self.right.norm(dim=1))
        return torch.minimum(torch.maximum(rounding, 0.02 * difference), 0.2 * difference)

    def explained(self, predicted: Tensor) -> int:
        """How many rows a prediction [n, w] explains."""
        return int(((self.ours - predicted).norm(dim=1) <= self.tolerance).sum())

    def counted(self, count: int, share: float = MOST) -> str:
        """ "at 37 of 37 rows", or "" where it is too few."""
        number = len(self.rows)
        return f"at {count} of {number} {'row' if number == 1 else 'rows'}" if count >= max(share * number, 1) else ""


def _fits(vector: Tensor, right: Tensor) -> bool:
    return vector.shape == right.shape or vector.shape == right.shape[1:]
