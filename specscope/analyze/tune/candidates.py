"""Which trees are looked at: those that people asked for, the best static tree and the best dynamic one of each size.

With costs, the best of a size is the fastest: a deeper tree accepts more and drafts longer. This is what EAGLE-4's
cost-aware trees weigh while they draft (Hong, Tan and Hu 2025, arXiv 2510.26577: acceptance against looked-up costs by
batch and rows); here it is weighed afterwards, over all of a run.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from specscope.analyze.tune.judged import Judge, TreeOutcome
from specscope.analyze.tune.shapes import best_shapes, positions
from specscope.errors import UserError
from specscope.trace.costs import BatchCosts
from specscope.trace.plan import MAX_TOP, DynamicPlan, StaticPlan, TreePlan
from specscope.trace.record.tree import TreeShape

BUDGETS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 48, 64, 96, 128, 192, 256)
TOPS = (1, 2, 3, 4, 6, 8, 12, 16, 24, MAX_TOP)
BEYOND = 2  # levels below the record that positions are looked for


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
    """What the run's rule, drafter and engine let a tree be."""

    most: int  # nodes
    top: bool  # static trees are written top:
    chains: bool = False  # nothing else
    deepest: int | None = None  # levels, where no deeper tree could be run
    recorded: TreePlan | None = None  # the run's own

    def static(self, shape: TreeShape) -> StaticPlan:
        """A static tree as the run would have to be told."""
        return StaticPlan(shape, top=self.top)


def candidates(judge: Judge, space: Space, costs: BatchCosts | None) -> list[Candidate]:
    """The best of each size."""
    evidence = judge.evidence
    if evidence.whole:
        return []
    if evidence.lookup:
        return _best_of_sizes(_lookups(judge, space), costs)
    found = _best_of_sizes(_statics(judge, space), costs)
    if evidence.ranked and not space.chains:
        found += _best_of_sizes(_dynamics(judge, space), costs)
    return found


def asked(judge: Judge, plan: TreePlan, space: Space) -> Candidate:
    """One that somebody named. Raises UserError where the capture cannot tell of it."""
    evidence = judge.evidence
    if isinstance(plan, DynamicPlan):
        if not evidence.ranked:
            what = "its drafts were sampled" if evidence.sampled else "its drafter gave no scores"
            raise UserError(f"the capture cannot tell of {plan}: {what}; record with --tree dynamic:32 to judge it")
        if plan.top > evidence.max_looked:
            raise UserError(f"the capture cannot tell of {plan}: it looked at {evidence.max_looked} children of a node")
        if plan.depth > evidence.max_depth:
            raise UserError(f"the capture cannot tell of {plan}: its trees are {evidence.max_depth} deep")
    elif evidence.lookup and isinstance(space.recorded, StaticPlan) and _looks_further(plan, space.recorded):
        raise UserError(f"the capture cannot tell of {plan}: its drafter looked for less; record with --tree {plan}")
    return Candidate(plan, "asked", plan.max_nodes, judge.plan(plan))


def _looks_further(plan: StaticPlan, other: StaticPlan) -> bool:
    """Whether prompt lookup would look for more, or longer, continuations."""
    width, other_width = (sum(above < 0 for above in one.shape.parent) for one in (plan, other))
    return plan.max_depth > other.max_depth or width > other_width


def rate(candidate: Candidate, costs: BatchCosts | None) -> float:
    """Tokens by second, about, or by step: what sizes are compared by."""
    tokens = 1 + float(candidate.judged.accepted.mean())
    return tokens if costs is None else tokens / costs.seconds(candidate.plan, candidate.nodes)


def _best_of_sizes(all_of_them: Iterable[Candidate], costs: BatchCosts | None) -> list[Candidate]:
    """Of each budget the best; of equal ones the first."""
    best: dict[int, tuple[float, Candidate]] = {}
    for one in all_of_them:
        value = rate(one, costs)
        if one.budget not in best or value > best[one.budget][0] + 1e-12:
            best[one.budget] = (value, one)
    return [best[budget][1] for budget in sorted(best)]


def _budgets(space: Space) -> list[int]:
    return sorted({budget for budget in BUDGETS if budget < space.most} | {space.most})


def _statics(judge: Judge, space: Space) -> Iterable[Candidate]:
    """For each depth the best shape of every budget."""
    deepest = judge.evidence.max_depth + BEYOND if space.deepest is None else space.deepest
    width = 1 if space.chains else judge.evidence.max_rank
    if space.chains:
        for depth in range(1, min(deepest, space.most) + 1):
            yield _static(judge, space, TreeShape.chain(depth))
        return
    rho = positions(judge, max(4 * space.most, 64), deepest, width)
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
            if width * level <= space.most:
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
