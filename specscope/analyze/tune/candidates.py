"""Which trees are considered: those that the user named, the best static tree and the best dynamic one of each size.

With costs, the best of a size is the fastest: a deeper tree accepts more and takes longer to draft. EAGLE-4's
cost-aware trees make this trade-off while drafting (Hong, Tan and Hu 2025, arXiv 2510.26577: acceptance against
looked-up costs by batch and rows); here it is made afterwards, over a whole run.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from specscope.analyze.tune.judged import Judge, Path, TreeOutcome
from specscope.errors import UserError
from specscope.plans.costs import Costs
from specscope.plans.plan import MAX_TOP, DynamicPlan, StaticPlan, TreePlan
from specscope.trace.record.tree import Doubles
from specscope.tree_shape import TreeShape, parse_tree

# The best static tree of every size, by dynamic programming over positions (Sequoia, Chen et al. 2024, section 3.1).
#
# A position is a path of child ranks. The accepted tokens of a tree are the sum of rho over its positions, rho being
# the mean reach. Of all trees with n nodes, closed under parents and elder siblings, the one with the largest sum is
# wanted. With "first child" and "next sibling" as the two children of each position in a binary tree, these are the
# binary trees closed under parents, and
#
# best(v, n) = rho(v) + max over a + b = n - 1 of best(first child of v, a) + best(next sibling of v, b).
#
# Sequoia's rho is a product of one rate per rank. Here it is measured at each position; where a step does not hold the
# position, a rate takes its place (Judge).

LEAST = 1e-4  # rho: a position below it is not extended


def positions(judge: Judge, count: int, max_depth: int, max_rank: int) -> dict[Path, float]:
    """rho of about the best `count` positions: after each that is taken, its first child and next sibling are tried."""
    taken: dict[Path, float] = {}
    waiting: list[tuple[float, Path]] = []

    def look(path: Path) -> None:
        if len(path) <= max_depth and path[-1] < max_rank:
            rho = float(judge.position(path)[0].mean())
            if rho >= LEAST:
                heapq.heappush(waiting, (-rho, path))

    look((0,))
    while waiting and len(taken) < count:
        rho, path = heapq.heappop(waiting)
        taken[path] = -rho
        look((*path, 0))
        look((*path[:-1], path[-1] + 1))
    return taken


def best_shapes(rho: Mapping[Path, float], sizes: Collection[int], max_depth: int) -> list[tuple[TreeShape, float]]:
    """The best tree of each size, at most `max_depth` deep, with its sum; none where there are too few positions."""
    known = {path: value for path, value in rho.items() if len(path) <= max_depth}
    best: dict[Path, Doubles] = {}
    nothing = np.array([0.0])
    for path in sorted(known, key=lambda path: (len(path), path), reverse=True):
        child, sibling = best.get((*path, 0), nothing), best.get((*path[:-1], path[-1] + 1), nothing)
        below = _both(child, sibling, max(sizes) - 1)
        best[path] = np.concatenate([nothing, known[path] + below])
    whole = best.get((0,), nothing)
    return [(_shape(best, known, n), float(whole[n])) for n in sorted(sizes) if n < len(whole)]


def _both(a: Doubles, b: Doubles, limit: int) -> Doubles:
    """[n] the largest a[i] + b[n - i], for n up to `limit`."""
    size = min(len(a) + len(b) - 1, limit + 1)
    sums = np.full(size, -np.inf)
    for i, value in enumerate(a[:size]):
        part = b[: size - i]
        sums[i : i + len(part)] = np.maximum(sums[i : i + len(part)], value + part)
    return sums


def _shape(best: Mapping[Path, Doubles], rho: Mapping[Path, float], nodes: int) -> TreeShape:
    """The tree behind best[(0,)][nodes]."""
    taken: list[Path] = []
    left: list[tuple[Path, int]] = [((0,), nodes)]
    nothing = np.array([0.0])
    while left:
        path, n = left.pop()
        if n == 0:
            continue
        taken.append(path)
        below, beside = (*path, 0), (*path[:-1], path[-1] + 1)
        child, sibling = best.get(below, nothing), best.get(beside, nothing)
        sums = [child[a] + sibling[n - 1 - a] for a in range(max(0, n - len(sibling)), min(n, len(child)))]
        a = max(0, n - len(sibling)) + int(np.argmax(sums))
        left += [(below, a), (beside, n - 1 - a)]
    return parse_tree(str(taken))


BUDGETS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 48, 64, 96, 128, 192, 256)
TOPS = (1, 2, 3, 4, 6, 8, 12, 16, 24, MAX_TOP)


@dataclass(frozen=True)
class Candidate:
    """A tree and what it would have done."""

    plan: TreePlan
    family: str  # static, dynamic, or asked
    budget: int  # nodes that it may have
    judged: TreeOutcome

    @property
    def nodes(self) -> float:
        """Verified in a step, in the mean."""
        return float(self.judged.nodes.mean())


@dataclass(frozen=True)
class Space:
    """Which trees the run's rule, drafter and engine allow."""

    max_nodes: int
    top: bool  # whether static trees are written `top:`
    chains: bool = False  # whether only chains are allowed
    recorded: TreePlan | None = None  # the run's own

    def static(self, shape: TreeShape) -> StaticPlan:
        """A static tree as it would be given to the run."""
        return StaticPlan(shape, top=self.top)


def candidates(judge: Judge, space: Space, costs: Costs | None) -> list[Candidate]:
    """The best trees of each size."""
    evidence = judge.evidence
    if evidence.lookup:
        return _best_of_sizes(_lookups(judge, space), costs)
    best = _best_of_sizes(_statics(judge, space), costs)
    if evidence.ranked and not space.chains:
        best += _best_of_sizes(_dynamics(judge, space), costs)
    return best


def asked(judge: Judge, plan: TreePlan, space: Space) -> Candidate:
    """A tree that the user named. Raises UserError where it cannot be judged from the capture."""
    evidence, again, why = judge.evidence, "dynamic:32", ""
    if isinstance(plan, DynamicPlan) and not evidence.ranked:
        why = "its drafter gave no scores"
    elif isinstance(plan, DynamicPlan) and plan.top > evidence.max_looked:
        why = f"it looked at {evidence.max_looked} children of a node"
    elif evidence.lookup and isinstance(plan, StaticPlan) and _looks_further(plan, space.recorded):
        why, again = "its drafter looked for less", str(plan)
    elif plan.max_depth > evidence.max_depth and (isinstance(plan, DynamicPlan) or str(plan) != str(space.recorded)):
        why, again = f"its trees are {evidence.max_depth} deep", str(plan)
    if why:
        raise UserError(f"the capture cannot tell of {plan}: {why}; record with --tree {again} to judge it")
    return Candidate(plan, "asked", plan.max_nodes, judge.plan(plan))


def _looks_further(plan: StaticPlan, other: TreePlan | None) -> bool:
    """Whether prompt lookup would look for more, or longer, continuations."""
    if not isinstance(other, StaticPlan):
        return False
    width, other_width = (sum(above < 0 for above in tree_plan.shape.parent) for tree_plan in (plan, other))
    return plan.max_depth > other.max_depth or width > other_width


def rate(candidate: Candidate, costs: Costs | None) -> float:
    """Approximate tokens per second, or per step without costs, to compare trees by."""
    tokens = 1 + float(candidate.judged.accepted.mean())
    return tokens if costs is None else tokens / costs.seconds(candidate.plan, candidate.nodes)


def _best_of_sizes(all_of_them: Iterable[Candidate], costs: Costs | None) -> list[Candidate]:
    """The best candidate of each budget; of equal ones the first."""
    best: dict[int, tuple[float, Candidate]] = {}
    for candidate in all_of_them:
        value = rate(candidate, costs)
        if candidate.budget not in best or value > best[candidate.budget][0] + 1e-12:
            best[candidate.budget] = (value, candidate)
    return [best[budget][1] for budget in sorted(best)]


def _budgets(space: Space) -> list[int]:
    return sorted({budget for budget in BUDGETS if budget < space.max_nodes} | {space.max_nodes})


def _statics(judge: Judge, space: Space) -> Iterable[Candidate]:
    """For each depth the best shape of every budget."""
    deepest = judge.evidence.max_depth
    width = 1 if space.chains else judge.evidence.max_rank
    if space.chains:
        for depth in range(1, min(deepest, space.max_nodes) + 1):
            yield _static(judge, space, TreeShape.fan(1, depth))
        return
    rho = positions(judge, max(4 * space.max_nodes, 64), deepest, width)
    budgets = _budgets(space)
    for depth in range(1, deepest + 1):
        for shape, _ in best_shapes(rho, budgets, depth):
            if shape.max_depth == depth:
                yield _static(judge, space, shape)


def _static(judge: Judge, space: Space, shape: TreeShape) -> Candidate:
    return Candidate(space.static(shape), "static", len(shape), judge.static(shape))


def _lookups(judge: Judge, space: Space) -> Iterable[Candidate]:
    depth = judge.evidence.max_depth
    for width in range(1, judge.evidence.max_leaves + 1):
        for level in range(1, depth + 1):
            if width * level <= space.max_nodes:
                shape = TreeShape.fan(width, level)
                yield Candidate(StaticPlan(shape), "static", len(shape), judge.lookup(shape))


def _dynamics(judge: Judge, space: Space) -> Iterable[Candidate]:
    """Every depth and width that was recorded, with every budget."""
    for depth in range(1, judge.evidence.max_depth + 1):
        for top in (top for top in TOPS if top <= judge.evidence.max_looked):
            plans = [DynamicPlan(nodes, depth, top) for nodes in _budgets(space) if nodes >= depth]
            plans = [plan for plan in plans if plan.nodes <= plan.candidates]
            each = judge.dynamic(depth, top, [plan.nodes for plan in plans])
            for plan, judged in zip(plans, each, strict=True):
                yield Candidate(plan, "dynamic", plan.nodes, judged)
