"""What a sampler was given and what it gave: is it possible, by which rule, and has it the target's distribution?

Outputs that a rule's law (laws.py) gives with probability 0 are impossible under it. Over many calls its decisions and
draws are tested as `verify` tests a run's (analyze/verify/sums.py). And they are held against the known mistakes: the
mean of their likelihoods over the rule's is 1 on average where the rule was at work, so that it is above 1 / x with a
probability of x at most (Markov's inequality).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from specscope.analyze.findings import CheckResult, Exit, Finding, Reference
from specscope.analyze.significance import holm
from specscope.analyze.verify.chance import FLAT, surprisal
from specscope.analyze.verify.sums import FEW, NATS, SHARE, Family, Sum
from specscope.errors import UserError
from specscope.testing.laws import GREEDY, LOSSLESS, MISTAKES, Law, VerifyCall
from specscope.trace.history.wording import plural
from specscope.trace.record.notes import spread
from specscope.trace.record.rules import BLOCK
from specscope.trace.record.tree import Doubles

ALPHA = 0.01  # how often a sampler without a mistake may be found guilty by chance
NOT_DRAWN = 1e-3  # p-value below which drafts are taken not to be drawn from q
NO_SUM = {GREEDY: "its tokens are not drawn", BLOCK: "the number of tokens depends on the tokens"}  # of the output
WORDS = {
    "recovered draws": "tokens after a rejection follow the residual",
    "bonus draws": "bonus tokens follow p",
    "emitted surprisal": "emitted tokens follow the target's p: lossless",
}
NOWHERE: Callable[[int], Reference] = lambda _: Reference("", 0, 0)  # noqa: E731
Drawn = list[tuple[float, float, float]]  # of tokens: p, and the entropy and varentropy of the row they were drawn from


@dataclass(frozen=True)
class CallsJudged:
    """What was found about the calls of a sampler."""

    calls: int
    drafts: int
    fits: tuple[str, ...]  # the rules that give these outputs
    refuted: Mapping[str, str]  # of the other rules that were asked for, what first shows that they do not
    mistake: str  # what gives them best, where none does; "" where no known mistake gives them all
    checks: tuple[Finding, ...]  # of the first of these rules, or else of the first that was asked for
    impossible: tuple[tuple[int, str], ...]  # (a call, what cannot be) under that rule

    @property
    def exit(self) -> Exit:
        """0: they are possible, and distributed as a rule gives them."""
        return Exit.of(wrong=not self.fits, unjudged=False)

    def __str__(self) -> str:
        counts = f"{plural(self.calls, 'call')}, {plural(self.drafts, 'drafted token')}"
        if self.fits:
            tested = any(check.statistic is not None for check in self.checks)
            more = "" if tested else "; too few to test how the output is distributed"
            return f"consistent with {' and with '.join(self.fits)}: {counts}{more}"
        failed = ", ".join(check.name for check in self.checks if check.result is CheckResult.FAILED)
        looks = f"as if {self.mistake}" if self.mistake else "no mistake that is known of chains gives these outputs"
        return f"NOT CONSISTENT ({failed}): {looks}; {counts}"

    def to_dict(self) -> dict[str, Any]:
        """As plain values, for --json."""
        told = {"checks": [check.to_dict() for check in self.checks]}
        return {"exit": int(self.exit), "verdict": str(self), **vars(self), **told}


def judge_calls(calls: Sequence[VerifyCall], rule: str | None = None, alpha: float = ALPHA) -> CallsJudged:
    """Judge calls whose coins are independent. `rule`: the one of LOSSLESS that is to hold; None: any of them.

    `alpha`: how often calls without a mistake may fail the tests of chance. Raises UserError.
    """
    trees, laws = any(call.parents is not None for call in calls), {**LOSSLESS, **MISTAKES}
    known = {name: law for name, law in laws.items() if law.trees or not trees}
    wanted = [name for name in ([rule] if rule is not None else LOSSLESS) if name in known and name in LOSSLESS]
    if not calls or not wanted:
        what = f"the rule {rule} takes chains" if rule in LOSSLESS else f"unknown rule {rule}"
        usable = f"{what}: use {', '.join(name for name in LOSSLESS if name in known)}"
        raise UserError(usable if calls else "there is no call to judge")
    logs = {name: np.array([law.log_likelihood(call) for call in calls]) for name, law in known.items()}
    found = {name: _checks(name, calls, logs, alpha) for name in wanted}
    failed = {name: [check for check in checks if check.result is CheckResult.FAILED] for name, checks in found.items()}
    refuted = {name: f"{checks[0].name}: {checks[0].detail}" for name, checks in failed.items() if checks}
    fits = tuple(name for name in found if name not in refuted)
    shown = next(iter([*fits, *found]))
    wrong = [(number, why_not(LOSSLESS[shown], calls[number])) for number in found[shown][0].wrong.tolist()]
    gives = {name: float(log.sum()) for name, log in logs.items() if name in MISTAKES and np.isfinite(log).all()}
    mistake = "" if fits else max(gives, key=gives.__getitem__, default="")
    return CallsJudged(
        len(calls), sum(len(call.drafted) for call in calls), fits, refuted, mistake, tuple(found[shown]), tuple(wrong)
    )


def _checks(rule: str, calls: Sequence[VerifyCall], logs: Mapping[str, Doubles], alpha: float) -> list[Finding]:
    """What holds where a rule was at work: first that its outputs are possible, last that no mistake is likelier."""
    possible = np.isfinite(logs[rule])
    first = Finding("possible outputs", CheckResult.PASSED, f"{rule} can give every output", len(calls), unit="call")
    if not possible.all():
        wrong = np.flatnonzero(~possible)
        detail = f"call {wrong[0]}: {why_not(LOSSLESS[rule], calls[wrong[0]])}"
        first = replace(first, result=CheckResult.FAILED, failed=len(wrong), wrong=wrong, detail=detail)
    families = _families(rule, [calls[number] for number in np.flatnonzero(possible).tolist()])
    over = {name: float(x[possible].sum() - logs[rule][possible].sum()) for name, x in logs.items() if name in MISTAKES}
    times = float(np.logaddexp.reduce([*over.values(), -math.inf])) - math.log(len(MISTAKES))  # log of the mean
    p_values = [*(family.p_value if family.judged else 1.0 for family in families), math.exp(-max(times, 0.0))]
    failed = holm(p_values, alpha)
    made = [family.finding(alpha / len(failed), failed=fails) for family, fails in zip(families, failed, strict=False)]
    about, count = "no known mistake makes the outputs far likelier", int(possible.sum())
    last = Finding("known mistakes", CheckResult.PASSED, about, count, unit="call", p_value=p_values[-1])
    if failed[-1]:
        best = f"10^{times / math.log(10):.0f} times as likely where {max(over, key=over.__getitem__)}"
        last = replace(last, result=CheckResult.FAILED, failed=count, detail=best)
    return [first, *made, last]


def _families(rule: str, calls: Sequence[VerifyCall]) -> list[Family]:
    """The decisions and the draws of calls that a rule can give."""
    law, a, accepted = LOSSLESS[rule], list[float](), list[bool]()
    drawn: dict[str, Drawn] = {name: [] for name in (*WORDS, "drafts")}
    for call in calls:
        decisions, row = law.walk(call)
        a += [chance for _, chance, _ in decisions]
        accepted += [was for *_, was in decisions]
        if row is not None and call.final_coin is None:
            name = "recovered draws" if call.below(call.path[-1]) else "bonus draws"
            drawn[name].append(_drawn(row, call.output[-1]))
        rows = [call.p[draft + 1] for draft in call.path if draft + 1 < len(call.p)]
        drawn["emitted surprisal"] += map(_drawn, rows, call.output)
        drawn["drafts"] += [] if call.q is None else map(_drawn, call.q, call.drafted)
    sums = {name: _surprisal(tokens) for name, tokens in drawn.items()}
    lacking = NO_SUM.get(rule, "")
    if sums["drafts"].judged and sums["drafts"].p_value < NOT_DRAWN:
        lacking = "the drafts do not follow q, so the output need not follow p"
    chance = np.array(a)
    free = np.flatnonzero((chance > 0) & (chance < 1))
    decided = Sum.of((np.array(accepted) - chance)[free], (chance * (1 - chance))[free], 1.0, np.full(len(free), -1))
    as_often = f"drafts are accepted as often as {rule} predicts"
    by_coins = "the coins decide each draft" if len(chance) and not len(free) else FEW
    made = [Family("acceptance", as_often, {"": decided}, SHARE, NOWHERE, by_coins)]
    for name, about in WORDS.items():
        skipped = lacking if name == "emitted surprisal" else ""
        made.append(Family(name, about, {} if skipped else {"": sums[name]}, NATS, NOWHERE, skipped or FEW))
    return made


def _drawn(row: Doubles, token: int) -> tuple[float, float, float]:
    return float(row[token]), *spread(row.astype(np.float64))


def _surprisal(tokens: Drawn) -> Sum:
    p, entropy, varentropy = np.array(tokens, np.float64).reshape(-1, 3).T
    some = np.flatnonzero(varentropy > FLAT)
    return surprisal(p[some], entropy[some], varentropy[some], np.full(len(some), -1))


def why_not(law: Law, call: VerifyCall) -> str:
    """Why a law cannot give an output."""
    if not call.path:
        return f"the output {call.output.tolist()} is not a prefix of the drafts {call.drafted.tolist()} plus one token"
    token, place, decisions = int(call.output[-1]), len(call.output) - 1, law.walk(call)[0]
    for draft, chance, accepted in decisions:
        if chance == float(not accepted):
            coin = "" if call.coin is None else f" and coin {call.coin[draft]:.6g}"
            (p, q, tried), word = call.row(draft), "accepted" if accepted else "rejected"
            return f"draft {tried} at place {draft} was {word} with p = {p[tried]:.6g}, q = {q[tried]:.6g}{coin}"
    if call.final_coin is not None:
        return f"the final coin {call.final_coin:.6g} does not draw token {token} at place {place}"
    for p, q, _ in map(call.row, call.below(call.path[-1])):
        return f"token {token} at place {place} came after a rejection with p = {p[token]:.6g}, q = {q[token]:.6g}"
    return f"the bonus token {token} cannot be drawn there"
