"""How well a model's output under some mistake agrees with what was recorded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields

import numpy as np
from torch import Tensor

from specscope.analyze.audit.model.rows import recorded
from specscope.analyze.verify.case import Step
from specscope.trace.record.rules import ROUNDING
from specscope.trace.record.tree import Floats, Ints

SURE = 0.99  # a row so sure of one token is like many others
LEAST = 3e-4  # probabilities that differ by less are the same


@dataclass
class Match:
    """Parents at which the recorded likeliest tokens have the probabilities that were computed."""

    same: int = 0
    total: int = 0
    permuted: int = 0  # of those that differ, how many have the same probabilities at other tokens
    off: float = 0.0  # the sum over parents of their largest deviation
    scales: list[float] = field(default_factory=list)  # factors on the logits that mend those that differ

    @property
    def share(self) -> float:
        """Same over total."""
        return self.same / self.total if self.total else 0.0

    @property
    def differ(self) -> int:
        """How many differ."""
        return self.total - self.same

    @property
    def mean(self) -> float:
        """The mean of the largest deviations."""
        return self.off / self.total if self.total else 0.0

    def gain(self, right: Match) -> float:
        """How much of what differs without any mistake (`right`) is explained: 1 all of it, 0 nothing.

        By the parents that differ; where rounding hides these, by how far probabilities are off.
        """
        if not self.total or not right.total:
            return 0.0
        counted = (self.share - right.share) / (1 - right.share) if right.share < 1 else 0.0
        hidden = right.share >= 0.9 and right.mean > 0
        return max(counted, 1 - self.mean / right.mean) if hidden else counted

    def __add__(self, other: Match) -> Match:
        return Match(*(getattr(self, one.name) + getattr(other, one.name) for one in fields(self)))

    def __str__(self) -> str:
        return f"{self.same:,} of {self.total:,} (off by {self.mean:.2g} on average)"


def compare(step: Step, logits: Mapping[int, Tensor], dtype: str, *, drafter: bool, known: int | None) -> Match:
    """A step's parents. `logits` [V] at root and nodes; `known`: only so many first tokens can be chosen."""
    match, allowed = Match(), max(LEAST, 2 * ROUNDING.get(dtype, ROUNDING["bfloat16"]))
    for parent, tokens, probs in recorded(step, drafter=drafter):
        if parent not in logits:
            continue
        row = logits[parent].clone()
        row[len(row) if known is None else known :] = -np.inf
        p = row.softmax(-1)
        likeliest = p.topk(len(tokens)).values.numpy()
        there = likeliest if probs is None else probs  # tokens without probabilities must be the likeliest
        deviation = float(np.abs(p[tokens.tolist()].numpy() - there).max())
        match.total, match.off, match.same = match.total + 1, match.off + deviation, match.same + (deviation <= allowed)
        if deviation <= allowed or probs is None:
            continue
        if probs.max() < SURE and np.abs(likeliest - np.sort(probs)[::-1]).max() <= allowed:
            match.permuted += 1
        elif (scale := _scale(row, tokens, probs, allowed)) is not None:
            match.scales.append(scale)
    return match


def _scale(row: Tensor, tokens: Ints, probs: Floats, allowed: float) -> float | None:
    """The factor on the logits that gives the recorded probabilities; None where none does."""
    logprobs = row.log_softmax(-1)[tokens.tolist()].double().numpy()
    there = np.log(np.maximum(probs.astype(np.float64), 1e-30))
    known = np.isfinite(logprobs) & (probs > 1e-6)
    if known.sum() < 3 or np.ptp(logprobs[known]) < 0.1:
        return None
    scale = float(np.polyfit(logprobs[known], there[known], 1)[0])
    p = (row * scale).softmax(-1)[tokens.tolist()].numpy()
    fits = 0.05 < scale < 20 and abs(scale - 1) >= 0.01 and np.abs(p - probs).max() <= 2 * allowed
    return scale if fits else None
