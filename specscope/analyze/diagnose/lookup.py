"""Prompt lookup once more: what it drafts follows from the text alone, so each named mistake can be tried exactly."""

from __future__ import annotations

from collections.abc import Sequence

from specscope.analyze.audit.ngram import SIZES, Rule, lookup, told_rules
from specscope.analyze.diagnose.case import Case, Step
from specscope.analyze.diagnose.causes import Cause
from specscope.analyze.diagnose.diagnosis import CERTAIN, Suspect
from specscope.plans.plan import StaticPlan
from specscope.trace.history.wording import plural
from specscope.trace.record.tree import ROOT

SHIFTS = (1, -1, 2, -2, 3)
MOST = 2000  # steps that are looked up again
FEW = 100  # of them, from which the rule is found
ENOUGH = 8  # drafted tokens that a mistake must explain

Paths = frozenset[tuple[int, ...]]


def shifted_lookup(case: Case) -> Suspect | None:
    """Trees that are what the text gives at another place: the continuation is taken too late or too early."""
    run, plan = case.history.run, case.plan
    if run is None or run.drafter != "ngram" or not isinstance(plan, StaticPlan):
        return None
    depth, width = plan.max_depth, len(plan.shape.children(ROOT))
    steps = [step for step in case.drafting if step.after > 0]
    steps = steps[:: max(1, len(steps) // MOST)]
    if not steps:
        return None
    recorded = {id(step): _paths(step) for step in steps}

    def fits(some: Sequence[Step], rule: Rule, shift: int) -> list[Step]:
        """Steps whose tree is what the text gives; with a shift, the end may be missing."""
        drafted = ((step, frozenset(lookup(step.text[: step.after], depth, width, rule, shift))) for step in some)
        pairs = ((step, recorded[id(step)], paths) for step, paths in drafted)
        return [
            step
            for step, there, paths in pairs
            if (bool(there) and there <= paths if shift else rule.agrees(there, paths))
        ]

    rules = told_rules(run.speculation) or tuple(Rule(*sizes) for sizes in SIZES)
    few = steps[:: max(1, len(steps) // FEW)]
    right = max(rules, key=lambda rule: len(fits(few, rule, 0)))
    alike = {id(step) for step in fits(steps, right, 0)}
    wrong = [step for step in steps if id(step) not in alike and recorded[id(step)]]
    if not wrong:
        return None
    explained, shift = max(((fits(wrong, rule, shift), shift) for shift in SHIFTS for rule in rules), key=_drafted)
    if len(explained) <= 0.8 * len(wrong) or sum(len(step.tree) for step in explained) < ENOUGH:
        return None
    late = f"{plural(abs(shift), 'token')} too {'late' if shift > 0 else 'early'}"
    line = (
        f"prompt lookup that continues {late} drafts the recorded tree in {len(explained):,} of the {len(wrong):,} "
        f"steps in which the right lookup does not; {len(steps):,} steps were looked at"
    )
    return Suspect(Cause.DRAFT_POSITION, CERTAIN, (line,), example=explained[0].reference(), rerun=True)


def _drafted(explained: tuple[list[Step], int]) -> int:
    """How many drafted tokens are explained."""
    return sum(len(step.tree) for step in explained[0])


def _paths(step: Step) -> Paths:
    tree = step.tree
    return frozenset(tuple(int(tree.token[i]) for i in tree.path_to(node)) for node in range(len(tree)))
