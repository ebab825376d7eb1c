"""Every step by itself: the verdict's arithmetic, done again from what was recorded.

Each step is checked by its own rule (see speculate/verify/); what follows from a forced outcome is not checked. p and q
were float32: figures computed again from them may differ by rounding, which residuals magnify, and this error is
carried along.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np

from specscope.analyze.evidence.arrays import lengths
from specscope.analyze.evidence.columns import BONUS, KINDS, RECOVERED, TARGET, Columns
from specscope.analyze.findings import CheckResult, Finding, Reference
from specscope.analyze.verify.coin_keys import CoinsOf, coins_of
from specscope.plans.plan import StaticPlan, read_plan
from specscope.trace.history.wording import plural
from specscope.trace.record.privacy import NO_TOKEN
from specscope.trace.record.records import Outcome, RequestStep, RunInfo
from specscope.trace.record.tree import ROOT, Bools, Doubles, Drawn


@dataclass(frozen=True)
class Seen:
    """What a check looked at, one by one: which are wrong, of those that it tests, and one of them in words."""

    bad: Bools
    tested: Bools
    detail: Callable[[int], str]
    note: str = ""  # why nothing was tested, or what a reader of the figure must know
    where: Callable[[int], Reference] | None = None  # of what is no node, step or parent
    z: float | None = None  # of a figure over all of them that decided


Formula = Callable[[Columns], Seen]
WHERE = {"step": Columns.at_step, "parent": Columns.at_parent}


@dataclass(frozen=True)
class Checks:
    """Checks of one kind in order: each with what it says where it passes, and its formula."""

    title: str
    rows: list[tuple[Finding, Formula]] = field(default_factory=list)

    def add(self, name: str, about: str, unit: str = "node") -> Callable[[Formula], Formula]:
        """One more, whose formula follows."""

        def added(formula: Formula) -> Formula:
            self.rows.append((Finding(name, CheckResult.PASSED, about, unit=unit), formula))
            return formula

        return added

    def findings(self, c: Columns) -> list[Finding]:
        """What all of them find; of each the first that is wrong is shown."""
        return [_found(c, formula(c), fine) for fine, formula in self.rows]


def _found(c: Columns, seen: Seen, fine: Finding) -> Finding:
    count, wrong = int(seen.tested.sum()), np.flatnonzero(seen.bad & seen.tested)
    fine = replace(fine, tested=count, note=seen.note)
    if not count:
        return replace(fine, result=CheckResult.SKIPPED, note=seen.note or "nothing to test")
    if not len(wrong):
        return fine
    first, where = int(wrong[0]), seen.where or partial(WHERE.get(fine.unit, Columns.at_node), c)
    fine = replace(fine, result=CheckResult.FAILED, failed=len(wrong), wrong=wrong, statistic=seen.z)
    p_value = None if seen.z is None else math.erfc(seen.z / math.sqrt(2))
    return replace(fine, example=where(first), detail=seen.detail(first), p_value=p_value)


RECORDED = Checks("What was recorded")
EACH_STEP = Checks("Each step")
RELATIVE = 1e-5  # of a probability: float32, and sums over a vocabulary of it
LEAST = 1e-6  # of any figure
WHOLE = 3e-5  # by which a sum of float32 over a vocabulary may miss 1: 5e-6 was seen with 49,152 tokens
HOPELESS = 0.05  # where rounding alone may move a probability by more, nothing is judged
NO_COINS = "the capture has no coins"


# A value of the right type that no probability can have is itself evidence of a fault. Nothing can be computed from it,
# so the other checks leave its step out.


@RECORDED.add("probabilities", "every p, q, coin and entropy is a number in its range", "step")
def _probabilities(c: Columns) -> Seen:
    planned = c.ours and plan_of(c.run) is not None
    details = {int(step): text for step, text in (*_wrong(c), *(_nothing_drafted(c) if planned else ()))}
    bad = np.isin(np.arange(len(c)), list(details))
    return Seen(bad, np.ones(len(c), np.bool_), details.__getitem__)


def plan_of(run: RunInfo | None) -> StaticPlan | None:
    """The static tree that a model is to draft; None where it is no such tree."""
    plan = None if run is None or not run.draft_model else read_plan(run.tree)
    return plan if isinstance(plan, StaticPlan) else None


def _wrong(c: Columns) -> Iterator[tuple[int, str]]:
    """Steps with a figure that is wrong, and which; several times where there are several."""
    for name, values, step, wrong in c.figures():
        negative = (values < -0.01) & ("entropy" in name)
        for place in np.flatnonzero(wrong | negative if values.ndim == 1 else wrong).tolist():
            text = f"{values[place]:.6g}" if values.ndim == 1 else str(np.round(values[place], 6).tolist())
            yield int(step[place]), f"{name.format(c.node[place]) if '{' in name else name} is {text}"


def _nothing_drafted(c: Columns) -> Iterator[tuple[int, str]]:
    """Steps in which a model was fed nodes of its tree and gave no token behind them, though every token may come."""
    for step in np.flatnonzero(lengths(c.picked, "notes", "rows") > 1).tolist():
        part, free = c.visits[step].part, c.known[step] and not c.params[step].limited
        if free and not part.sizing and not part.is_ranked_with_text and (rows := childless(part)):
            yield step, f"{plural(rows, 'node')} fed to the drafter gave no token: its logits are no numbers"


def with_children(part: RequestStep) -> set[int]:
    """The nodes of a drafted tree with children, of which some may have been dropped."""
    dropped = [] if part.notes is None else part.notes.dropped_parent.tolist()
    return {*part.tree.parent.tolist(), *dropped} - {ROOT}


def childless(part: RequestStep) -> int:
    """How many nodes a drafter's later passes fed that have no children."""
    rows = part.told("notes", "rows")
    return 0 if rows is None else max(int(rows[1:].sum()) - len(with_children(part)), 0)


@RECORDED.add("rule of verification", "every step was judged by the rule that the run names", "step")
def _rule_of_the_run(c: Columns) -> Seen:
    run, edited = c.run, c.history is not None and len(c.history.branches) > 1
    known = run is not None and run.is_ours and not edited  # a debugger may have changed it on the way
    bad = np.array([run is not None and visit.part.rule != run.rule for visit in c.visits], np.bool_)
    return Seen(
        bad,
        np.full(len(c), known),
        lambda step: f"says {c.visits[step].part.rule}, the run {'' if run is None else run.rule}",
        "" if known else "the run was edited" if edited else "another engine's rule is told step by step",
    )


@EACH_STEP.add(
    "accept probability",
    "a = min(1, p / q), with p and q as tried; under block and traversal what is left of its path's ratio",
)
def _accept_probability(c: Columns) -> Seen:
    expected = np.where(c.q_trial > 0, np.minimum(1.0, c.p_trial / c.q_trial), 0.0)
    ahead = c.ahead[c.step]
    expected = np.where(ahead, c.own_ratio, expected)
    return Seen(
        ~np.isclose(c.accept_prob, expected, rtol=RELATIVE, atol=LEAST),
        np.where(ahead, c.by_own_coin, c.tried) & _unforced_ratios(c),
        lambda i: (
            f"a = {c.accept_prob[i]:.6g}, but the ratio of its path comes to {expected[i]:.6g}"
            if ahead[i]
            else f"a = {c.accept_prob[i]:.6g}, but p / q = {c.p_trial[i]:.6g} / {c.q_trial[i]:.6g}"
        ),
    )


@EACH_STEP.add("outcomes", "accepted where coin < a, rejected elsewhere")
def _outcomes(c: Columns) -> Seen:
    near = np.abs(c.coin - c.accept_prob) < 1e-7  # rounding in another engine
    return Seen(
        (c.accepted != (c.coin < c.accept_prob)) & ~near,
        c.by_own_coin & ~c.forced & (c.told & ~c.match)[c.step] & c.has_coins,
        lambda i: f"{Outcome(c.outcome[i]).name.lower()} with coin {c.coin[i]:.6g} and a = {c.accept_prob[i]:.6g}",
        "" if c.has_coins else NO_COINS,
    )


@EACH_STEP.add("trial order", "siblings are tried in draw order until one is accepted, and only below accepted nodes")
def _trial_order(c: Columns) -> Seen:
    reached = (c.above < 0) | np.where(c.ahead[c.step], c.open, c.accepted)[c.above]
    due = reached & ((c.elder < 0) | c.rejected[c.elder])
    if not len(c.token):
        due = np.zeros(0, np.bool_)
    detail = "was not tried when its turn came", "was tried out of turn"
    return Seen(due != c.tried, _unforced_ratios(c), lambda i: detail[not due[i]])


@EACH_STEP.add("p at later trials", "p as tried follows from p, and after a rejection from the renormalised residual")
def _target_at_trial(c: Columns) -> Seen:
    expected, error = residual_p(c)
    clear = error < HOPELESS
    clear &= c.named | (c.drawn != Drawn.WITH_REPLACEMENT)  # else whether it is the elder's own token is not known
    return Seen(
        np.abs(c.p_trial - expected) > error + LEAST + RELATIVE * expected,
        c.tried & clear & _unforced_ratios(c),
        lambda i: f"p as tried is {c.p_trial[i]:.6g}, from p and the trials before it {expected[i]:.6g}",
    )


def residual_p(c: Columns) -> tuple[Doubles, Doubles]:
    """[N] each tried node's p in what its elder siblings left of p, from p itself; and how far rounding may move it.

    p_1 = p; p_(i+1) = max(p_i - q_i, 0) / mass, or p_i without the token, over the mass.
    """
    expected, error = c.p.copy(), RELATIVE * c.p
    for rank in range(1, int(c.sibling[c.tried].max(initial=0)) + 1):
        mine = np.flatnonzero(c.tried & (c.sibling == rank))
        elders = [mine]
        for _ in range(rank):
            elders.append(c.elder[elders[-1]])
        p, slack = c.p[mine], error[mine]
        for elder in elders[:0:-1]:  # the first sibling first
            mass, left = np.maximum(c.residual_mass[elder], 0), np.maximum(c.q_left[elder], 1e-12)
            some = mass > 0
            with np.errstate(divide="ignore", invalid="ignore"):
                q = np.where(c.sampled[elder], c.q[mine] / left, 0.0)
                off = np.where(c.sampled[elder], q * (RELATIVE + WHOLE / left), 0.0)
                scaled = c.parent_ratio[elder] * p
                lower = np.where(c.sampled[elder] & ~c.match[c.step[elder]], np.maximum(scaled - q, 0), scaled)
                p, slack = np.where(some, lower / mass, p), np.where(some, (slack + off + LEAST) / mass, slack)
            same = (c.token[elder] == c.token[mine]) & some & c.named[mine]
            p, slack = np.where(same, 0.0, p), np.where(same, LEAST, slack)
        expected[mine], error[mine] = p, slack
    return expected, np.nan_to_num(error, nan=1.0)


@EACH_STEP.add(
    "q at trials", "q as tried is q over what earlier siblings left of it, and 1 where the draft is deterministic"
)
def _draft_at_trial(c: Columns) -> Seen:
    left = np.maximum(c.q_left, 1e-12)
    error = RELATIVE + WHOLE / left
    expected = np.where(c.sampled & ~c.match[c.step], c.q / left, 1.0)
    return Seen(
        (np.abs(c.q_trial - expected) > error * expected + LEAST) | (c.q_trial <= 0) | (c.q_trial > 1 + 1e-4),
        c.tried & (error < HOPELESS) & c.told[c.step],
        lambda i: f"q as tried is {c.q_trial[i]:.6g}, from q = {c.q[i]:.6g} and what was left it is {expected[i]:.6g}",
    )


@EACH_STEP.add("residual mass", "what is left of p after a rejection has the mass that p and q allow")
def _residual_mass(c: Columns) -> Seen:
    """Exactly 1 - p after a point mass; after a sampled node between what its token shows and 1 - p.

    Under rules that look ahead, 1 and p are scaled by what is left of the parent's ratio.
    """
    ratio = c.parent_ratio
    mass, p, q = c.residual_mass, ratio * c.p_trial, c.q_trial
    by_q = c.sampled & ~c.match[c.step]
    high = ratio - p + np.where(by_q, np.maximum(p - q, 0), 0)
    low = np.where(by_q, ratio - 1 + np.maximum(q - p, 0), high)
    return Seen(
        (mass > high + WHOLE) | (mass < low - WHOLE),
        c.rejected & _unforced_ratios(c),
        lambda i: (
            f"mass {mass[i]:.6g}, but p = {p[i]:.6g} and q = {q[i]:.6g} as tried allow {low[i]:.6g} to {high[i]:.6g}"
        ),
    )


@EACH_STEP.add("siblings", "siblings are distinct tokens, and the target's probabilities of them sum to at most 1")
def _siblings(c: Columns) -> Seen:
    """Filler of a greedy tree changes no output. A sampled one is drawn once for each node that holds it."""
    distinct = (c.drawn != Drawn.WITH_REPLACEMENT) & ~(c.filler & c.greedy[c.step])
    order = np.lexsort((c.token, c.row))
    row, token = c.row[order], c.token[order]
    again = np.zeros(len(order), np.bool_)
    again[order[1:]] = (row[1:] == row[:-1]) & (token[1:] == token[:-1]) & (token[1:] != NO_TOKEN)
    total = np.bincount(c.row[distinct], c.p[distinct], c.rows) if len(c.row) else np.zeros(c.rows)
    return Seen(
        again | (total[c.row] > 1 + 1e-4),
        c.told[c.step] & distinct,
        lambda i: f"token {c.token[i]} came twice" if again[i] else f"siblings' p sum to {total[c.row[i]]:.6g}",
    )


@EACH_STEP.add("paths", "the path holds every accepted node and no other", "step")
def _paths(c: Columns) -> Seen:
    chained = (c.above < 0) | c.on_path[c.above] if len(c.token) else c.on_path
    return Seen(
        c.any_in_step((c.on_path != c.accepted) | (c.on_path & ~chained)),
        c.told,
        lambda s: f"path {c.verdicts[s].path.tolist()}, accepted {np.flatnonzero(c.verdicts[s].outcome == 1).tolist()}",
    )


@EACH_STEP.add(
    "kind of final token",
    "bonus behind an accepted leaf, recovered behind a rejection, target where nothing was drafted",
    "step",
)
def _final_kinds(c: Columns) -> Seen:
    expected = np.full(len(c), BONUS)
    expected[np.diff(c.start) == 0] = TARGET
    if len(c.token):
        expected[c.children_at(np.ones(len(c.token), np.bool_))[c.final_row]] = RECOVERED
    return Seen(
        c.kind != expected,
        c.told,
        lambda s: f"says {KINDS[c.kind[s]].value}, the verdict makes it {KINDS[expected[s]].value}",
    )


@EACH_STEP.add(
    "final tokens", "the final token had a probability above 0, and was not rejected at the same place", "step"
)
def _final_tokens(c: Columns) -> Seen:
    """The residual has none of a token that was rejected just before."""
    same = c.rejected & (c.row == c.final_row[c.step]) & (c.token == c.final[c.step]) & (c.residual_mass > LEAST)
    same &= c.named & ~c.forced  # a token that was rejected by force alone may have a share of the residual
    # Under rules that look ahead a node of ratio 1 may be rejected with all below it: its token has a share of it too
    same &= ~(c.ahead[c.step] & c.sampled & (c.parent_ratio * c.p_trial > c.q_trial))
    again = c.any_in_step(same)
    return Seen(
        ~((c.final_p > 0) & (c.final_p <= 1 + 1e-4)) | again,
        c.told & ~c.forced_final,
        lambda s: (
            f"token {c.final[s]} was rejected at this place but was drawn as the final token"
            if again[s]
            else f"drawn with probability {c.final_p[s]:.6g}"
        ),
    )


@EACH_STEP.add("coins", "every coin follows from the request's seed, the stream and the root's position", "step")
def _recomputed_coins(c: Columns) -> Seen:
    coins = CoinsOf.verdicts(c)
    bad = np.zeros(len(c), np.bool_)
    bad[coins.step[coins_of(coins.right, coins.step, coins.number) != coins.value]] = True
    by_hand = "a coin that was set by hand in the debugger also fails this check" if (bad & c.known).any() else ""
    return Seen(
        bad,
        c.recomputed,
        lambda s: f"not the coins of seed {c.params[s].seed} at position {c.position[s]}",
        by_hand if c.ours else "the coins are another engine's",
    )


def _unforced_ratios(c: Columns) -> Bools:
    """[N] whether the node's step can be checked and, where its rule goes by ratios, nothing in it was forced."""
    return (c.told & ~(c.ahead & c.any_in_step(c.forced)))[c.step]
