"""How well a model's output under some mistake agrees with what was recorded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from specscope.analyze.audit.model.judge import drafted_by_model
from specscope.analyze.diagnose.case import Step
from specscope.trace.record.rules import ROUNDING
from specscope.trace.record.tree import ROOT, Floats, Ints

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
        if right.share < 0.9 or right.mean <= 0:
            return counted
        return max(counted, 1 - self.mean / right.mean)

    def counts(self, right: Match) -> tuple[int, int]:
        """Of the parents that differ without any mistake, how many more agree than are spoiled; and how many differ."""
        differing = right.total - right.same
        return min(max(round(self.gain(right) * differing), 0), differing), differing

    def common_scale(self, least: int) -> tuple[float, int] | None:
        """(factor, parents): one factor on all logits that gives what was recorded, and at how many parents it does.

        None where there is none. `least`: how many parents must have some factor.
        """
        if len(self.scales) < max(least, 0.5 * (self.total - self.same)):
            return None
        scale = float(np.median(self.scales))
        alike = sum(abs(factor / scale - 1) < 0.1 for factor in self.scales)
        return (scale, alike) if alike >= 0.8 * len(self.scales) else None

    def add(self, other: Match) -> None:
        """Add the counts of another match."""
        self.same, self.total = self.same + other.same, self.total + other.total
        self.permuted, self.off = self.permuted + other.permuted, self.off + other.off
        self.scales += other.scales

    def __str__(self) -> str:
        return f"{self.same:,} of {self.total:,} (off by {self.mean:.2g} on average)"


def slack(dtype: str) -> float:
    """How far a probability may be off in this dtype."""
    return max(LEAST, 2 * ROUNDING.get(dtype, ROUNDING["bfloat16"]))


def recorded(step: Step, *, drafter: bool) -> list[tuple[int, Ints, Floats | None]]:
    """(parent, its likeliest tokens, their raw probabilities) of the target or the drafter, where they are recorded.

    Of a drafter that does not tell them, the likeliest tokens are those that it drafted because they are: with their
    probabilities, where these are recorded, else None.
    """
    notes = step.part.parents
    if notes is not None:
        tokens, probs = (notes.draft_top, notes.draft_top_p) if drafter else (notes.top, notes.top_p)
        if tokens.shape[1]:
            return [(int(node), tokens[index], probs[index]) for index, node in enumerate(notes.node.tolist())]
    if not drafter or step.is_sampled:
        return []
    by_parent = [(parent, drafted_by_model(step.part, parent)) for parent in sorted({*step.tree.parent.tolist()})]
    notes_of = step.part.notes
    return [
        (parent, step.tree.token[nodes], None if notes_of is None else notes_of.prob[nodes])
        for parent, nodes in by_parent
        if nodes
    ]


def among(logits: Tensor, known: int | None) -> Tensor:
    """Logits [..., V] with which only the first `known` tokens can be chosen; all where that is None."""
    if known is None:
        return logits
    cut = logits.clone()
    cut[..., known:] = -torch.inf
    return cut


def compare(match: Match, row: Tensor, tokens: Ints, probs: Floats | None, allowed: float) -> None:
    """Count one parent: a row of logits [V] against recorded probabilities of some tokens, or against their order."""
    p = row.softmax(-1)
    match.total += 1
    deviation = float(np.abs(p[tokens.tolist()].numpy() - likeliest(p, tokens, probs)).max())
    match.off += deviation
    if deviation <= allowed:
        match.same += 1
    elif probs is None:
        return
    elif (
        float(probs.max()) < SURE
        and float(np.abs(p.topk(len(probs)).values.numpy() - np.sort(probs)[::-1]).max()) <= allowed
    ):
        match.permuted += 1
    elif (scale := _scale(row, tokens, probs, allowed)) is not None:
        match.scales.append(scale)


def _scale(row: Tensor, tokens: Ints, probs: Floats, allowed: float) -> float | None:
    """The factor on the logits that gives the recorded probabilities; None where none does."""
    logprobs = row.log_softmax(-1)[tokens.tolist()].double().numpy()
    there = np.log(np.maximum(probs.astype(np.float64), 1e-30))
    known = np.isfinite(logprobs) & (probs > 1e-6)
    if known.sum() < 3 or np.ptp(logprobs[known]) < 0.1:
        return None
    scale = float(np.polyfit(logprobs[known], there[known], 1)[0])
    if not 0.05 < scale < 20 or abs(scale - 1) < 0.01:
        return None
    p = (row * scale).softmax(-1)[tokens.tolist()].numpy()
    return scale if float(np.abs(p - probs).max()) <= 2 * allowed else None


def likeliest(p: Tensor, tokens: Ints, probs: Floats | None) -> Floats:
    """The probabilities recorded for these tokens; where there are none, what they must have: to be p's likeliest."""
    return np.asarray(p.topk(len(tokens)).values.numpy(), np.float32) if probs is None else probs


def compare_rows(
    match: Match, step: Step, logits: Tensor, allowed: float, *, drafter: bool, late: bool = False
) -> None:
    """Count a step's parents. `logits` [n + 1, V] at root and nodes; `late`: each parent by its own parent's row."""
    for node, tokens, probs in recorded(step, drafter=drafter):
        if late and node == ROOT:
            continue
        row = int(step.tree.parent[node]) + 1 if late else node + 1
        compare(match, logits[row], tokens, probs, allowed)


def beginnings(steps: Sequence[Step], requests: int, longest: int) -> list[list[Step]]:
    """The first steps of some requests, spread over the run, up to a preemption or a gap."""
    by_request: dict[str, list[Step]] = {}
    for step in steps:
        by_request.setdefault(step.request, []).append(step)
    firsts = ((part[0], part) for part in by_request.values())
    whole = [part for first, part in firsts if first.visit.part.index <= 64 and first.last is None]
    chosen = whole[:: max(1, len(whole) // requests)][:requests]
    return [_unbroken(part)[:longest] for part in chosen]


def _unbroken(steps: Sequence[Step]) -> list[Step]:
    unbroken: list[Step] = []
    for step in steps:
        if step.visit.preempted or step.part.position != step.after - 1:
            break
        unbroken.append(step)
    return unbroken
