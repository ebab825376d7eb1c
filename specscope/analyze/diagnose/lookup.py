"""Prompt lookup once more: the text alone tells what it drafts, so that each named mistake can be tried exactly."""

from __future__ import annotations

from collections.abc import Sequence

from specscope.analyze.audit.ngram import SIZES
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

    def fits(shift: int, sizes: tuple[int, int]) -> int:
        drafted = (lookup(step.text[: step.after], depth, width, sizes, shift) for step in steps)
        return sum(a == b for a, b in zip(drafted, recorded, strict=True))

    right = max(fits(0, sizes) for sizes in SIZES)
    if right > 0.5 * len(steps):
        return None
    count, shift = max((fits(shift, sizes), shift) for shift in SHIFTS for sizes in SIZES)
    if count < max(ENOUGH, 0.5 * len(steps)) or count < 2 * right:
        return None
    late = f"{plural(abs(shift), 'token')} too {'late' if shift > 0 else 'early'}"
    said = (
        f"prompt lookup that continues {late} drafts the recorded tree in {count:,} of {len(steps):,} steps; "
        f"without the shift, in {right:,}"
    )
    return Suspect(Cause.DRAFT_POSITION, CERTAIN, (said,), example=steps[0].reference())


def lookup(tokens: Sequence[int], depth: int, width: int, sizes: tuple[int, int], shift: int) -> Paths:
    """The paths of the tree of what follows the latest occurrences of the longest suffix, `shift` tokens on."""
    longest, shortest = sizes
    for size in range(min(longest, len(tokens) - 1), shortest - 1, -1):
        kept: list[tuple[int, ...]] = []
        suffix = list(tokens[-size:])
        for end in range(len(tokens) - 1, size - 1, -1):
            begin = end + shift
            if not 0 <= begin < len(tokens) or list(tokens[end - size : end]) != suffix:
                continue
            follows = tuple(tokens[begin : begin + depth])
            if not any(other[: len(follows)] == follows for other in kept):
                kept.append(follows)
                if len(kept) == width:
                    break
        if kept:
            return frozenset(one[: at + 1] for at in range(depth) for one in kept if len(one) > at)
    return frozenset()


def _paths(step: Step) -> Paths:
    tree = step.tree
    return frozenset(tuple(int(tree.token[i]) for i in tree.path_to(node)) for node in range(len(tree)))
