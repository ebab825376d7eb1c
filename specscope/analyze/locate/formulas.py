"""The verdict's arithmetic and the draws, by what is recorded: each figure beside its formula, and what gives it in
place of the right one. Where a figure is not what those before it make it, the operation between them is wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from operator import attrgetter

import numpy as np

from specscope.analyze.audit.audit import Audit
from specscope.analyze.evidence.arrays import Indices
from specscope.analyze.evidence.columns import Columns
from specscope.analyze.findings import CheckResult, Finding, Reference
from specscope.analyze.locate.decided import ACCEPTANCE, FINAL, RESIDUAL, Q
from specscope.analyze.locate.located import Located, Operation, Proof, Stage
from specscope.analyze.verify.exact import CoinsOf
from specscope.analyze.verify.trial import Case
from specscope.trace.history.wording import plural
from specscope.trace.record.coins import Stream, coins, draw_number
from specscope.trace.record.tree import Bools, Doubles
from specscope.tree_shape import MAX_NODES

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
    return np.asarray(np.abs(values - others) <= LEAST + NEAR * np.abs(others))


def _over(above: Made, below: Made, most: float = 1.0) -> Made:
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
Instead = Mapping[str, Made]
OF_A: Instead = {
    "the draft's own ratio, without its path's": _alone,
    "p / q not capped at 1": _over(P_TRIED, Q_TRIED, np.inf),
    "p before any sibling was rejected, over q": _over(P, Q_TRIED),
    "p over q as drawn, not over what is left of it": _over(P_TRIED, Q_DRAWN),
    "the raw p over q": _over(RAW_P, Q_TRIED),
    "p instead of p / q": P_TRIED,
    "q / p": _over(Q_TRIED, P_TRIED),
    "what was left of the path above it": attrgetter("parent_ratio"),
}
OF_P: Instead = {
    "p before any rejection": P,
    "p with nothing subtracted, over the remaining mass": _over(P, _mass_before, np.inf),
    "the raw p": RAW_P,
    "what is left of the raw p": _over(RAW_P, _mass_before, np.inf),
    "1": _one,
}
OF_Q: Instead = {
    "q as drawn, not over what earlier siblings left of it": Q_DRAWN,
    "1 instead": _one,
    "the drafter's own probability, before its sampling rules": attrgetter("draft_prob"),
}
OF_MASS: Instead = {
    "1 - raw p": lambda c: 1 - c.parents.raw_p,
    "1 - p, with p before any rejection": lambda c: 1 - c.p,
    "1 - p, as after a point mass and a whole path": lambda c: 1 - c.p_trial,
    "p, not what is left of it": P_TRIED,
    "1": _one,
}
OF_SHARE: Instead = {"its whole p, as if nothing had been rejected": attrgetter("parents.final_p"), "1": _one}
OF_ENTROPY: Instead = {"the drafter's entropy": attrgetter("parents.q_entropy")}
FORMULAS: Mapping[str, Formula] = {  # by the check of verify that fails where a figure is not its formula's
    "accept probability": Formula(ACCEPTANCE, "how likely a draft is accepted", attrgetter("accept_prob"), OF_A),
    "p at later trials": Formula(RESIDUAL, "p as a draft is tried", P_TRIED, OF_P),
    "q at trials": Formula(Q, "q as a draft is tried", Q_TRIED, OF_Q),
    "residual mass": Formula(RESIDUAL, "the mass of p that a rejection leaves", MASS, OF_MASS),
    "share of the final token": Formula(FINAL, "the probability that the final token is drawn with", FINAL_P, OF_SHARE),
    "entropy of the final draw": Formula(FINAL, "the entropy of the final token's distribution"),
    "entropies": Formula("entropy", "the entropy of p", attrgetter("parents.entropy"), OF_ENTROPY),
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
    failed = [case.checks[name] for name in FORMULAS if name in case.checks and case.checks[name].failed]
    made = (_located(case, check, FORMULAS[check.name]) for check in failed)
    for item in sorted(made, key=lambda item: (not item.looks, -item.explained)):
        clearest.setdefault(item.operation.name, item)
    if ORDER in clearest and not any(item.looks for item in clearest.values()):
        return [clearest[ORDER]]  # what is tried out of turn is tried by other figures than its own
    return list(clearest.values())


def _located(case: Case, check: Finding, formula: Formula) -> Located:
    operation = Operation(Stage.VERDICT, formula.operation, formula.words)
    unit, smallest = check.unit or "step", f"{check.example}: {check.detail}"
    best, of = formula.best(case.evidence, check.wrong), plural(check.tested, unit)
    text = f"{formula.words} differs from what the recorded figures give at {check.failed:,} of {of} ({check.about})"
    text += f"; with {best.name} it is as recorded at {best.explained:,} of these" if best else ""
    looks, explained = (best.name, best.explained) if best else ("", check.failed)
    return Located(operation, text, looks, smallest, check.example, explained, check.failed, unit, proof=Proof.ROWS)


CUTS = ("min-p", "top-k", "top-p")  # checks of what has a probability by recorded ranks, logits and sums


def located_cut(case: Case) -> Located | None:
    """The rule that left other tokens than its parameter says, by what is recorded; None where none did."""
    failed = (check for name in CUTS if (check := case.checks.get(name)) is not None and check.failed)
    check = max(failed, key=attrgetter("failed"), default=None)
    if check is None:
        return None
    operation = Operation(Stage.SAMPLING, check.name, f"the target: {check.name}")
    text = f"p has other tokens than {check.name} leaves at {check.failed:,} of {plural(check.tested, check.unit)}"
    smallest, explained = f"{check.example}: {check.detail}", (check.failed, check.failed, check.unit)
    looks = _other_k(case.evidence, check) if check.name == "top-k" else ""
    return Located(operation, text, looks, smallest, check.example, *explained, proof=Proof.ROWS)


def _other_k(c: Columns, check: Finding) -> str:
    """The k that leaves just the tokens that have a probability; "" where none does, or requests differ in theirs."""
    k, rank = c.parameter("top_k"), c.parents.rank
    most, asked = int(rank[check.wrong].max()), np.unique(k)
    is_whole = len(asked) == 1 and check.failed >= NEARLY * ((rank > k) & (rank <= most)).sum()
    return f"top-k with {most} tokens, not {asked[0]:g}" if is_whole else ""


REUSED = {  # by the check of verify that fails, whose coin it is
    "coins unequal": "the coin of another draw or trial of the same step",
    "coins over steps": "the coin of another position of the request",
    "coins of requests": "the coin of another request with another seed or position",
}
INTERVALS, DRAWS, OF_MODEL = "draft coins in their intervals", "draft draws", "draft p"
MOVED, COINS, DRAW = "draft order", "draft coins", "draft draw"
WORDS = {
    COINS: "the coins that draw drafts",
    MOVED: "which node of the tree a draw becomes",
    DRAW: "the token that a coin draws from q",
}
SIDES = {  # by the share of coins that lie above
    1.0: "the coin is above the interval: the token comes before the one that the coin draws, or q is too small",
    0.0: "the coin is below the interval: the token comes after the one that the coin draws",
}
MOST = draw_number(MAX_NODES, 0)  # draws of a tree
LOOKED_AT = 1000  # steps whose coins are computed again


def located_draws(case: Case, audit: Audit | None = None) -> list[Located]:
    """The operations of drawing that are wrong: coins of drafts, their order, draws. Empty where all is right."""
    coins = _coins(case)
    if coins is not None and coins.operation.name == MOVED:
        return [coins]  # moved coins do not give the draws either
    return [located for located in (coins, _draws(case, audit)) if located is not None]


def _coins(case: Case) -> Located | None:
    """Coins of drafts that are not those of their seed, position and draw; what they are instead."""
    c, check = case.evidence, case.checks.get(COINS)
    if check is None or check.result is not CheckResult.FAILED:
        return None
    wrong, count = check.wrong, f"{len(check.wrong):,} of {plural(check.tested, 'draw')}"
    reused = next((each for each in case.trial.failed if each.name in REUSED), None)
    smallest = f"coin {c.draft_coin[wrong[0]]:.6g} of {check.example}"
    if reused is None and _are_moved(c, wrong):
        sentence = f"{count} have the coin of another draw in their tree"
        looks = "draws moved to other places among their siblings, or dropped"
        return _of_draws(MOVED, sentence, looks, smallest, check.example, len(wrong))
    key = CoinsOf.drafts(c).key_of(np.unique(c.step[wrong])[:LOOKED_AT])[0]
    looks = f"the coins are {key}" if key else REUSED[reused.name] if reused else ""
    sentence = f"{count} do not have the coin of their seed, position and draw number"
    if reused:
        of_reused = f"{reused.failed:,} of {plural(reused.tested, reused.unit)}"
        sentence += f"; {REUSED[reused.name]} in {of_reused}: {reused.detail}"
    return _of_draws(COINS, sentence, looks, smallest, check.example, len(wrong))


def _are_moved(c: Columns, wrong: Indices) -> bool:
    """Whether wrong coins are those of another draw of the same tree: the key is right."""
    of_steps = ((node, c.step[node]) for node in wrong.tolist()[:LOOKED_AT])
    keys = ((node, c.params[step].seed, int(c.position[step])) for node, step in of_steps)
    return all(c.draft_coin[n] in coins(seed, Stream.DRAFT, position, MOST) for n, seed, position in keys)


def _draws(case: Case, audit: Audit | None) -> Located | None:
    """A draw that does not give what its coin draws, where the q that it was made from is not in question."""
    check, c = case.checks.get(INTERVALS), case.evidence
    redrawn, q = (None, None) if audit is None else (audit.finding(DRAWS), audit.finding(OF_MODEL))
    if redrawn is not None and q is not None and q.result is CheckResult.FAILED:
        return None  # q itself differs: what is wrong lies before the draw, or q is recorded otherwise
    looks, certain = "", True
    if check is not None and len(check.wrong):  # on which side of their intervals these coins lie
        count, above = len(check.wrong), int((c.draft_coin[check.wrong] >= c.draft_low[check.wrong]).sum())
        looks = f"the coin is above the interval at {above:,}, below it at {count - above:,}"
        looks = SIDES.get(above / count, looks)
    if redrawn is not None and redrawn.result is CheckResult.FAILED:
        failed, sentence = redrawn, "" if q is None else f"q is the model's at all {plural(q.tested, 'node')}, but "
        sentence += "the coin draws another token"
    elif check is not None and check.result is CheckResult.FAILED:
        failed, sentence = check, "the coin is outside its draft's interval"
        certain = redrawn is not None and redrawn.result is CheckResult.PASSED
    else:
        return None
    sentence += f" at {failed.failed:,} of {plural(failed.tested, 'draw')}"
    found = _of_draws(DRAW, sentence, looks, failed.detail, failed.example, failed.failed)
    return replace(found, certain=certain)


def _of_draws(name: str, sentence: str, looks: str, smallest: str, where: Reference | None, count: int) -> Located:
    operation = Operation(Stage.DRAWS, name, WORDS[name])
    return Located(operation, sentence, looks, smallest, where, count, count, "draw", proof=Proof.ROWS)
