"""The verdict's arithmetic: each figure beside its formula, and what gives it in place of the right one.

Both sides of these formulas are recorded. Where a figure is not what those before it make it, the operation between
them is wrong, whatever the models say.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from specscope.analyze.diagnose.case import Case
from specscope.analyze.evidence.columns import Columns
from specscope.analyze.findings import CheckResult, Finding
from specscope.analyze.locate.code import code_of
from specscope.analyze.locate.decided import ACCEPTANCE, FINAL, RESIDUAL, Q
from specscope.analyze.locate.located import Located, Operation, Proof, Stage
from specscope.trace.history.wording import plural
from specscope.trace.record.tree import Doubles

Made = Callable[[Columns], Doubles]  # a figure of every item, numbered as its check numbers them
NEARLY = 0.96  # of the figures that are wrong: rounding may hide one
NEAR, LEAST = 1e-4, 1e-6  # relative, and of any figure


@dataclass(frozen=True)
class Formula:
    """A figure of the verdict."""

    operation: str
    words: str
    recorded: Made | None = None
    instead: Mapping[str, Made] = field(default_factory=dict)  # by what may stand in place of the right figure


def _over(above: Made, below: Made, most: float = 1.0) -> Made:
    """A ratio of two figures, at most so large."""

    def ratio(c: Columns) -> Doubles:
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.asarray(np.minimum(above(c) / below(c), most))

    return ratio


def _p(c: Columns) -> Doubles:
    return c.p


def _raw(c: Columns) -> Doubles:
    return c.parents.raw_p


def _tried(c: Columns) -> Doubles:
    return c.p_trial


def _q(c: Columns) -> Doubles:
    return c.q


def _q_tried(c: Columns) -> Doubles:
    return c.q_trial


def _alone(c: Columns) -> Doubles:
    """A draft's own ratio, without its path's; under rules that look ahead what rejections below leave of it."""
    left = _over(_tried, _q_tried)(c)
    for node in np.flatnonzero(c.rejected & (c.above >= 0) & c.by_rule.ahead[c.step]).tolist():
        above, mass = c.above[node], c.residual_mass[node]
        left[above] = mass / (mass + 1 - left[above]) if mass > 0 else float(left[above] == 1)
    return left


def _mass_before(c: Columns) -> Doubles:
    """What the elder sibling's rejection left."""
    return np.where(c.elder >= 0, c.residual_mass[c.elder], 1.0) if len(c.elder) else c.residual_mass


def _whole_p(c: Columns) -> Doubles:
    return c.parents.final_p


def _path_before(c: Columns) -> Doubles:
    return c.by_rule.parent


ORDER = "trial order"
FORMULAS: Mapping[str, Formula] = {  # by the check of verify that fails where a figure is not its formula's
    "accept probability": Formula(
        ACCEPTANCE,
        "how likely a draft is accepted",
        lambda c: c.accept_prob,
        {
            "the ratio of the draft alone, without its path's": _alone,
            "p / q that is not capped at 1": _over(_tried, _q_tried, np.inf),
            "p before any sibling was rejected, over q": _over(_p, _q_tried),
            "p over q as drawn, not over what is left of it": _over(_tried, _q),
            "the raw p over q": _over(_raw, _q_tried),
            "p in place of p / q": _tried,
            "q / p": _over(_q_tried, _tried),
            "what was left of the path above it": _path_before,
        },
    ),
    "p at later trials": Formula(
        RESIDUAL,
        "p as a draft is tried",
        _tried,
        {
            "p as it was before any rejection": _p,
            "p, nothing subtracted, over the mass that is left": _over(_p, _mass_before, np.inf),
            "the raw p": _raw,
            "what is left of the raw p": _over(_raw, _mass_before, np.inf),
            "1": lambda c: np.ones(len(c.p)),
        },
    ),
    "q at trials": Formula(
        Q,
        "q as a draft is tried",
        _q_tried,
        {
            "q as drawn, not over what earlier siblings left of it": _q,
            "1 in place of it": lambda c: np.ones(len(c.q)),
            "the drafter's own probability, before its sampling rules": lambda c: c.draft_prob,
        },
    ),
    "residual mass": Formula(
        RESIDUAL,
        "the mass of p that a rejection leaves",
        lambda c: c.residual_mass,
        {
            "1 - raw p": lambda c: 1 - c.parents.raw_p,
            "1 - p, p as before any rejection": lambda c: 1 - c.p,
            "1 - p, as after a point mass and a whole path": lambda c: 1 - c.p_trial,
            "p, not what is left of it": _tried,
            "1": lambda c: np.ones(len(c.p)),
        },
    ),
    "share of the final token": Formula(
        FINAL,
        "what the final token is drawn with",
        lambda c: c.final_p,
        {
            "its whole p, as if nothing had been rejected": _whole_p,
            "1": lambda c: np.ones(len(c.final_p)),
        },
    ),
    "entropy of the final draw": Formula(
        FINAL, "the entropy of what the final token is drawn from", lambda c: c.parents.final_entropy
    ),
    "entropies": Formula(
        "entropy",
        "the entropy of p",
        lambda c: c.parents.entropy,
        {"the drafter's entropy": lambda c: c.parents.q_entropy},
    ),
    "final tokens": Formula(FINAL, "the final token"),
    "outcomes": Formula(ACCEPTANCE, "whether a draft is accepted"),
    "greedy acceptance": Formula(ACCEPTANCE, "whether a draft is accepted at temperature 0"),
    "greedy tokens": Formula(FINAL, "what comes out at temperature 0"),
    "trial order": Formula(ORDER, "the order in which siblings are tried"),
    "paths": Formula("path", "the path that is committed"),
    "kind of final token": Formula("path", "where the final token stands"),
    "coins": Formula("coin", "the coins of the verdict"),
}


def located_formulas(case: Case) -> list[Located]:
    """The figures of verdicts that are not what the recorded ones before them give: of each operation the clearest."""
    clearest: dict[str, Located] = {}
    for name, formula in FORMULAS.items():
        check = case.checks.get(name)
        if check is not None and check.result is CheckResult.FAILED and check.failed:
            made, best = _located(case, check, formula), clearest.get(formula.operation)
            if best is None or (bool(made.looks), made.explained) > (bool(best.looks), best.explained):
                clearest[formula.operation] = made
    order = clearest.get(ORDER)
    if order is not None and not any(item.looks for item in clearest.values()):
        return [order]  # what is tried out of turn is tried by other figures than its own
    return list(clearest.values())


def _located(case: Case, check: Finding, formula: Formula) -> Located:
    looks, count = _instead(case.evidence, check, formula)
    figures = f"{check.failed:,} of {plural(check.tested, check.unit or 'step')}"
    explained = f"; with {looks} it comes out as recorded at {count:,} of these" if looks else ""
    return Located(
        Operation(Stage.VERDICT, formula.operation, formula.words, code_of(case.history.run, formula.operation)),
        f"{formula.words} is not what the recorded figures give at {figures} ({check.about}){explained}",
        looks=looks,
        smallest=f"{check.example}: {check.detail}",
        where=check.example,
        explained=count if looks else check.failed,
        differing=check.failed,
        unit=check.unit or "step",
        proof=Proof.ROWS,
    )


def _instead(c: Columns, check: Finding, formula: Formula) -> tuple[str, int]:
    """What stands in place of the right figure, and at how many wrong items; "" where nothing known does."""
    if formula.recorded is None or not len(check.wrong):
        return "", 0
    recorded, counts = formula.recorded(c)[check.wrong], dict[str, int]()
    for name, made in formula.instead.items():
        values = made(c)[check.wrong]
        counts[name] = int((np.abs(values - recorded) <= LEAST + NEAR * np.abs(recorded)).sum())
    name = max(counts, key=lambda name: counts[name], default="")
    return (name, counts[name]) if name and counts[name] >= NEARLY * len(check.wrong) else ("", 0)
