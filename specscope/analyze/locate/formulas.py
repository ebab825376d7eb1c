"""The verdict's arithmetic: each figure beside its formula, and what gives it in place of the right one.

Both sides of these formulas are recorded. Where a figure is not what those before it make it, the operation between
them is wrong, whatever the models say.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from operator import attrgetter

import numpy as np

from specscope.analyze.evidence.arrays import Indices
from specscope.analyze.evidence.columns import Columns
from specscope.analyze.findings import CheckResult, Finding
from specscope.analyze.locate.decided import ACCEPTANCE, FINAL, RESIDUAL, Q
from specscope.analyze.locate.located import Located, Operation, Proof, Stage
from specscope.analyze.verify.case import Case
from specscope.trace.history.wording import plural
from specscope.trace.record.tree import Bools, Doubles

Made = Callable[[Columns], Doubles]  # a figure of every item, numbered as its check numbers them
NEARLY = 0.96  # of the figures that are wrong: rounding may hide one
NEAR, LEAST = 1e-4, 1e-6  # relative, and of any figure
P, RAW_P, P_TRIED, Q_DRAWN, Q_TRIED, MASS, FINAL_P = (
    attrgetter(name) for name in ("p", "parents.raw_p", "p_trial", "q", "q_trial", "residual_mass", "final_p")
)


@dataclass(frozen=True)
class Best:
    """What gives most of what was recorded, of several things that may stand in place of the right one."""

    name: str
    explained: int  # of the wrong ones
    wrong: int
    fits: int  # of all
    tried: int
    next_best: str = ""

    @staticmethod
    def of(instead: Mapping[str, Bools], wrong: Bools) -> Best | None:
        """`instead`: which items come out as recorded with each; None where nothing may stand there."""
        scores = {name: (int((fits & wrong).sum()), int(fits.sum())) for name, fits in instead.items()}
        names, total = sorted(scores, key=lambda name: -sum(scores[name])), int(wrong.sum())
        leaves = [f"{name} leaves {total - scores[name][0]:,} of {total:,}" for name in names[1:2]]
        explained, fits = scores[names[0]] if names else (0, 0)
        return Best(names[0], explained, total, fits, len(names), *leaves) if names else None


@dataclass(frozen=True)
class Formula:
    """A figure of the verdict."""

    operation: str
    words: str
    recorded: Made | None = None
    instead: Mapping[str, Made] = field(default_factory=dict)  # by what may stand in place of the right figure

    def best(self, c: Columns, wrong: Indices) -> Best | None:
        """What stands in place of the right figure at nearly all wrong items; None where nothing known does."""
        if self.recorded is None or not len(wrong):
            return None
        recorded = self.recorded(c)
        values = {name: np.broadcast_to(made(c), len(recorded))[wrong] for name, made in self.instead.items()}
        fits = {name: same(each, recorded[wrong]) for name, each in values.items()}
        best = Best.of(fits, np.ones(len(wrong), np.bool_))
        return best if best is not None and best.explained >= NEARLY * len(wrong) else None


def same(values: Doubles, others: Doubles) -> Bools:
    """Which of two sides' figures agree."""
    return np.asarray(np.abs(values - others) <= LEAST + NEAR * np.abs(others))


def _over(above: Made, below: Made, most: float = 1.0) -> Made:
    """A ratio of two figures, at most so large."""

    def ratio(c: Columns) -> Doubles:
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.asarray(np.minimum(above(c) / below(c), most))

    return ratio


def _alone(c: Columns) -> Doubles:
    """A draft's own ratio, without its path's; under rules that look ahead what rejections below leave of it."""
    left = _over(P_TRIED, Q_TRIED)(c)
    for node in np.flatnonzero(c.rejected & (c.above >= 0) & c.ahead[c.step]).tolist():
        above, mass = c.above[node], c.residual_mass[node]
        left[above] = mass / (mass + 1 - left[above]) if mass > 0 else float(left[above] == 1)
    return left


def _mass_before(c: Columns) -> Doubles:
    """What the elder sibling's rejection left."""
    return np.where(c.elder >= 0, c.residual_mass[c.elder], 1.0) if len(c.elder) else c.residual_mass


def _one(c: Columns) -> Doubles:
    return np.ones(1)


ORDER = "trial order"
FORMULAS: Mapping[str, Formula] = {  # by the check of verify that fails where a figure is not its formula's
    "accept probability": Formula(
        ACCEPTANCE,
        "how likely a draft is accepted",
        attrgetter("accept_prob"),
        {
            "the draft's own ratio, without its path's": _alone,
            "p / q not capped at 1": _over(P_TRIED, Q_TRIED, np.inf),
            "p before any sibling was rejected, over q": _over(P, Q_TRIED),
            "p over q as drawn, not over what is left of it": _over(P_TRIED, Q_DRAWN),
            "the raw p over q": _over(RAW_P, Q_TRIED),
            "p instead of p / q": P_TRIED,
            "q / p": _over(Q_TRIED, P_TRIED),
            "what was left of the path above it": attrgetter("parent_ratio"),
        },
    ),
    "p at later trials": Formula(
        RESIDUAL,
        "p as a draft is tried",
        P_TRIED,
        {
            "p before any rejection": P,
            "p with nothing subtracted, over the remaining mass": _over(P, _mass_before, np.inf),
            "the raw p": RAW_P,
            "what is left of the raw p": _over(RAW_P, _mass_before, np.inf),
            "1": _one,
        },
    ),
    "q at trials": Formula(
        Q,
        "q as a draft is tried",
        Q_TRIED,
        {
            "q as drawn, not over what earlier siblings left of it": Q_DRAWN,
            "1 instead": _one,
            "the drafter's own probability, before its sampling rules": attrgetter("draft_prob"),
        },
    ),
    "residual mass": Formula(
        RESIDUAL,
        "the mass of p that a rejection leaves",
        MASS,
        {
            "1 - raw p": lambda c: 1 - c.parents.raw_p,
            "1 - p, with p before any rejection": lambda c: 1 - c.p,
            "1 - p, as after a point mass and a whole path": lambda c: 1 - c.p_trial,
            "p, not what is left of it": P_TRIED,
            "1": _one,
        },
    ),
    "share of the final token": Formula(
        FINAL,
        "the probability that the final token is drawn with",
        FINAL_P,
        {"its whole p, as if nothing had been rejected": attrgetter("parents.final_p"), "1": _one},
    ),
    "entropy of the final draw": Formula(FINAL, "the entropy of the final token's distribution"),
    "entropies": Formula(
        "entropy",
        "the entropy of p",
        attrgetter("parents.entropy"),
        {"the drafter's entropy": attrgetter("parents.q_entropy")},
    ),
    "final tokens": Formula(FINAL, "the final token"),
    "outcomes": Formula(ACCEPTANCE, "whether a draft is accepted"),
    "greedy acceptance": Formula(ACCEPTANCE, "whether a draft is accepted at temperature 0"),
    "greedy tokens": Formula(FINAL, "what is emitted at temperature 0"),
    "trial order": Formula(ORDER, "the order in which siblings are tried"),
    "paths": Formula("path", "the path that is committed"),
    "kind of final token": Formula("path", "where the final token is"),
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
    operation = Operation(Stage.VERDICT, formula.operation, formula.words)
    unit, smallest = check.unit or "step", f"{check.example}: {check.detail}"
    best = formula.best(case.evidence, check.wrong)
    text = (
        f"{formula.words} differs from what the recorded figures give at {check.failed:,} of "
        f"{plural(check.tested, unit)}"
    )
    text += f" ({check.about})"
    text += f"; with {best.name} it is as recorded at {best.explained:,} of these" if best else ""
    looks, explained = (best.name, best.explained) if best else ("", check.failed)
    return Located(operation, text, looks, smallest, check.example, explained, check.failed, unit, proof=Proof.ROWS)
