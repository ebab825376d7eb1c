"""Judging a tree that was not drafted: for each recorded step, the nodes that it would have had, and their reach.

A static tree consists of the candidates at its paths of ranks. A dynamic tree is grown again from the recorded scores,
as speculate/drafters/tree_builder.py grows it: at each depth the `top` best new nodes are expanded by their `top`
likeliest children, and the best `nodes` of all are kept. Where it would have considered nodes that the record does not
hold, an assumption takes their place, and the share of the result that rests on assumptions is reported.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from specscope.analyze.plain import fields
from specscope.analyze.tune.evidence import RecordedCandidates
from specscope.plans.plan import DynamicPlan, TreePlan
from specscope.trace.record.tree import Bools, Doubles, Ints
from specscope.tree_shape import TreeShape

Path = tuple[int, ...]  # of child ranks from the root
NAMES = {  # of fields, in JSON
    "length": "acceptance_length",
    "speed": "tokens_per_s",
    "step": "step_seconds",
    "untold": "assumed_share",
    "expected": "expected_tokens_per_s",
    "measured": "measured_tokens_per_s",
    "measured_length": "measured_acceptance_length",
}


@dataclass(frozen=True)
class Length:
    """A figure with its interval; None where too few requests are recorded to give one."""

    value: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class TreeRow:
    """A tree, and what it would have done in each of S steps."""

    plan: TreePlan | None  # None: no drafting
    family: str  # static, dynamic, asked, or plain: no drafting
    budget: int  # nodes that it may have
    accepted: Doubles  # [S] tokens, in expectation
    untold: float  # share of them that rests on assumptions
    nodes: float  # verified, mean per step
    length: Length = Length(1.0, 1.0, 1.0)  # acceptance length
    speed: Length | None = None  # tokens/s; None without costs
    step: float | None = None  # seconds
    names: tuple[str, ...] = ()  # recorded, default, choice
    over_default: Length | None = None  # of the choice: its tokens/s over the default's, paired by request
    expected: float | None = None  # tokens/s at the costs during --check
    measured: float | None = None  # tokens/s, with --check
    measured_length: float | None = None

    tree = cached_property[str](lambda row: "" if row.plan is None else str(row.plan))  # as --tree takes it
    depth = cached_property[int](lambda row: 0 if row.plan is None else row.plan.max_depth)

    @property
    def rate(self) -> float:
        """What trees are compared by: tokens per second, or per step without costs."""
        return self.length.value if self.speed is None else self.speed.value

    @property
    def error(self) -> float | None:
        """Tokens/s expected at the costs during the check, over those measured, less one; None where none were."""
        return None if self.measured is None or self.expected is None else self.expected / self.measured - 1

    def to_dict(self) -> dict[str, Any]:
        without = ("plan", "accepted", *(() if self.over_default else ("over_default",)))
        told = {NAMES.get(name, name): value for name, value in fields(self, *without).items()}
        return {"tree": self.tree, "depth": self.depth, **told}


class Judge:
    def __init__(self, evidence: RecordedCandidates) -> None:
        self.evidence = evidence
        self._reach, self._guessed = self._fill()
        self._rates = self._rates_by_rank()
        self._child = self._children()
        self._searched: tuple[object, tuple[Bools, Bools]] | None = None  # the last search

    def _fill(self) -> tuple[Doubles, Doubles]:
        """The reach of all candidates, with the drafter's q for what is not known, and the part that rests on q."""
        evidence = self.evidence
        reach, unknown = evidence.reach.copy(), np.isnan(evidence.reach)
        if unknown.any():
            rows = np.arange(len(reach))
            for column in range(reach.shape[1]):  # parents come first
                above = evidence.parent[:, column]
                up = np.where(above == reach.shape[1], 1.0, reach[rows, np.minimum(above, reach.shape[1] - 1)])
                reach[:, column] = np.where(unknown[:, column], up * evidence.q[:, column], reach[:, column])
        return reach, np.where(unknown, reach, 0.0)

    def _rates_by_rank(self) -> list[float]:
        """[ranks + 1] how often a child is accepted, given that its parent is (Sequoia's acceptance vector).

        Chen et al. 2024 (arXiv 2402.12374, section 3.1): it depends on the rank alone. The last is of all other ranks.
        """
        evidence, reach = self.evidence, np.nan_to_num(self.evidence.reach)
        above = np.concatenate([reach, np.ones((len(reach), 1))], axis=1)
        rates = []
        for rank in range(evidence.max_rank):
            tried = float(above[evidence.known > rank].sum())
            rates.append(float(reach[evidence.rank == rank].sum()) / tried if tried else 0.0)
        return [*rates, 0.0]

    def _children(self) -> Ints:
        """[S, C + 2, ranks + 1] the place of each candidate's children, C + 1 where there is none; the root is C."""
        evidence = self.evidence
        rows, width = evidence.parent.shape
        child = np.full((rows, width + 2, evidence.max_rank + 1), width + 1, np.int32)  # none has the last rank
        row, column = np.nonzero(evidence.depth)
        child[row, evidence.parent[row, column], evidence.rank[row, column]] = column
        return child

    def row(self, plan: TreePlan, family: str = "asked") -> TreeRow:
        lost = np.zeros(len(self._reach))
        if isinstance(plan, DynamicPlan):
            seen, unexpanded = self.search(plan.depth, plan.top)
            chosen, lost = first(seen, plan.nodes), np.where(unexpanded[:, :-1], self._reach, 0).sum(1)
        elif self.evidence.lookup:
            chosen = self._continuations(plan.shape)
        else:
            values = [self.position(path) for path in plan.shape.paths]
            accepted, untold = (np.sum(each, axis=0) for each in zip(*values, strict=True))
            return _row(plan, family, accepted, untold, float(len(plan.shape)))
        accepted, guessed = (np.where(chosen, values, 0).sum(1) for values in (self._reach, self._guessed))
        return _row(plan, family, accepted, guessed + lost, float(chosen.sum(1).mean()))

    def position(self, path: Path) -> tuple[Doubles, Doubles]:
        """[S] the reach of the candidate at a path of ranks, and the part of it that rests on assumptions."""
        evidence, steps = self.evidence, np.arange(len(self.evidence.request))
        width = evidence.parent.shape[1]
        node: Ints = np.full(len(steps), width, np.int32)
        value, untold = np.ones(len(steps)), np.zeros(len(steps))
        reach = np.concatenate([self._reach, np.zeros((len(steps), 2))], axis=1)
        guessed = np.concatenate([self._guessed, np.zeros((len(steps), 2))], axis=1)
        known = np.concatenate([evidence.known, np.zeros((len(steps), 1), np.int32)], axis=1)
        for rank in path:
            rank = min(rank, evidence.max_rank)
            below = self._child[steps, node, rank]
            there = below <= width
            is_known = there | (known[steps, node] > rank) | (value == 0)
            beyond = np.where(is_known, 0.0, value * self._rates[rank])
            value = np.where(there, reach[steps, below], beyond)
            untold = np.where(there, guessed[steps, below], beyond)
            node = below
        return value, untold

    def _continuations(self, shape: TreeShape) -> Bools:
        """[S, C] WIDTHxDEPTH of prompt lookup: its most recent continuations, cut to the depth.

        Continuations that differ only below the depth count as one here; a run would have searched for another one.
        """
        width, depth = sum(above < 0 for above in shape.parent), shape.max_depth
        evidence = self.evidence
        chosen: Bools = np.zeros(evidence.depth.shape, np.bool_)
        for row in range(len(chosen)):
            parents, depths = evidence.parent[row], evidence.depth[row]
            nodes = np.flatnonzero((depths > 0) & (depths <= depth)).tolist()
            inner = {int(parents[node]) for node in nodes}
            for leaf in [node for node in nodes if node not in inner][:width]:
                place = leaf
                while place < chosen.shape[1]:
                    chosen[row, place] = True
                    place = int(parents[place])
        return chosen

    def search(self, depth: int, top: int) -> tuple[Bools, Bools]:
        """[S, C] the candidates that a dynamic search considers, and [S, C + 1] those whose children are not recorded.

        Candidates are in the order of the drafter's scores: the best of a set are its first.
        """
        if self._searched is not None and self._searched[0] == (depth, top):
            return self._searched[1]
        evidence = self.evidence
        rows, width = evidence.parent.shape
        seen, unexpanded = np.zeros((rows, width), np.bool_), np.zeros((rows, width + 1), np.bool_)
        frontier = np.zeros((rows, width + 1), np.bool_)
        frontier[:, width] = True  # the root
        for level in range(1, depth + 1):
            unexpanded |= frontier & (evidence.known < top)
            new = np.take_along_axis(frontier, evidence.parent, axis=1) & (evidence.depth == level)
            new &= evidence.rank < top
            seen |= new
            frontier = np.zeros((rows, width + 1), np.bool_)
            frontier[:, :-1] = first(new, top)
        self._searched = (depth, top), (seen, unexpanded)
        return seen, unexpanded


def _row(plan: TreePlan, family: str, accepted: Doubles, untold: Doubles, nodes: float) -> TreeRow:
    total = float(accepted.sum())
    return TreeRow(plan, family, plan.max_nodes, accepted, float(untold.sum()) / total if total else 0.0, nodes)


def first(some: Bools, count: int) -> Bools:
    """The first `count` of some candidates in each row, which are the best."""
    return np.asarray(some & (np.cumsum(some, axis=1) <= count))
