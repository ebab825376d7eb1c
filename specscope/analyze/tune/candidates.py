"""Which trees are considered: those that the user named, the best static tree and the best dynamic one of each size.

With costs, the best of a size is the fastest: a deeper tree accepts more and takes longer to draft. EAGLE-4's
cost-aware trees make this trade-off while drafting (Hong, Tan and Hu 2025, arXiv 2510.26577: acceptance against
looked-up costs by batch and rows); here it is made afterwards, over a whole run.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from specscope.analyze.tune.evidence import RecordedCandidates
from specscope.analyze.tune.judged import Judge, Path, TreeRow
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
    return [(_shape(best, n), float(whole[n])) for n in sorted(sizes) if n < len(whole)]


def _both(a: Doubles, b: Doubles, limit: int) -> Doubles:
    """[n] the largest a[i] + b[n - i], for n up to `limit`."""
    size = min(len(a) + len(b) - 1, limit + 1)
    sums = np.full(size, -np.inf)
    for i, value in enumerate(a[:size]):
        part = b[: size - i]
        sums[i : i + len(part)] = np.maximum(sums[i : i + len(part)], value + part)
    return sums


def _shape(best: Mapping[Path, Doubles], nodes: int) -> TreeShape:
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
class Space:
    """Which trees the run's rule, drafter and engine allow."""

    max_nodes: int
    top: bool  # whether static trees are written `top:`
    chains: bool = False  # whether only chains are allowed
    recorded: TreePlan | None = None  # the run's own

    @property
    def budgets(self) -> list[int]:
        """The sizes of which the best is sought."""
        return sorted({budget for budget in BUDGETS if budget < self.max_nodes} | {self.max_nodes})


def candidates(judge: Judge, space: Space, costs: Costs | None) -> list[TreeRow]:
    """The best trees of each size; of equal ones the first."""
    families: list[tuple[str, Iterator[TreePlan]]] = [("static", _statics(judge, space))]
    if judge.evidence.lookup:
        families = [("static", _lookups(judge.evidence, space))]
    elif judge.evidence.ranked and not space.chains:
        families.append(("dynamic", _dynamics(judge.evidence, space)))
    best: list[TreeRow] = []
    for family, plans in families:
        of_size: dict[int, tuple[float, TreeRow]] = {}
        for plan in plans:
            row = judge.row(plan, family)
            tokens = 1 + float(row.accepted.mean())
            rate = tokens if costs is None else tokens / costs.seconds(plan, row.nodes)
            if row.budget not in of_size or rate > of_size[row.budget][0] + 1e-12:
                of_size[row.budget] = (rate, row)
        best += [of_size[budget][1] for budget in sorted(of_size)]
    return best


def asked(judge: Judge, plan: TreePlan, space: Space) -> TreeRow:
    """A tree that the user named. Raises UserError where it cannot be judged from the capture."""
    evidence, again, why = judge.evidence, "dynamic:32", ""
    if isinstance(plan, DynamicPlan) and not evidence.ranked:
        why = "its drafter gave no scores"
    elif isinstance(plan, DynamicPlan) and plan.top > evidence.max_rank:
        why = f"it recorded {evidence.max_rank} children of a node"
    elif evidence.lookup and isinstance(plan, StaticPlan) and _looks_further(plan, space.recorded):
        why, again = "its drafter searched less", str(plan)
    elif plan.max_depth > evidence.max_depth and (isinstance(plan, DynamicPlan) or str(plan) != str(space.recorded)):
        why, again = f"its trees are {evidence.max_depth} deep", str(plan)
    if why:
        raise UserError(
            f"the capture cannot show what {plan} would accept: {why}; record with --tree {again} to judge it"
        )
    return judge.row(plan)


def _looks_further(plan: StaticPlan, other: TreePlan | None) -> bool:
    """Whether prompt lookup would look for more, or longer, continuations."""
    if not isinstance(other, StaticPlan):
        return False
    width, other_width = (sum(above < 0 for above in tree_plan.shape.parent) for tree_plan in (plan, other))
    return plan.max_depth > other.max_depth or width > other_width


def _statics(judge: Judge, space: Space) -> Iterator[TreePlan]:
    """For each depth the best shape of every budget."""
    deepest = judge.evidence.max_depth
    if space.chains:
        yield from (
            StaticPlan(TreeShape.fan(1, depth), space.top) for depth in range(1, min(deepest, space.max_nodes) + 1)
        )
        return
    rho = positions(judge, max(4 * space.max_nodes, 64), deepest, judge.evidence.max_rank)
    for depth in range(1, deepest + 1):
        for shape, _ in best_shapes(rho, space.budgets, depth):
            if shape.max_depth == depth:
                yield StaticPlan(shape, space.top)


def _lookups(evidence: RecordedCandidates, space: Space) -> Iterator[TreePlan]:
    for width in range(1, evidence.max_leaves + 1):
        for depth in range(1, evidence.max_depth + 1):
            if width * depth <= space.max_nodes:
                yield StaticPlan(TreeShape.fan(width, depth))


def _dynamics(evidence: RecordedCandidates, space: Space) -> Iterator[TreePlan]:
    """Every depth and width that was recorded, with every budget."""
    for depth in range(1, evidence.max_depth + 1):
        for top in (top for top in TOPS if top <= evidence.max_rank):
            plans = [DynamicPlan(nodes, depth, top) for nodes in space.budgets if nodes >= depth]
            yield from (plan for plan in plans if plan.nodes <= plan.candidates)
