"""Judging a tree that was not drafted: for each recorded step, the nodes that it would have had, and their reach.

A static tree consists of the candidates at its paths of ranks. A dynamic tree is grown again from the recorded scores,
as speculate/drafters/tree_builder.py grows it: at each depth the `top` best new nodes are expanded by their `top`
likeliest children, and the best `nodes` of all are kept. Where it would have considered nodes that the record does not
hold, an assumption takes their place, and the share of the result that rests on assumptions is reported.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from specscope.analyze.tune.evidence import RecordedCandidates
from specscope.plans.plan import DynamicPlan, TreePlan
from specscope.trace.record.tree import Bools, Doubles, Ints
from specscope.tree_shape import TreeShape

Path = tuple[int, ...]  # of child ranks from the root


@dataclass(frozen=True)
class TreeOutcome:
    """What a tree would have done in each of S steps."""

    accepted: Doubles  # [S] tokens, in expectation
    untold: Doubles  # [S] the part of them that rests on assumptions
    nodes: Doubles  # [S] that would have been verified
    complete: Bools  # [S] whether the record holds everything that the drafter would have considered

    @property
    def untold_share(self) -> float:
        """The share of accepted tokens that rests on assumptions."""
        total = float(self.accepted.sum())
        return float(self.untold.sum()) / total if total else 0.0


class Judge:
    """Judges trees by one run's evidence."""

    def __init__(self, evidence: RecordedCandidates) -> None:
        self.evidence = evidence
        self._reach, self._guessed = self._fill()
        self._rates = self._rates_by_rank()
        self._child = self._children()

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

    def plan(self, plan: TreePlan) -> TreeOutcome:
        """The outcome of a static or dynamic tree."""
        if isinstance(plan, DynamicPlan):
            return next(self.dynamic(plan.depth, plan.top, [plan.nodes]))
        return self.lookup(plan.shape) if self.evidence.lookup else self.static(plan.shape)

    # Static trees

    def static(self, shape: TreeShape) -> TreeOutcome:
        """A static tree of the likeliest tokens."""
        values = [self.position(path) for path in shape.paths]
        return TreeOutcome(
            accepted=np.sum([value for value, _ in values], axis=0),
            untold=np.sum([untold for _, untold in values], axis=0),
            nodes=np.full(len(self.evidence.request), float(len(shape))),
            complete=np.all([untold == 0 for _, untold in values], axis=0),
        )

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

    def lookup(self, shape: TreeShape) -> TreeOutcome:
        """WIDTHxDEPTH of prompt lookup: its most recent continuations, cut to the depth.

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
        zero = np.zeros(len(chosen))
        accepted = np.where(chosen, evidence.reach, 0).sum(1)
        return TreeOutcome(accepted, zero, chosen.sum(1).astype(float), zero == 0)

    # Dynamic trees

    def dynamic(self, depth: int, top: int, nodes: Sequence[int]) -> Iterator[TreeOutcome]:
        """Dynamic trees of one search, one for each number of nodes."""
        seen, lost, complete = self._search(depth, top)
        for count in nodes:
            chosen = _first(seen, count)
            yield TreeOutcome(
                accepted=np.where(chosen, self._reach, 0).sum(1),
                untold=np.where(chosen, self._guessed, 0).sum(1) + lost,
                nodes=chosen.sum(1).astype(float),
                complete=complete,
            )

    def kept(self, plan: DynamicPlan) -> Bools:
        """[S, C] the candidates that a dynamic tree would have held."""
        return _first(self._search(plan.depth, plan.top)[0], plan.nodes)

    def _search(self, depth: int, top: int) -> tuple[Bools, Doubles, Bools]:
        """(candidates that a search considers, reach of those whose children are not recorded, whether all are).

        Candidates are in the order of the drafter's scores: the best of a set are its first.
        """
        evidence = self.evidence
        rows, width = evidence.parent.shape
        seen, lost, complete = np.zeros((rows, width), np.bool_), np.zeros(rows), np.ones(rows, np.bool_)
        frontier = np.zeros((rows, width + 1), np.bool_)
        frontier[:, width] = True  # the root
        for level in range(1, depth + 1):
            unexpanded = frontier & (evidence.known < top)
            complete &= ~unexpanded.any(1)
            lost += np.where(unexpanded[:, :-1], self._reach, 0).sum(1)
            new = np.take_along_axis(frontier, evidence.parent, axis=1) & (evidence.depth == level)
            new &= evidence.rank < top
            seen |= new
            frontier = np.zeros((rows, width + 1), np.bool_)
            frontier[:, :-1] = _first(new, top)
        return seen, lost, complete


def _first(some: Bools, count: int) -> Bools:
    """The first `count` of some candidates in each row, which are the best."""
    first: Bools = some & (np.cumsum(some, axis=1) <= count)
    return first
