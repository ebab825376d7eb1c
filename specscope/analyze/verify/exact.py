"""Every step by itself: the verdict's arithmetic, done again from what was recorded.

Each step is checked by its own rule (see speculate/verify/); what follows from a forced outcome is not checked. p and q
were float32: figures computed again from them may differ by rounding, which residuals magnify, and this error is
carried along.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from specscope.analyze.evidence.arrays import Indices
from specscope.analyze.evidence.columns import KINDS, Columns, in_range, rows_in_range
from specscope.analyze.evidence.fields import lengths
from specscope.analyze.findings import CheckResult, Finding, Unit
from specscope.trace.history.wording import plural
from specscope.trace.record.coins import Stream, coins_at
from specscope.trace.record.privacy import NO_TOKEN
from specscope.trace.record.records import FinalKind, Outcome, RequestStep, RunInfo
from specscope.trace.record.tree import ROOT, Bools, Doubles, Drawn

# Whether the recorded figures are probabilities at all, and whether every step was judged by the run's rule.
#
# A value of the right type that no probability can have is itself evidence of a fault. Nothing can be computed from it,
# so the other checks leave its step out.


def probabilities(c: Columns, *, planned: bool = False) -> Finding:
    """Every step with a figure that is not a number, or not a probability. `planned`: the trees have one shape."""
    details = {int(step): text for step, text in (*_wrong(c), *(_nothing_drafted(c) if planned else ()))}
    bad = np.isin(np.arange(len(c)), list(details))
    return check_each(
        "probabilities",
        "every p, q, coin and entropy is a number in its range",
        bad,
        np.ones(len(c), np.bool_),
        c.steps,
        lambda step: details[step],
    )


def _wrong(c: Columns) -> Iterator[tuple[int, str]]:
    """Steps with a figure that is wrong, and which; several times where there are several."""
    for name, values in c.figures_of_nodes().items():
        for node in np.flatnonzero(~in_range(values)).tolist():
            yield int(c.step[node]), f"{name} of node {c.node[node]} is {values[node]:.6g}"
    for name, values in c.figures_of_finals().items():
        for step in np.flatnonzero(~in_range(values)).tolist():
            yield step, f"{name} of the final token is {values[step]:.6g}"
    for name, values in (("a", c.accept_prob), ("residual mass", c.residual_mass)):
        for node in np.flatnonzero(~np.isfinite(values)).tolist():
            yield int(c.step[node]), f"{name} of node {c.node[node]} is {values[node]:.6g}"
    e = c.parents
    for name, table in e.shares().items():
        for parent in np.flatnonzero(~rows_in_range(table)).tolist():
            yield int(e.step[parent]), f"{name} of a parent is {np.round(table[parent], 6).tolist()}"
    for name, values in e.nats().items():
        for parent in np.flatnonzero(~(np.isfinite(values) & (values > -0.01))).tolist():
            yield int(e.step[parent]), f"{name} of a parent is {values[parent]:.6g}"


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


def rule_of_the_run(c: Columns, run: RunInfo | None, *, edited: bool) -> Finding:
    """Each step's rule is the one that the header names. `edited`: a debugger may have changed it on the way."""
    known = run is not None and run.is_ours and not edited
    bad = np.array([run is not None and visit.part.rule != run.rule for visit in c.visits], np.bool_)
    return check_each(
        "rule of verification",
        "every step was judged by the rule that the run names",
        bad,
        np.full(len(c), known),
        c.steps,
        lambda step: f"says {c.visits[step].part.rule}, the run {'' if run is None else run.rule}",
        note="" if known else "the run was edited" if edited else "another engine's rule is told step by step",
    )


RELATIVE = 1e-5  # of a probability: float32, and sums over a vocabulary of it
LEAST = 1e-6  # of any figure
WHOLE = 3e-5  # by which a sum of float32 over a vocabulary may miss 1: 5e-6 was seen with 49,152 tokens
HOPELESS = 0.05  # where rounding alone may move a probability by more, nothing is judged
BONUS, RECOVERED, TARGET = (KINDS.index(kind) for kind in (FinalKind.BONUS, FinalKind.RECOVERED, FinalKind.TARGET))


def exact_checks(columns: Columns, *, filler: int | None) -> list[Finding]:
    """All checks of steps by themselves. `filler`: EngineWays'."""
    return [
        accept_probability(columns),
        outcomes(columns),
        trial_order(columns),
        target_at_trial(columns),
        draft_at_trial(columns),
        residual_mass(columns),
        siblings(columns, filler),
        paths(columns),
        final_kinds(columns),
        final_tokens(columns),
        recomputed_coins(columns),
    ]


def check_each(
    name: str,
    about: str,
    bad: Bools,
    tested: Bools,
    unit: Unit,
    detail: Callable[[int], str],
    *,
    note: str = "",
) -> Finding:
    """A check over nodes, steps or parents, each right or wrong by itself; the first wrong one is shown."""
    count, wrong = int(tested.sum()), np.flatnonzero(bad & tested)
    if not count:
        return Finding(name, CheckResult.SKIPPED, about, note=note or "nothing to test", unit=unit.name)
    if not len(wrong):
        return Finding(name, CheckResult.PASSED, about, count, note=note, unit=unit.name)
    first = int(wrong[0])
    where, text = unit.where(first), detail(first)
    return Finding(name, CheckResult.FAILED, about, count, len(wrong), where, text, note, unit.name, wrong)


def accept_probability(c: Columns) -> Finding:
    """min(1, p / q) at the trial; under rules that look ahead, what is left of the path's ratio."""
    with np.errstate(divide="ignore", invalid="ignore"):
        expected = np.where(c.q_trial > 0, np.minimum(1.0, c.p_trial / c.q_trial), 0.0)
    ahead = c.by_rule.ahead[c.step]
    expected = np.where(ahead, c.by_rule.left, expected)
    bad = ~np.isclose(c.accept_prob, expected, rtol=RELATIVE, atol=LEAST)
    return check_each(
        "accept probability",
        "a = min(1, p / q), with p and q as tried; under block and traversal what is left of its path's ratio",
        bad,
        np.where(ahead, c.by_rule.judged, c.tried) & _unforced_ratios(c),
        c.nodes,
        lambda i: (
            f"a = {c.accept_prob[i]:.6g}, but the ratio of its path comes to {expected[i]:.6g}"
            if ahead[i]
            else f"a = {c.accept_prob[i]:.6g}, but p / q = {c.p_trial[i]:.6g} / {c.q_trial[i]:.6g}"
        ),
    )


def outcomes(c: Columns) -> Finding:
    """Accepted where the coin is below a."""
    near = np.abs(c.coin - c.accept_prob) < 1e-7  # rounding in another engine
    bad = (c.accepted != (c.coin < c.accept_prob)) & ~near
    return check_each(
        "outcomes",
        "accepted where coin < a, rejected elsewhere",
        bad,
        c.by_rule.judged & ~c.forced & (c.told & ~c.by_rule.match)[c.step] & c.has_coins,
        c.nodes,
        lambda i: f"{Outcome(c.outcome[i]).name.lower()} with coin {c.coin[i]:.6g} and a = {c.accept_prob[i]:.6g}",
        note="" if c.has_coins else "the capture has no coins",
    )


def trial_order(c: Columns) -> Finding:
    """Siblings are tried one after the other until one is accepted, below the root or an accepted node only."""
    reached = (c.above < 0) | np.where(c.by_rule.ahead[c.step], c.by_rule.open, c.accepted)[c.above]
    turn = (c.elder < 0) | c.rejected[c.elder]
    due = reached & turn
    if not len(c.token):
        due = np.zeros(0, np.bool_)
    return check_each(
        "trial order",
        "siblings are tried in draw order until one is accepted, and only below accepted nodes",
        due != c.tried,
        _unforced_ratios(c),
        c.nodes,
        lambda i: "was not tried when its turn came" if due[i] else "was tried out of turn",
    )


def target_at_trial(c: Columns) -> Finding:
    """p_1 = p; p_(i+1) = max(p_i - q_i, 0) / mass, or p_i without the token."""
    expected, error = residual_p(c)
    clear = error < HOPELESS
    clear &= c.named | (c.drawn != Drawn.WITH_REPLACEMENT)  # else whether it is the elder's own token is not known
    bad = np.abs(c.p_trial - expected) > error + LEAST + RELATIVE * expected
    return check_each(
        "p at later trials",
        "p as tried follows from p, and after a rejection from the renormalised residual",
        bad,
        c.tried & clear & _unforced_ratios(c),
        c.nodes,
        lambda i: f"p as tried is {c.p_trial[i]:.6g}, from p and the trials before it {expected[i]:.6g}",
    )


def residual_p(c: Columns) -> tuple[Doubles, Doubles]:
    """[N] each tried node's p in what its elder siblings left of p, from p itself; and how far rounding may move it."""
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
                scaled = c.by_rule.parent[elder] * p
                lower = np.where(c.sampled[elder] & ~c.by_rule.match[c.step[elder]], np.maximum(scaled - q, 0), scaled)
                p, slack = np.where(some, lower / mass, p), np.where(some, (slack + off + LEAST) / mass, slack)
            same = (c.token[elder] == c.token[mine]) & some & c.named[mine]
            p, slack = np.where(same, 0.0, p), np.where(same, LEAST, slack)
        expected[mine], error[mine] = p, slack
    return expected, np.nan_to_num(error, nan=1.0)


def draft_at_trial(c: Columns) -> Finding:
    """q at the trial follows from q as drawn: 1 for a point mass, renormalised where nothing was put back."""
    left = np.maximum(c.q_left, 1e-12)
    error = RELATIVE + WHOLE / left
    expected = np.where(c.sampled & ~c.by_rule.match[c.step], c.q / left, 1.0)
    bad = (np.abs(c.q_trial - expected) > error * expected + LEAST) | (c.q_trial <= 0) | (c.q_trial > 1 + 1e-4)
    return check_each(
        "q at trials",
        "q as tried is q over what earlier siblings left of it, and 1 where the draft is deterministic",
        bad,
        c.tried & (error < HOPELESS) & c.told[c.step],
        c.nodes,
        lambda i: f"q as tried is {c.q_trial[i]:.6g}, from q = {c.q[i]:.6g} and what was left it is {expected[i]:.6g}",
    )


def residual_mass(c: Columns) -> Finding:
    """Exactly 1 - p after a point mass; after a sampled node between what its token shows and 1 - p.

    Under rules that look ahead, 1 and p are scaled by what is left of the parent's ratio.
    """
    ratio = c.by_rule.parent
    mass, p, q = c.residual_mass, ratio * c.p_trial, c.q_trial
    slack = WHOLE
    by_q = c.sampled & ~c.by_rule.match[c.step]
    high = ratio - p + np.where(by_q, np.maximum(p - q, 0), 0)
    low = np.where(by_q, ratio - 1 + np.maximum(q - p, 0), high)
    bad = (mass > high + slack) | (mass < low - slack)
    return check_each(
        "residual mass",
        "what is left of p after a rejection has the mass that p and q allow",
        bad,
        c.rejected & _unforced_ratios(c),
        c.nodes,
        lambda i: (
            f"mass {mass[i]:.6g}, but p = {p[i]:.6g} and q = {q[i]:.6g} as tried allow {low[i]:.6g} to {high[i]:.6g}"
        ),
    )


def siblings(c: Columns, filler: int | None) -> Finding:
    """Distinct where nothing is put back; their p sum to at most 1.

    Filler of a greedy tree changes no output. A sampled one is drawn once for each node that holds it.
    """
    distinct = (c.drawn != Drawn.WITH_REPLACEMENT) & ~(c.holds(filler) & c.greedy[c.step])
    order = np.lexsort((c.token, c.row))
    row, token = c.row[order], c.token[order]
    again = np.zeros(len(order), np.bool_)
    again[order[1:]] = (row[1:] == row[:-1]) & (token[1:] == token[:-1]) & (token[1:] != NO_TOKEN)
    total = np.bincount(c.row[distinct], c.p[distinct], c.rows) if len(c.row) else np.zeros(c.rows)
    over = distinct & (total[c.row] > 1 + 1e-4) & ~again
    bad = (again & distinct) | over
    return check_each(
        "siblings",
        "siblings are distinct tokens, and the target's probabilities of them sum to at most 1",
        bad,
        c.told[c.step] & distinct,
        c.nodes,
        lambda i: f"token {c.token[i]} came twice" if again[i] else f"siblings' p sum to {total[c.row[i]]:.6g}",
    )


def paths(c: Columns) -> Finding:
    """The path is all accepted nodes, each the child of the one before."""
    bad = np.zeros(len(c), np.bool_)
    bad[c.step[c.on_path != c.accepted]] = True
    chained = c.on_path & ~((c.above < 0) | c.on_path[c.above]) if len(c.token) else c.on_path
    bad[c.step[chained]] = True
    return check_each(
        "paths",
        "the path holds every accepted node and no other",
        bad,
        c.told,
        c.steps,
        lambda s: f"path {c.verdicts[s].path.tolist()}, accepted {np.flatnonzero(c.verdicts[s].outcome == 1).tolist()}",
    )


def final_kinds(c: Columns) -> Finding:
    """Bonus at a leaf, recovered where all children were rejected, target where nothing was drafted."""
    expected = np.full(len(c), BONUS)
    expected[np.diff(c.start) == 0] = TARGET
    if len(c.token):
        expected[c.children_at(np.ones(len(c.token), np.bool_))[c.final_row]] = RECOVERED
    return check_each(
        "kind of final token",
        "bonus behind an accepted leaf, recovered behind a rejection, target where nothing was drafted",
        c.kind != expected,
        c.told,
        c.steps,
        lambda s: f"says {KINDS[c.kind[s]].value}, the verdict makes it {KINDS[expected[s]].value}",
    )


def final_tokens(c: Columns) -> Finding:
    """Drawn with a probability above 0; never a token that was rejected just before: the residual has none of it."""
    bad = ~((c.final_p > 0) & (c.final_p <= 1 + 1e-4))
    again = np.zeros(len(c), np.bool_)
    same = c.rejected & (c.row == c.final_row[c.step]) & (c.token == c.final[c.step]) & (c.residual_mass > LEAST)
    same &= c.named & ~c.forced  # a token that was rejected by force alone may have a share of the residual
    # Under rules that look ahead a node of ratio 1 may be rejected with all below it: its token has a share of it too
    same &= ~(c.by_rule.ahead[c.step] & c.sampled & (c.by_rule.parent * c.p_trial > c.q_trial))
    again[c.step[same]] = True
    return check_each(
        "final tokens",
        "the final token had a probability above 0, and was not rejected at the same place",
        bad | again,
        c.told & ~c.forced_final,
        c.steps,
        lambda s: (
            f"token {c.final[s]} was rejected at this place but was drawn as the final token"
            if again[s]
            else f"drawn with probability {c.final_p[s]:.6g}"
        ),
    )


def recomputed_coins(c: Columns) -> Finding:
    """Each coin, computed again from its key."""
    known: Indices = np.flatnonzero(c.known)
    count = np.diff(c.start)[known] + 1
    seeds = np.array([c.params[s].seed for s in known], np.uint64)
    expected = coins_at(seeds, Stream.VERIFY, c.position[known], count)
    ends = np.cumsum(count)
    is_final = np.zeros(len(expected), np.bool_)
    is_final[ends - count] = True
    final, of_node = expected[is_final], np.zeros(len(c.token))
    of_node[c.known[c.step]] = expected[~is_final]
    _share_coins(c, known, of_node, final)
    bad = np.zeros(len(c), np.bool_)
    bad[known] = c.final_coin[known] != final
    nodes = np.flatnonzero(c.known[c.step])
    bad[c.step[nodes[c.coin[nodes] != of_node[nodes]]]] = True
    by_hand = "a coin that was set by hand in the debugger also fails this check" if bad.any() else ""
    return check_each(
        "coins",
        "every coin follows from the request's seed, the stream and the root's position",
        bad,
        c.recomputed,
        c.steps,
        lambda s: f"not the coins of seed {c.params[s].seed} at position {c.position[s]}",
        note=by_hand if c.ours else "the coins are another engine's",
    )


def _share_coins(c: Columns, known: Indices, of_node: Doubles, final: Doubles) -> None:
    """Under match tried siblings share the first one's coin, and so does a token recovered after them. In place."""
    first = np.flatnonzero((c.sibling == 0) & c.by_rule.match[c.step])
    of_row = np.zeros(c.rows)
    of_row[c.row[first]] = of_node[first]
    shared = c.by_rule.match[c.step] & c.tried
    of_node[shared] = of_row[c.row[shared]]
    recovered = c.by_rule.match[known] & (c.kind[known] == RECOVERED)
    final[recovered] = of_row[c.final_row[known[recovered]]]


def _unforced_ratios(c: Columns) -> Bools:
    """[N] whether the node's step can be checked and, where its rule goes by ratios, nothing in it was forced."""
    forced = np.zeros(len(c), np.bool_)
    forced[c.step[c.forced]] = True
    return (c.told & ~(c.by_rule.ahead & forced))[c.step]
