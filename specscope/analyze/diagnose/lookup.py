"""Prompt lookup once more: the text alone tells what it drafts, so that each named mistake can be tried exactly."""

from __future__ import annotations

from specscope.analyze.audit.ngram import SIZES, Rule, lookup, told_rule
from specscope.analyze.diagnose.case import Case, Step
from specscope.analyze.diagnose.causes import Cause
from specscope.analyze.diagnose.diagnosis import CERTAIN, Suspect
from specscope.trace.plan import StaticPlan
from specscope.trace.tree import ROOT
from specscope.trace.wording import plural

SHIFTS = (1, -1, 2, -2, 3)
MOST = 400  # steps that are looked up again
ENOUGH = 4  # drafts that a mistake must explain

Paths = frozenset[tuple[int, ...]]


def shifted_lookup(case: Case) -> Suspect | None:
    """Trees that are what the text gives at another place: what follows is taken too late or too early."""
    run, plan = case.history.run, case.plan
    if run is None or run.drafter != "ngram" or not isinstance(plan, StaticPlan):
        return None
    depth, width = plan.max_depth, len(plan.shape.children(ROOT))
    every = [step for step in case.drafting if step.after > 0]
    steps = every[:: max(1, len(every) // MOST)]
    recorded = [_paths(step) for step in steps]
    if len(steps) < ENOUGH:
        return None

    told = told_rule(run.speculation)
    rules = [Rule(*sizes) for sizes in SIZES] if told is None else [told]

    def fits(shift: int, rule: Rule) -> int:
        """Steps whose tree is what the text gives; with a shift, the end may be missing."""
        drafted = (frozenset(lookup(step.text[: step.after], depth, width, rule, shift)) for step in steps)
        pairs = zip(drafted, recorded, strict=True)
        return sum(bool(b) and b <= a if shift else a == b for a, b in pairs)

    right = max(fits(0, rule) for rule in rules)
    if right > 0.5 * len(steps):
        return None
    count, shift = max((fits(shift, rule), shift) for shift in SHIFTS for rule in rules)
    if count < max(ENOUGH, 0.5 * len(steps)) or count < 2 * right:
        return None
    late = f"{plural(abs(shift), 'token')} too {'late' if shift > 0 else 'early'}"
    said = (
        f"prompt lookup that continues {late} drafts the recorded tree in {count:,} of {len(steps):,} steps; "
        f"without the shift, in {right:,}"
    )
    return Suspect(Cause.DRAFT_POSITION, CERTAIN, (said,), example=steps[0].reference())


def _paths(step: Step) -> Paths:
    tree = step.tree
    return frozenset(tuple(int(tree.token[i]) for i in tree.path_to(node)) for node in range(len(tree)))
