"""What final tokens are drawn from: the residual of p after a rejection, else p, each by the coin that is recorded."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from specscope.analyze.audit.audit import Audit
from specscope.analyze.audit.model.rows import Asked, Models, rows_of
from specscope.analyze.findings import CheckResult
from specscope.analyze.locate.decided import FINAL
from specscope.analyze.locate.formulas import NEARLY, Best
from specscope.analyze.locate.located import Located, Operation, Proof, Stage
from specscope.analyze.locate.model.other_rows import Places, some
from specscope.analyze.locate.model.sampling import RIGHT, RuledRows
from specscope.analyze.verify.case import Case, Step
from specscope.analyze.verify.trial import OF_FINALS
from specscope.trace.history.wording import plural
from specscope.trace.record.records import FinalKind
from specscope.trace.record.rules import STANDARD
from specscope.trace.record.tree import ROOT, Drawn

ENOUGH, SOME = 4, 10  # draws that an explanation must explain; and of which it may leave one
MOST = 0.9  # of all draws
FINE = 0.01  # of log odds: what float32 may be off by
BORDER = 2e-3  # a coin so near to another token's part of the sum may have drawn that token
RESIDUAL, WHOLE = "the residual", "p"
Key = tuple[str, int]


@dataclass(frozen=True)
class DrawnFrom:
    """A final token, and what it may have been drawn from and by; the right ones first."""

    step: Step
    mass: float  # of the residual before it was divided
    drawn_from: dict[str, Tensor]  # [V] each
    coins: dict[str, float]

    def p(self, name: str) -> Tensor:
        """[V] what it is drawn from under a name; the right ones under that of a coin."""
        return self.drawn_from.get(name, next(iter(self.drawn_from.values())))

    def fits(self, name: str, slack: float, *, by_coin: bool) -> bool:
        """Whether the recorded p of the token, and its coin where that decides, fit a distribution, or another coin."""
        if name not in self.drawn_from and name not in self.coins:
            return False
        verdict, p = self.step.verdict, self.p(name)
        value, mass = float(p[verdict.token]), max(self.mass, 1e-3)
        if abs(value - verdict.final_p) > 4e-6 + (slack + 4e-5) / mass * max(value, verdict.final_p):
            return False
        above, coin = float(p[: verdict.token + 1].sum()), self.coins.get(name, verdict.final_coin)
        border = max(BORDER, slack / mass)
        return not by_coin or above - value - border <= coin <= above + border


def located_finals(case: Case, audit: Audit, models: Models) -> list[Located]:
    """What the final tokens were drawn from, or by, where it is not what is left of p and their own coin.

    Recovered tokens are looked at where verify finds something wrong with them; in our own runs, whose draws can be
    made again, all are, where rounding is too small to move what top-k and others leave.
    """
    steps, clear, c = list[Step](), list[Step](), case.evidence
    ours = case.history.run is not None and case.history.run.is_ours
    for step in case.drafting:
        params = step.params
        if step.part.rule == STANDARD and params is not None and not params.greedy and step.verdict.tells_p:
            steps.append(step)
            truncates = params.top_k > 0 or params.top_p < 1 or params.min_p > 0
            clear += [step] if ours and (audit.slack <= FINE or not truncates) else []
    failed = [check for name in OF_FINALS if (check := case.checks.get(name)) and check.result is CheckResult.FAILED]
    wheres = [c.at_step(step) for check in failed if check.unit == "step" for step in check.wrong.tolist()]
    wrong = {(where.request, where.index) for where in wheres}
    every = [step for step in (steps if failed else clear) if step.rejected_last]
    recovered = [*some([s for s in every if s.key in wrong]), *some([s for s in every if s.key not in wrong])]
    others = some([step for step in clear if step.verdict.kind is not FinalKind.RECOVERED])
    located = [_located(case, audit, models, each, by_coin=ours) for each in (recovered, others)]
    return [one for one in located if one is not None]


def _located(case: Case, audit: Audit, models: Models, steps: Sequence[Step], *, by_coin: bool) -> Located | None:
    """The same of some steps of one kind."""
    left = [*drawn_from(case, models, steps)]
    names = list(dict.fromkeys(name for one in left for name in (*one.drawn_from, *one.coins)))
    fits = {name: np.array([one.fits(name, audit.slack, by_coin=by_coin) for one in left]) for name in names}
    if len(names) < 2:
        return None
    right = names[0]
    wrong = ~fits[right]
    best = Best.of({name: fits[name] for name in names[1:]}, wrong)
    everywhere = best is not None and (best.fits >= MOST * len(left) or audit.slack <= FINE)
    if best is None or not everywhere or best.wrong < ENOUGH:
        return None
    if best.wrong - best.explained > max((1 - NEARLY) * best.wrong, best.wrong >= SOME):
        return None
    example = left[int(np.flatnonzero(wrong)[0])]
    verdict, where = example.step.verdict, example.step.reference()
    of_right, of_best = (float(example.p(name)[verdict.token]) for name in (right, best.name))
    kind = "recovered tokens" if right == RESIDUAL else "bonus tokens"
    how, own = ("by", "their own coin") if best.name in example.coins else ("from", right)
    sentence = (
        f"{kind} are drawn {how} {best.name}, not {how} {own}: {best.explained:,} of {plural(best.wrong, 'token')} "
        f"whose p or coin does not fit {right} fit it, and {int(fits[right].sum()):,} of all {len(left):,} fit {right} "
        f"({plural(len(fits), 'way')} tried)"
    )
    smallest = (
        f"token {verdict.token} at {where}: p {verdict.final_p:.6g} recorded, {of_right:.6g} in {right}, {of_best:.6g} "
        f"in this; coin {verdict.final_coin:.6g}"
    )
    operation = Operation(Stage.VERDICT, FINAL, f"what {kind} are drawn from")
    counts = best.explained, best.wrong, "token", True, best.next_best
    return Located(operation, sentence, best.name, smallest, where, *counts, proof=Proof.ROWS)


def drawn_from(case: Case, models: Models, steps: Sequence[Step]) -> Iterator[DrawnFrom]:
    """What the final tokens of steps may have been drawn from."""
    asked = rows_of(case, models, "p", steps)
    of_p, of_raw = _made(asked, "p"), _made(asked, "raw p")
    sampled = any(step.is_sampled and step.rejected_last for step in steps)
    of_q = _made(rows_of(case, models, "q", steps), "q") if sampled else {}
    for step in steps:
        leaf = int(step.verdict.path[-1]) if len(step.verdict.path) else ROOT
        p, q = of_p.get((step.key, leaf)), of_q.get((step.key, leaf))
        drawn = step.rejected_last and step.tree.drawn[step.rejected_last[0]] != Drawn.DETERMINISTIC
        if p is None or (drawn and q is None):
            continue
        mass, names = _instead(step, p, q, of_raw[step.key, leaf])
        above = ROOT if leaf == ROOT else int(step.tree.parent[leaf])
        for name, node in (("p of the root", ROOT), ("p of the row above", above)):
            if node != leaf and (step.key, node) in of_p:
                names[name] = of_p[step.key, node]
        coins = {"1 minus their coin": 1 - step.verdict.final_coin}  # that may have drawn it
        if step.tried_last:
            coins["the coin of the last trial"] = float(step.verdict.coin[step.tried_last[-1]])
        if step.last is not None:
            coins["the coin of the previous step"] = float(step.last.verdict.final_coin)
        yield DrawnFrom(step, mass, names, coins)


def _instead(step: Step, p: Tensor, q: Tensor | None, raw: Tensor) -> tuple[float, dict[str, Tensor]]:
    """The mass of what is left of p once the last siblings are rejected; and that, with what may stand in its place."""
    if not step.rejected_last:
        return 1.0, {WHOLE: p, "the raw p": raw}
    left, of_raw, left_q, masses, without = [p], raw, q, [1.0], p.clone()
    for child in step.rejected_last:
        token, tried_q = int(step.tree.token[child]), left_q
        without[token] = 0
        rest, mass = _rejected(left[-1], tried_q, token)
        left.append(rest)
        masses.append(mass)
        of_raw, _ = _rejected(of_raw, tried_q, token)
        if tried_q is not None and step.tree.drawn[child] == Drawn.WITHOUT_REPLACEMENT:
            left_q = tried_q.clone()
            left_q[token] = 0
            left_q /= left_q.sum().clamp(min=1e-30)
    names = {RESIDUAL: left[-1], "p before any rejection": p, "p without the rejected tokens": without / without.sum()}
    names["the residual of the raw p"] = of_raw
    if q is not None:
        names["q"] = q
    if len(step.rejected_last) > 1:
        names["the residual after the first trial only"] = left[1]
        if tried_q is not None:
            names["what is left of q"] = tried_q
    return min(masses), names


def _rejected(p: Tensor, q: Tensor | None, token: int) -> tuple[Tensor, float]:
    """What is left of p after a rejection, and its mass before it was divided."""
    if q is None:
        left = p.clone()
        left[token] = 0
    else:
        left = (p - q).clamp(min=0)
    mass = float(left.sum())
    return (left / mass, mass) if mass > 0 else (p, 1.0)


def _made(asked: Sequence[Asked], what: str) -> dict[tuple[Key, int], Tensor]:
    """The distribution at every row that was asked for, by step and node."""
    usable = [one for one in asked if one.logits and not one.contexts.limits and not one.contexts.params.limited]
    if not usable:
        return {}
    rows = RuledRows(Places(usable), what, None)
    made = rows.distributions(RIGHT, range(len(rows.places.every))).double()
    return {(place.asked.step.key, place.node): row for place, row in zip(rows.places.every, made, strict=True)}
