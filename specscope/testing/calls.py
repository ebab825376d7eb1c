"""What a sampler was given and what it gave: is it possible, by which rule, and has it the target's distribution?

A law is what a known rule, or a known mistake, makes of a call: which drafts are accepted, and what the last token is
drawn from, both from p, q and a chain of drafts. Outputs that a rule's law gives with probability 0 are impossible
under it. Over many calls its decisions and draws are tested as `verify` tests a run's (analyze/verify/chance.py). And
they are held against the known mistakes: the mean of their likelihoods over the rule's is 1 on average where the rule
was at work, so that it is above 1 / x with a probability of x at most (Markov's inequality).

A file of calls is an .npz, of which nothing is unpickled, or a .pt, of weights alone. Arrays go by the names under
which people dump them in vLLM and SGLang (NAMES); docs/testing.md tells their shapes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from hashlib import blake2b
from itertools import compress
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specscope.analyze.evidence.arrays import Indices
from specscope.analyze.findings import CheckResult, Exit, Finding, Reference
from specscope.analyze.significance import holm
from specscope.analyze.verify.chance import DISTANCE, FEW, FLAT, NATS, SHARE, Family, Sum, surprisal
from specscope.errors import UserError, first_line
from specscope.trace.history.wording import plural
from specscope.trace.kinds import TENSORS, kind_of, start_of
from specscope.trace.record.notes import spread
from specscope.trace.record.rules import BLOCK, MATCH, STANDARD
from specscope.trace.record.tree import Bools, Doubles

NEAR = 1e-5  # of a border, where a sampler's rounding may decide
TINY = 1e-45
GREEDY = "greedy"
HERE = (0, 0)


@dataclass(frozen=True)
class VerifyCall:
    """One call of a sampler for one request: n drafts, one behind the other."""

    p: Doubles  # [n + 1, V] the target's behind the root and behind each draft; [n, V] without that of a bonus token
    drafted: Indices  # [n]
    output: Indices  # accepted drafts and one more token
    q: Doubles | None = None  # [n, V] what the drafts were drawn from; None where they were not drawn
    coin: Doubles | None = None  # [n] a draft is accepted where its coin is below its ratio
    final_coin: float | None = None  # of the last token: that which has it in its interval of the cumulative sum
    rounding: float = 0.0  # relative, of p and q where they were stored in 16 bits

    @cached_property
    def accepted(self) -> int:
        """How many drafts came out before the last token; -1 where the output is not such drafts and one more."""
        count = len(self.output) - 1
        return count if count >= 0 and np.array_equal(self.output[:-1], self.drafted[:count]) else -1

    def row(self, place: int, off: tuple[int, int] = (0, 0)) -> tuple[Doubles, Doubles, int]:
        """p, q and the token of a draft; p and q may be so many rows away."""
        last, token = len(self.drafted) - 1, int(self.drafted[place])
        p = self.p[min(max(place + off[0], 0), len(self.p) - 1)]
        return p, one_hot(p, token) if self.q is None else self.q[min(max(place + off[1], 0), last)], token

    def near(self, token: int) -> float:
        """What may be left of p for the last token where p and q are as large, but for rounding."""
        p, q, _ = self.row(min(self.accepted, len(self.drafted) - 1))
        return TINY if p[token] > 0 and abs(p[token] - q[token]) <= 2 * self.rounding * max(p[token], q[token]) else 0.0


def one_hot(row: Doubles, token: Any) -> Doubles:  # noqa: ANN401
    return np.asarray(np.arange(len(row)) == token, np.float64)


def argmax(row: Doubles, *_: Any) -> Doubles:  # noqa: ANN401
    return one_hot(row, row.argmax())


def residual(p: Doubles, q: Doubles, _: int) -> Doubles:
    """max(p - q, 0), not renormalised."""
    return np.asarray(np.maximum(p - q, 0))


Made = Callable[[Doubles, Doubles, int], Any]  # from p, q and the draft


@dataclass(frozen=True)
class Law:
    """Drafts are tried one after the other; `ahead`: block verification, with the ratios of whole paths."""

    accept: Made = lambda p, q, d: float(p[d]) / max(float(q[d]), TINY)
    left: Made = residual  # of p, behind a rejection
    bonus: Callable[[VerifyCall], Doubles] = lambda call: call.p[call.accepted]
    off: tuple[int, int] = HERE  # rows by which p and q are off where a draft is judged
    off_left: tuple[int, int] = HERE  # and behind a rejection
    by_coins: bool = True  # whether a coin decides each draft
    ahead: bool = False

    def walk(self, call: VerifyCall) -> tuple[list[float], Doubles | None]:
        """The chance of each draft that was tried, and [V] what the last token is drawn from: None where not known."""
        tried = min(call.accepted + 1, len(call.drafted))
        each = self._ahead(call)[:tried] if self.ahead else [self._alone(call, place) for place in range(tried)]
        chances, left = [chance for chance, _ in each], each[-1][1]
        if call.accepted == tried:
            if len(call.p) == tried:
                return chances, None
            left = self.bonus(call)
        left = np.asarray(left if left.any() else call.p[call.accepted], np.float64)
        return chances, left / left.sum()

    def _alone(self, call: VerifyCall, place: int) -> tuple[float, Doubles]:
        """The chance that a draft is accepted, and what is left of p where it is not."""
        ratio, left = float(self.accept(*call.row(place, self.off))), self.left(*call.row(place, self.off_left))
        return self._chance(call, place, ratio), left

    def _ahead(self, call: VerifyCall) -> list[tuple[float, Doubles]]:
        """Of each draft the chance that it or a later one is accepted, and what is left of p where none is."""
        path, left, n = [1.0], list[Doubles](), len(call.drafted)
        for place in range(n):
            p, q, token = call.row(place)
            left.append(np.asarray(self.left(p * path[place], q, token)))
            path.append(min(1.0, path[place] * float(self.accept(p, q, token))))
        mass, ratio = np.array([row.sum() for row in left]), np.array(path)
        below = np.where(mass > 0, mass / np.maximum(mass + (1 - ratio[:-1]), TINY), ratio[:-1] == 1)
        a = np.array([self._chance(call, place, x) for place, x in enumerate(np.append(below[1:], ratio[-1:]))])
        counts = np.append(1, a) * np.append(np.cumprod((1 - a)[::-1])[::-1], 1)  # how likely so many are accepted
        least = np.cumsum(counts[::-1])[::-1]
        return [(float(least[i + 1] / least[i]) if least[i] else 0.0, left[i]) for i in range(n)]

    def _chance(self, call: VerifyCall, place: int, a: float) -> float:
        """That a draft is accepted where its ratio is `a`: by its coin, where that decides and is known."""
        a = min(float(a), 1.0)
        if not self.by_coins or call.coin is None:
            return a
        return 0.5 if abs(call.coin[place] - a) < NEAR + 2 * call.rounding * a else float(call.coin[place] < a)

    def judge(self, call: VerifyCall) -> tuple[float, str]:
        """(The log-likelihood of the output, "") or (-inf, why it cannot be)."""
        if (last := call.accepted) < 0:
            drafts = f"a prefix of the drafts {call.drafted.tolist()} plus one token"
            return -math.inf, f"the output {call.output.tolist()} is not {drafts}"
        (chances, row), token = self.walk(call), int(call.output[-1])
        share = math.prod(abs(chance - (place == last)) for place, chance in enumerate(chances))
        if row is not None and call.final_coin is None:
            share *= float(row[token]) or call.near(token)
        elif row is not None and call.final_coin is not None:
            over, near = call.final_coin - float(row[:token].sum()), NEAR + 2 * call.rounding
            share *= bool(row[token] > 0 or call.near(token)) and -near <= over <= float(row[token]) + near
        return (math.log(share), "") if share > 0 else (-math.inf, self._why_not(call, chances))

    def _why_not(self, call: VerifyCall, chances: Sequence[float]) -> str:
        token, last = int(call.output[-1]), call.accepted
        for place, chance in enumerate(chances):
            if chance == float(place == last):
                coin = "" if call.coin is None else f" and coin {call.coin[place]:.6g}"
                (p, q, tried), word = call.row(place), "accepted" if place < last else "rejected"
                return f"draft {tried} at place {place} was {word} with p = {p[tried]:.6g}, q = {q[tried]:.6g}{coin}"
        if call.final_coin is not None:
            return f"the final coin {call.final_coin:.6g} does not draw token {token} at place {last}"
        if last == len(call.drafted):
            return f"the bonus token {token} cannot be drawn there"
        p, q, _ = call.row(last)
        return f"token {token} at place {last} came after a rejection with p = {p[token]:.6g}, q = {q[token]:.6g}"


def _overrun(at: int, p: Doubles, q: Doubles, token: int) -> Doubles:
    left = residual(p, q, token)
    left[at] += max(1 - left.sum(), 0)
    return left


LOSSLESS: Mapping[str, Law] = {
    STANDARD: Law(),
    MATCH: Law(lambda p, q, d: p[d], lambda p, q, d: np.where(one_hot(p, d), 0, p), by_coins=False),
    BLOCK: Law(ahead=True),
    GREEDY: Law(lambda p, q, d: p.argmax() == d, argmax, lambda call: argmax(call.p[call.accepted])),
}
MISTAKES: Mapping[str, Law] = {
    "drafts are accepted where p > q": Law(lambda p, q, d: p[d] > q[d]),
    "drafts are accepted by min(1, q / p)": Law(lambda p, q, d: float(q[d]) / max(float(p[d]), TINY)),
    "drafts are accepted by p, not p / q": Law(lambda p, q, d: p[d]),
    "every draft is accepted": Law(lambda p, q, d: 1.0),
    "the token after a rejection is drawn from p, not from the residual": Law(left=lambda p, q, d: p),
    "the token after a rejection is drawn from q": Law(left=lambda p, q, d: q),
    "the token after a rejection is the argmax of the residual": Law(left=lambda p, q, d: argmax(np.maximum(p - q, 0))),
    "the token after a rejection is the argmax of p": Law(left=argmax),
    "the residual is not renormalised: beyond its mass it gives the last token": Law(left=partial(_overrun, -1)),
    "the residual is not renormalised: beyond its mass it gives token 0": Law(left=partial(_overrun, 0)),
    "the bonus token is drawn from q": Law(bonus=lambda call: call.row(call.accepted - 1)[1]),
    "the bonus token is drawn from the previous row of p": Law(bonus=lambda call: call.row(call.accepted - 1)[0]),
    "the bonus token is the argmax of p": Law(bonus=lambda call: argmax(call.p[call.accepted])),
    "the residual goes through a softmax": Law(left=lambda p, q, d: np.exp(residual(p, q, d))),
    "the residual is |p - q|": Law(left=lambda p, q, d: np.abs(p - q)),
    "the token after a rejection is drawn from p without the draft": Law(left=LOSSLESS[MATCH].left),
    **{
        f"{side} is taken from the {row} row{alone}": Law(off=off if judged else HERE, off_left=off if left else HERE)
        for alone, judged, left in (
            *(("", True, True), (" for the acceptance alone", True, False)),
            (" for the residual alone", False, True),
        )
        for side, row, off in (
            *(("p", "next", (1, 0)), ("p", "previous", (-1, 0))),
            *(("q", "next", (0, 1)), ("q", "previous", (0, -1))),
        )
    },
}

ALPHA = 0.01  # how often a sampler without a mistake may be found guilty by chance
MOST = 0.97  # of the calls: a mistake that gives so many is named
LIKELIEST = 5  # mistakes, of which it is asked whether chance falls as they make it
UNLIKELY = -20.0  # the log-likelihood of an output that cannot be, where mistakes are held against each other
NOT_DRAWN = 1e-3  # p-value below which drafts are taken not to be drawn from q
NO_SUM = {GREEDY: "its tokens are not drawn", BLOCK: "the number of tokens depends on the tokens"}  # of the output
DRAFTED, EMITTED = "drafted surprisal", "emitted surprisal"
NOT_FROM_Q = "the drafts are not drawn from q"
WORDS = {
    DRAFTED: "drafts follow q",
    "recovered draws": "tokens after a rejection follow the residual",
    "bonus draws": "bonus tokens follow p",
    EMITTED: "emitted tokens follow the target's p: lossless",
}
BY_COIN = "the final coin decides each"
EXPECTED = 5.0  # times that a token must be expected to be held against how often it came
NOWHERE: Callable[[int], Reference] = lambda _: Reference("", 0, 0)  # noqa: E731
COINS_APART = 2.0**-24  # of uniform numbers as float32 has them; equal ones are this likely


@dataclass(frozen=True)
class CallsJudged:
    calls: int
    drafts: int
    fits: tuple[str, ...]  # the rules that give these outputs
    refuted: Mapping[str, str]  # of the other rules that were asked for, what first shows that they do not
    mistake: str  # what gives them best, where none does; "" where no known mistake gives nearly all
    given: int  # calls that it gives
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
        some = f" in {self.given:,} of " if self.given < self.calls else "; "
        looks = f"as if {self.mistake}{some}" if self.mistake else "no known mistake gives these outputs; "
        return f"NOT CONSISTENT ({failed}): {looks}{counts}"

    def to_dict(self) -> dict[str, Any]:
        told = {"checks": [check.to_dict() for check in self.checks]}
        return {"exit": int(self.exit), "verdict": str(self), **vars(self), **told}


def judge_calls(calls: Sequence[VerifyCall], rule: str | None = None, alpha: float = ALPHA) -> CallsJudged:
    """Judge calls whose coins are independent. `rule`: the one of LOSSLESS that is to hold; None: any of them.

    `alpha`: how often calls without a mistake may fail the tests of chance. Raises UserError.
    """
    if rule not in (None, *LOSSLESS):
        raise UserError(f"unknown rule {rule}: use {', '.join(LOSSLESS)}")
    if not calls:
        raise UserError("there is no call to judge")
    for number, call in enumerate(calls):
        _fit(call, len(call.drafted), where := f"call {number}")
        for name, array in (("p", call.p), ("q", call.q), ("coin", call.coin)):
            if array is not None and array.size:
                _checked(array, f"{name} of {where}", name)
    once = _first_of_equal(calls)
    under = {name: np.array([law.judge(call)[0] for call in calls]) for name, law in MISTAKES.items()}
    alone = "" if rule is None else "a rule was named, which asks for the sampler alone"
    found = {name: _checks(name, calls, once, under, alpha, alone) for name in (LOSSLESS if rule is None else [rule])}
    failed = {name: [check for check in checks if check.result is CheckResult.FAILED] for name, checks in found.items()}
    refuted = {name: f"{checks[0].name}: {checks[0].detail}" for name, checks in failed.items() if checks}
    fits = tuple(name for name in found if name not in refuted)
    shown = next(iter([*fits, *found]))
    wrong = tuple((number, LOSSLESS[shown].judge(calls[number])[1]) for number in found[shown][0].wrong.tolist())
    is_drafted = not fits and [check.name for check in failed[shown]] == [DRAFTED]
    mistake, given = (NOT_FROM_Q, len(calls)) if is_drafted else ("", 0) if fits else _mistake(calls, once, under)
    drafts = sum(len(call.drafted) for call in calls)
    return CallsJudged(len(calls), drafts, fits, refuted, mistake, given, tuple(found[shown]), wrong)


def _first_of_equal(calls: Sequence[VerifyCall]) -> Bools:
    """Which calls count where chance is asked: of those that are equal in all, coins too, the first. Without coins
    equal ones may have come by chance."""
    seen, once = set[bytes](), np.ones(len(calls), np.bool_)
    for number, call in enumerate(calls):
        if call.coin is not None:
            arrays = (call.p, call.drafted, call.output, call.coin, *(() if call.q is None else (call.q,)))
            key = blake2b(b"".join(each.tobytes() for each in arrays) + repr(call.final_coin).encode()).digest()
            once[number] = key not in seen
            seen.add(key)
    return once


def _mistake(calls: Sequence[VerifyCall], once: Bools, under: Mapping[str, Doubles]) -> tuple[str, int]:
    """The likeliest known mistake that gives nearly all calls, and how many, where chance falls as it makes it."""
    likely, lacking = {name: float(np.maximum(logs, UNLIKELY).sum()) for name, logs in under.items()}, "it is a mistake"
    for name in sorted(likely, key=likely.__getitem__, reverse=True)[:LIKELIEST]:
        given = np.isfinite(under[name])
        if given.sum() < MOST * len(calls):
            continue
        families = _families(MISTAKES[name], list(compress(calls, given & once)), name, lacking, lacking)
        if all(family.p_value >= NOT_DRAWN for family in families if family.judged):
            return name, int(given.sum())
    return "", 0


def _unequal(calls: Sequence[VerifyCall]) -> Finding:
    """Coins of float32 are seldom equal by chance: so seldom that a few more tell of a coin that is used again."""
    coins = _coins(calls)
    twice, n = len(coins) - len(np.unique(coins)), len(coins)
    found = Finding("coins unequal", CheckResult.SKIPPED, "no coin is used twice", n, unit="coin", note="no coins")
    if not n or np.array_equal(np.round(coins, 6), coins):
        return found if not n else replace(found, note="the coins are rounded")
    chance = n * n / 2 * COINS_APART
    if twice <= 2 + chance + 6 * math.sqrt(chance):
        return replace(found, result=CheckResult.PASSED, note="")
    detail = f"{n - twice:,} different ones among {plural(n, 'coin')}"
    return replace(found, result=CheckResult.FAILED, note="", failed=twice, detail=detail)


def _evenly(calls: Sequence[VerifyCall]) -> Family:
    sums = {"": Sum.uniform(_coins(calls))}
    return Family("coins uniform", "coins are spread evenly over 0 to 1", sums, DISTANCE, NOWHERE, "no coins")


def _coins(calls: Sequence[VerifyCall]) -> Doubles:
    finals = [[call.final_coin] for call in calls if call.final_coin is not None]
    return np.concatenate([np.zeros(0), *(call.coin for call in calls if call.coin is not None), *finals])


def _checks(
    rule: str, calls: Sequence[VerifyCall], once: Bools, under: Mapping[str, Doubles], alpha: float, alone: str
) -> list[Finding]:
    """What holds where a rule was at work: first that its outputs are possible, last that no mistake is likelier.

    `once`: the calls that count where chance is asked. `under`: the log-likelihoods of the outputs, by mistake.
    `alone`: why drafts may be others than draws from q.
    """
    logs, why_not = zip(*map(LOSSLESS[rule].judge, calls), strict=True)
    first = Finding(
        "possible outputs", CheckResult.PASSED, f"the rule {rule} can give each output", len(calls), unit="call"
    )
    if len(wrong := np.flatnonzero(np.array(why_not) != "")):
        detail = f"call {wrong[0]}: {why_not[wrong[0]]}"
        first = replace(first, result=CheckResult.FAILED, failed=len(wrong), wrong=wrong, detail=detail)
    own = np.array(logs)
    possible, different = np.isfinite(own) & once, list(compress(calls, once))
    lacking, no_q = NO_SUM.get(rule, ""), alone if rule in (STANDARD, BLOCK) else f"{rule} asks for no q"
    families = [_evenly(different), *_families(LOSSLESS[rule], list(compress(calls, possible)), rule, lacking, no_q)]
    over = {name: float((of_mistake[possible] - own[possible]).sum()) for name, of_mistake in under.items()}
    times = float(np.logaddexp.reduce([*over.values()])) - math.log(len(over))  # log of the mean
    p_values = [*(family.p_value if family.judged else 1.0 for family in families), math.exp(-max(times, 0.0))]
    failed = holm(p_values, alpha)
    made = [family.finding(alpha / len(failed), failed=fails) for family, fails in zip(families, failed, strict=False)]
    about, count = "no known mistake makes the outputs far likelier", int(possible.sum())
    last = Finding("known mistakes", CheckResult.PASSED, about, count, unit="call", p_value=p_values[-1])
    if failed[-1]:
        best = f"10^{times / math.log(10):.0f} times as likely where {max(over, key=over.__getitem__)}"
        last = replace(last, result=CheckResult.FAILED, failed=count, detail=best)
    return [first, _unequal(different), *made, last]


def _families(law: Law, calls: Sequence[VerifyCall], name: str, lacking: str, no_q: str) -> list[Family]:
    """The decisions and the draws of calls that a law can give. `lacking`: why the output need not follow p;
    `no_q`: why drafts need not follow q."""
    a, tried = list[float](), list[tuple[int, bool]]()  # of each draft its token and whether it was accepted
    drawn: dict[str, list[tuple[Doubles, int]]] = {name: [] for name in WORDS}  # rows, and what came
    for call in calls:
        chances, row = law.walk(call)
        a += chances
        tried += [(int(call.drafted[place]), place < call.accepted) for place in range(len(chances))]
        if row is not None and call.final_coin is None:
            kind = "recovered draws" if call.accepted < len(call.drafted) else "bonus draws"
            drawn[kind].append((row, call.output[-1]))
        drawn[EMITTED] += [] if lacking else zip(call.p, call.output, strict=False)
        is_asked = call.q is not None and (not no_q or name in (STANDARD, BLOCK))
        drawn[DRAFTED] += zip(call.q, call.drafted, strict=True) if is_asked else []  # type: ignore[arg-type]
    sums = {name: _surprisal(tokens) for name, tokens in drawn.items()}
    if name in (STANDARD, BLOCK) and sums[DRAFTED].judged and sums[DRAFTED].p_value < NOT_DRAWN:
        lacking = lacking or "the drafts do not follow q, so the output need not follow p"
    chance, (token, accepted) = np.array(a), np.array(tried, np.int64).reshape(-1, 2).T
    free = np.flatnonzero((chance > 0) & (chance < 1))
    off, spread_of = (accepted - chance)[free], (chance * (1 - chance))[free]
    by_token = {
        f"token {each}": Sum.of(off[mine], spread_of[mine], 1.0, np.full(int(mine.sum()), -1))
        for each in np.unique(token[free]).tolist()
        for mine in [token[free] == each]
    }
    by_coins = "the coins decide each draft" if len(chance) and not len(free) else FEW
    drawn_by_coin = any(call.final_coin is not None for call in calls)
    as_often = f"drafts are accepted as often as {name} predicts"
    decided = Sum.of(off, spread_of, 1.0, np.full(len(free), -1))
    made = [
        Family("acceptance", as_often, {"": decided}, SHARE, NOWHERE, by_coins),
        Family("acceptance by token", "the same by the draft's token", by_token, SHARE, NOWHERE, by_coins, len(free)),
    ]
    for draws, about in WORDS.items():
        skipped = {EMITTED: lacking, DRAFTED: no_q}.get(draws, "")
        why = skipped or (BY_COIN if drawn_by_coin and not drawn[draws] else FEW)
        made.append(Family(draws, about, {} if skipped else {"": sums[draws]}, NATS, NOWHERE, why))
    last = {"after a rejection": drawn["recovered draws"], "as a bonus token": drawn["bonus draws"]}
    count, lacking = sum(map(len, last.values())), BY_COIN if drawn_by_coin else FEW
    of_tokens = {name: each for where, tokens in last.items() for name, each in _by_token(tokens, where).items()}
    about = "each token comes last as often as it should"
    return [*made, Family("draws by token", about, of_tokens, SHARE, NOWHERE, lacking, count)]


def _by_token(drawn: Sequence[tuple[Doubles, int]], where: str) -> dict[str, Sum]:
    """How much more often each token came than what it was drawn from says."""
    if not drawn:
        return {}
    came = np.bincount([token for _, token in drawn], minlength=len(drawn[0][0])).astype(np.float64)
    expected, squares = np.zeros((2, len(came)))
    for row, _ in drawn:
        expected += row
        squares += row.astype(np.float64) ** 2
    more, variance, told = came - expected, expected - squares, np.flatnonzero(expected >= EXPECTED).tolist()
    return {f"token {each} {where}": Sum(more[each], variance[each], len(drawn), 1.0) for each in told}


def _surprisal(drawn: Sequence[tuple[Doubles, int]]) -> Sum:
    told = [(float(row[token]), *spread(row.astype(np.float64))) for row, token in drawn]
    p, entropy, varentropy = np.array(told, np.float64).reshape(-1, 3).T
    some = np.flatnonzero(varentropy > FLAT)
    return surprisal(p[some], entropy[some], varentropy[some], np.full(len(some), -1))


Arrays = Mapping[str, NDArray[Any]]
LARGEST = 8 * 2**30  # bytes of all arrays
SUMS = 0.02  # by which a row of 16-bit probabilities may miss 1
NAMES: Mapping[str, tuple[str, ...]] = {
    "p": ("target_probs", "target_p", "target_prob"),
    "logits": ("target_logits",),
    "q": ("draft_probs", "draft_p", "draft_prob"),
    "draft_logits": (),
    "drafted": ("draft_token_ids", "draft_tokens", "draft_ids", "drafts"),
    "output": ("output_token_ids", "output_tokens", "output_ids", "sampled_token_ids"),
    "coin": ("coins", "uniform_samples", "uniform_probs", "uniform_rand", "u"),
    "final_coin": ("final_coins", "uniform_samples_for_final_sampling", "coins_for_final_sampling"),
    "counts": ("num_draft_tokens", "cu_num_draft_tokens"),
    "temperature": ("temperatures",),
}
SPELLED = {one: name for name, others in NAMES.items() for one in (name, *others)}
OVER_TOKENS = ("p", "logits", "q", "draft_logits")
ROWS, IDS, COINS = ("p", "q"), ("drafted", "output", "counts"), ("coin", "final_coin")
OF_TREES = re.compile("tree|retrie?ve?_|sibling|parent")  # in the names of what only trees have
BY_CALL = ("output", "final_coin", "temperature", "counts")  # also where calls are packed


def read_calls(path: str) -> tuple[list[VerifyCall], tuple[str, ...]]:
    """The calls, and remarks on what was not used. Raises UserError."""
    given, found = dict(_tensors(path) if kind_of(start_of(path)) is TENSORS else _npz(path)), dict[str, NDArray[Any]]()
    rows = (one for one in given if SPELLED.get(one) in OVER_TOKENS and given[one].dtype.kind in "fiu")
    widths = {one: given[one].shape[-1] for one in rows if given[one].ndim}
    if len({*widths.values()}) > 1:
        told = ", ".join(f"{width} tokens in {one}" for one, width in widths.items())
        raise UserError(f"{path} has vocabularies of different sizes: {told}")
    for one in filter(SPELLED.__contains__, given):
        if (name := SPELLED[one]) in found:
            raise UserError(f"{path} has {name} by two names: leave one of {', '.join((name, *NAMES[name]))} out")
        array = _checked(given[one], f"{one} in {path}", name)
        found[name] = np.diff(array, prepend=0) if one.startswith("cu_") else array
    for name, other in (("p", "logits"), ("drafted", ""), ("output", "")):
        if name not in found and other not in found:
            names = ", ".join(filter(None, (name, *NAMES[name], other)))
            raise UserError(f"{path} has no {names}; it has {', '.join(sorted(given)) or 'nothing'}")
    unused = sorted(given.keys() - SPELLED.keys())
    if hint := next(filter(OF_TREES.search, unused), ""):
        raise UserError(f"{path} has {hint}: its drafts are a tree, and calls are judged of chains alone")
    every = [_call(one, f"call {number} in {path}") for number, one in enumerate(_one_by_one(found, path))]
    calls, notes = [call for call in every if len(call.drafted)], []
    if unused:
        notes.append(f"not used: {', '.join(unused)}")
    if len(calls) < len(every):
        notes.append(f"{len(every) - len(calls)} of {len(every)} calls have no drafts and are left out")
    return calls, tuple(notes)


def _npz(path: str) -> Iterator[tuple[str, NDArray[Any]]]:
    try:
        with np.load(path, allow_pickle=False) as archive:
            size = sum(entry.file_size for entry in archive.zip.infolist())
            yield from archive.items() if size <= LARGEST else ()
    except Exception as error:  # of zipfile, zlib, and whatever reads a header
        pickled = "holds pickled Python objects, which specscope never loads: save numbers"
        broken = f"is damaged or cut off: {first_line(error)}"
        raise UserError(f"{path} {pickled if 'allow_pickle' in str(error) else broken}") from error
    if size > LARGEST:
        raise UserError(f"{path} holds more than {LARGEST >> 30} GiB: give some of its calls")


def _tensors(path: str) -> Iterator[tuple[str, NDArray[Any]]]:
    import torch

    try:
        loaded = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise UserError(f"{path} is damaged or holds more than tensors: {first_line(error)}") from error
    if not isinstance(loaded, dict):
        raise UserError(f"{path} holds a {type(loaded).__name__}: save a dictionary of tensors by name")
    for name, value in loaded.items():
        if isinstance(value, torch.Tensor | int | float | list | tuple):
            tensor = torch.as_tensor(value).detach()
            yield str(name), (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy()


def _checked(array: NDArray[Any], where: str, name: str) -> NDArray[Any]:
    """An array of such numbers as its name promises. Raises UserError."""
    array = np.atleast_1d(array)
    if array.dtype.kind not in "fiu" or not array.size:
        raise UserError(f"{where} is {list(array.shape)} of {array.dtype}: it must hold numbers")
    if np.isnan(array).any():
        raise UserError(f"{where} has NaN")
    if name in IDS and (array != np.floor(array)).any():
        raise UserError(f"{where} has values that are not whole numbers")
    if name in COINS and not ((array >= 0) & (array <= 1)).all():
        raise UserError(f"{where} has values outside 0 to 1")
    if name in ROWS:
        sums = np.atleast_1d(array.sum(-1, dtype=np.float64))
        worst = float(sums.flat[np.abs(sums - 1).argmax()])
        if not (array >= 0).all() or abs(worst - 1) > SUMS:
            raise UserError(f"{where} has a row that sums to {worst:.6g} or is negative in places: not probabilities")
    return array.astype(np.int64) if name in IDS else array.astype(np.float32) if array.itemsize < 4 else array


def _one_by_one(found: Arrays, path: str) -> Iterator[Arrays]:
    """The arrays of each call. Raises UserError where they are not of as many calls."""
    counts, parts = found.get("counts"), dict[str, list[NDArray[Any]]]()
    for name, array in found.items():
        parts[name] = [array] if counts is None and found["drafted"].ndim == 1 else list(array)
        if counts is not None and name not in BY_CALL:
            with_bonus = name != "drafted" and len(array) == counts.sum() + len(counts)
            parts[name] = np.split(array, np.cumsum(counts + with_bonus)[:-1])
        if name == "temperature" and array.size == 1:
            parts[name] = [array] * len(found["output"])
    calls = len(parts["drafted"])
    for name, split in parts.items():
        if len(split) < calls or (len(split) > calls and name != "temperature"):
            raise UserError(f"{path} has {calls} calls by its drafts, but {len(split)} by {name}")
    return ({name: split[number] for name, split in parts.items()} for number in range(calls))


def _call(one: Arrays, where: str) -> VerifyCall:
    """One call. Raises UserError for shapes that do not fit together, and tokens outside the vocabulary."""
    drafted, output = (one[name][: int((one[name] >= 0).sum())] for name in ("drafted", "output"))
    p, q, n = _rows(one, "p", "logits"), _rows(one, "q", "draft_logits"), len(drafted)
    assert p is not None
    final = float(one["final_coin"].flat[0]) if "final_coin" in one else None
    padded = VerifyCall(p, drafted, output, q, one.get("coin"), final, _rounding(p) if "p" in one else 0.0)
    _fit(padded, drafts := len(one["drafted"]), where)
    q, coin = (None if x is None else x[:n] for x in (q, padded.coin))
    return replace(padded, p=p[: n + (len(p) > drafts)], q=q, coin=coin)


def _fit(call: VerifyCall, drafts: int, where: str) -> None:
    """Raise UserError for shapes that do not fit so many drafts, and for tokens outside the vocabulary."""
    for name, array in (("p", call.p), ("q", call.q), ("coin", call.coin), ("drafted", call.drafted)):
        wide, least = call.p.shape[-1:] if name in ROWS else (), 0 if name == "drafted" else drafts
        if array is not None and not (array.ndim and array.shape[1:] == wide and least <= len(array) <= drafts + 1):
            raise UserError(f"{where}: {name} is {list(array.shape)}, which does not fit {plural(drafts, 'draft')}")
    if call.output.ndim != 1 or not len(call.output):
        raise UserError(f"{where}: output holds no token")
    for name, tokens in (("drafted", call.drafted), ("output", call.output)):
        if tokens.min(initial=0) < 0 or tokens.max(initial=0) >= call.p.shape[-1]:
            raise UserError(f"{where}: {name} is {tokens.tolist()}, but the vocabulary has {call.p.shape[-1]} tokens")


def _rounding(rows: Doubles) -> float:
    """The relative error of numbers that were stored in float16 or bfloat16; 0 where they hold more digits."""
    rows = np.asarray(rows, np.float32)
    if not (rows.view(np.uint32) & 0xFFFF).any():
        return 2.0**-8
    return 2.0**-11 if np.array_equal(rows.astype(np.float16), rows) else 0.0


def _rows(one: Arrays, name: str, logits: str) -> Doubles | None:
    """A call's probabilities, from logits where it has these; None where it has neither."""
    if logits not in one:
        return one.get(name)
    rows, heat = one[logits].astype(np.float64), float(one["temperature"].flat[0]) if "temperature" in one else 1.0
    rows -= rows.max(-1, keepdims=True)
    made = np.exp(rows / heat) if heat > 0 else rows == 0
    return np.asarray(made / made.sum(-1, keepdims=True), np.float32)
