"""Every step by itself: the verdict's arithmetic done again by its rule, the rounding of float32 carried along."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from specscope.analyze.evidence.arrays import Indices, lengths, previous
from specscope.analyze.evidence.columns import BONUS, KINDS, RECOVERED, TARGET, WHOLE, Columns
from specscope.analyze.findings import CheckResult, Finding, Reference
from specscope.plans.plan import StaticPlan, read_plan
from specscope.trace.history.wording import plural
from specscope.trace.record.coins import Stream, coins_at, draw_number
from specscope.trace.record.own_rule import Siblings
from specscope.trace.record.records import Outcome, RequestStep, RunInfo
from specscope.trace.record.tree import ROOT, Bools, Doubles, Drawn

MOSTLY = 0.8  # of the steps looked at: a key that fits fewer is none
BEFORE = "those of the request's previous step"
Key = tuple[NDArray[np.uint64], Stream, Indices]  # what coins follow from: of each step its seed and position


def own_key(c: Columns, stream: Stream) -> Key:
    return np.array([params.seed for params in c.params], np.uint64), stream, c.position


def coins_of(key: Key, step: Indices, number: Indices) -> Doubles:
    seed, stream, position = key
    steps, at = np.unique(step, return_inverse=True)
    counts = np.zeros(len(steps), np.int64)
    np.maximum.at(counts, at, number + 1)
    every = coins_at(seed[steps], stream, position[steps], counts)
    return np.asarray(every[(np.cumsum(counts) - counts)[at] + number])


def draw_numbers(c: Columns) -> Indices:
    """[N] the number of each node's draw, as our drafters count them; below 0 where it is none of the plan's."""
    plan = None if c.run is None else read_plan(c.run.tree)
    if plan is None:
        return np.full(len(c.token), -1, np.int64)
    if not isinstance(plan, StaticPlan):
        return draw_number(c.parent, c.sibling)
    none, width = ROOT - 1, int(c.sibling.max(initial=0)) + 1
    children = np.full((len(plan.shape) + 2, width), none, np.int64)  # of the root, of each node, and of `none`
    for node in range(ROOT, len(plan.shape)):
        some = plan.shape.children(node)[:width]
        children[node - ROOT, : len(some)] = some
    number = np.full(c.rows, ROOT)
    for depth in range(1, int(c.depth.max(initial=0)) + 1):
        nodes = np.flatnonzero(c.depth == depth)
        number[c.own_row[nodes]] = children[number[c.row[nodes]] - ROOT, c.sibling[nodes]]
    return number[c.own_row]


@dataclass(frozen=True)
class CoinsOf:
    """The coins of verdicts, or those that drew drafts: of each its step, its number and itself."""

    c: Columns
    stream: Stream
    step: Indices
    number: Indices
    value: Doubles

    @staticmethod
    def verdicts(c: Columns) -> CoinsOf:
        """The final token's coin, then the nodes'; under match siblings and a recovered token share the first one's."""
        first, eldest = np.zeros(c.rows, np.int64), np.flatnonzero(c.sibling == 0)
        first[c.row[eldest]] = c.node[eldest] + 1
        nodes = np.where(c.match[c.step] & c.tried, first[c.row], c.node + 1)
        finals = np.where(c.match & (c.kind == RECOVERED), first[c.final_row], 0)
        step = np.concatenate([np.arange(len(c)), c.step])
        return CoinsOf(c, Stream.VERIFY, step, np.concatenate([finals, nodes]), np.concatenate([c.final_coin, c.coin]))

    @staticmethod
    def drafts(c: Columns) -> CoinsOf:
        number = draw_numbers(c)
        nodes = np.flatnonzero(c.drawn_by_coin & (number >= 0))
        return CoinsOf(c, Stream.DRAFT, c.step[nodes], number[nodes], c.draft_coin[nodes])

    @property
    def right(self) -> Key:
        return own_key(self.c, self.stream)

    def keys(self) -> Mapping[str, Key]:
        """Other keys, by what coins of them are in words."""
        c, (seed, stream, position) = self.c, self.right
        row = np.array([visit.row for visit in c.visits], np.int64)
        index = np.array([visit.part.index for visit in c.visits], np.int64)
        rows, before = row.astype(np.uint64), np.where(c.before >= 0, c.before, np.arange(len(c)))
        other, theirs = Stream.DRAFT, "those that drew the drafts"
        if stream is Stream.DRAFT:
            other, theirs = Stream.VERIFY, "those of the verdict on them"
        return {
            BEFORE: (seed, stream, position[before]),
            "those of its position plus its row": (seed, stream, position + row),
            "those of the engine's step": (seed, stream, c.batch),
            "those of the request's step": (seed, stream, index),
            "those of the seed at another place": (seed, stream, np.zeros_like(position)),
            "those with its row in the batch as seed": (rows, stream, position),
            "those of its seed plus its row": (seed + rows, stream, position),
            "those of seed 0": (np.zeros_like(seed), stream, position),
            "those of the first request's seed": (np.full_like(seed, seed[0]), stream, position),
            theirs: (seed, other, position),
        }

    def same(self, steps: Indices, key: Key) -> Doubles:
        """[steps], which rise: the share of each one's coins that are those of a key; 1 where it has none."""
        mine = np.isin(self.step, steps)
        step = self.step[mine]
        at, fits = np.searchsorted(steps, step), coins_of(key, step, self.number[mine]) == self.value[mine]
        total = np.bincount(at, minlength=len(steps))
        return np.where(total > 0, np.bincount(at, fits, len(steps)) / np.maximum(total, 1), 1.0)

    def moved(self, steps: Indices) -> int:
        """At how many of these steps, which rise, the coins are those that they should be, in another order."""
        mine = np.isin(self.step, steps)
        step, value = self.step[mine], self.value[mine]
        right = coins_of(self.right, step, self.number[mine])
        others = value[np.lexsort((value, step))] != right[np.lexsort((right, step))]
        at = np.searchsorted(steps, np.sort(step))
        return int((np.bincount(at, others, len(steps)) == 0).sum())

    def key_of(self, steps: Indices) -> tuple[str, int]:
        """The key that nearly all of these steps' coins follow from, and at how many they do; "" for none."""
        for name, key in self.keys().items() if len(steps) else ():
            fits = int((self.same(steps, key) == 1).sum())
            if fits > MOSTLY * len(steps):
                return name, fits
        return "", 0


WHERE = {"step": Columns.at_step, "parent": Columns.at_parent}
RELATIVE = 1e-5  # of a probability: float32, and sums over a vocabulary of it
LEAST = 1e-6  # of any figure
HOPELESS = 0.05  # where rounding alone may move a probability by more, nothing is judged
NO_COINS = "the capture has no coins"
UNASKED = "the rule needs token ids and the target's entropies, which this capture does not hold"


@dataclass(frozen=True)
class Check:
    """A check before it is made: its name, what holds where it passes, and what it looks at."""

    c: Columns
    name: str
    about: str
    unit: str = "node"

    def of(
        self,
        bad: Bools,
        tested: Bools,
        detail: Callable[[int], str],
        note: str = "",
        where: Callable[[int], Reference] | None = None,
        z: float | None = None,
    ) -> Finding:
        """What it finds: which are wrong, of those that it tests. The first that is wrong is shown. `detail`: one of
        them in words; `where`: of what is no node, step or parent; `z`: of a figure over all of them that decided.
        """
        count, wrong = int(tested.sum()), np.flatnonzero(bad & tested)
        fine = Finding(self.name, CheckResult.PASSED, self.about, count, note=note, unit=self.unit)
        if not count:
            return replace(fine, result=CheckResult.SKIPPED, note=note or "nothing to test")
        if not len(wrong):
            return fine
        first, where = int(wrong[0]), where or partial(WHERE.get(self.unit, Columns.at_node), self.c)
        fine = replace(fine, result=CheckResult.FAILED, failed=len(wrong), wrong=wrong, statistic=z)
        p_value = None if z is None else math.erfc(z / math.sqrt(2))
        return replace(fine, example=where(first), detail=detail(first), p_value=p_value)


# A value of the right type that no probability can have is itself evidence of a fault. Nothing can be computed from it,
# so the other checks leave its step out.


def recorded(c: Columns) -> Iterator[Finding]:
    check, run, every = partial(Check, c, unit="step"), c.run, np.ones(len(c), np.bool_)
    planned = c.ours and plan_of(run) is not None
    details = {int(step): text for step, text in (*_wrong(c), *(_nothing_drafted(c) if planned else ()))}
    bad = np.isin(np.arange(len(c)), list(details))
    yield check("probabilities", "every p, q, coin and entropy is a number in its range").of(
        bad, every, details.__getitem__
    )
    edited = c.history is not None and len(c.history.branches) > 1  # a debugger may have changed it on the way
    known = run is not None and run.is_ours and not edited
    rule = "" if run is None else run.rule
    yield check("rule of verification", "every step was judged by the rule that the run names").of(
        np.array([part.rule != rule for part in c.parts], np.bool_),
        every & known,
        lambda step: f"says {c.parts[step].rule}, the run {rule}",
        "" if known else "the run was edited" if edited else "another engine's rule is recorded per step",
    )


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
            yield int(step[place]), f"{name.format(*c.node[place : place + 1])} is {text}"


def _nothing_drafted(c: Columns) -> Iterator[tuple[int, str]]:
    """Steps in which a model was fed nodes of its tree and gave no token behind them, though every token may come."""
    for step in np.flatnonzero(lengths(c.picked, "notes", "rows") > 1).tolist():
        part, free = c.parts[step], c.known[step] and not c.params[step].limited
        if free and not part.sizing and not part.is_ranked_with_text and (rows := childless(part)):
            yield step, f"{plural(rows, 'node')} fed to the drafter gave no token: its logits are not numbers"


def with_children(part: RequestStep) -> set[int]:
    """The nodes of a drafted tree with children, of which some may have been dropped."""
    dropped = [] if part.notes is None else part.notes.dropped_parent.tolist()
    return {*part.tree.parent.tolist(), *dropped} - {ROOT}


def childless(part: RequestStep) -> int:
    """How many nodes a drafter's later passes fed that have no children."""
    rows = part.told("notes", "rows")
    return 0 if rows is None else max(int(rows[1:].sum()) - len(with_children(part)), 0)


def trials(c: Columns) -> Iterator[Finding]:
    """Each node: its ratio, its coin, its turn."""
    check, step, ahead, free = partial(Check, c), c.step, c.ahead[c.step], _unforced_ratios(c)
    expected = np.where(c.q_trial > 0, np.minimum(1.0, c.p_trial / c.q_trial), 0.0)
    expected, own = np.where(ahead, c.own_ratio, expected), c.by_own_rule[step]
    can_ask = _asked(c, own & c.tried & free, expected)
    about = "a = min(1, p / q), with p and q as tried; under block and traversal the remaining ratio of its path"

    def differs(i: int) -> str:
        due = f"p / q = {c.p_trial[i]:.6g} / {c.q_trial[i]:.6g}"
        if own[i] and c.own_rule is not None:
            due = f"--rule {c.own_rule.name} gives {expected[i]:.6g}"
        return f"a = {c.accept_prob[i]:.6g}, but {f'the ratio of its path is {expected[i]:.6g}' if ahead[i] else due}"

    yield check("accept probability", about if not own.any() else "a is what the rule gives for p and q as tried").of(
        ~np.isclose(c.accept_prob, expected, rtol=RELATIVE, atol=LEAST),
        np.where(ahead, c.by_own_coin, c.tried) & free & (~own | can_ask),
        differs,
        "" if not own.any() or can_ask.any() else UNASKED if c.own_rule is not None else "the rule was not named",
    )
    near = np.abs(c.coin - c.accept_prob) < 1e-7  # rounding in another engine
    yield check("outcomes", "accepted if coin < a, else rejected").of(
        (c.accepted != (c.coin < c.accept_prob)) & ~near,
        c.by_own_coin & ~c.forced & (c.told & ~c.match)[step] & c.has_coins,
        lambda i: f"{Outcome(c.outcome[i]).name.lower()} with coin {c.coin[i]:.6g} and a = {c.accept_prob[i]:.6g}",
        "" if c.has_coins else NO_COINS,
    )
    due = (c.above < 0) | np.where(ahead, c.open, c.accepted)[c.above]
    due &= (c.elder < 0) | c.rejected[c.elder]
    about = "siblings are tried in draw order until one is accepted, and only below accepted nodes"
    words = "was not tried when its turn came", "was tried out of turn"
    yield check("trial order", about).of(due != c.tried, free, lambda i: words[not due[i]])


def _asked(c: Columns, nodes: Bools, gives: Doubles) -> Bools:
    """[N] which nodes somebody's own rule can be asked about; `gives` is set to what it gives. Raises UserError."""
    parent, can = c.parents.at_node, np.zeros(len(nodes), np.bool_)
    if c.own_rule is None:
        return can
    can = nodes & c.named & (parent >= 0) & c.parents.there[c.step]
    siblings = dict[int, Siblings]()
    for i in np.flatnonzero(can).tolist():
        figures = float(c.parents.entropy[parent[i]]), float(c.parents.choice_p[parent[i]])
        asked = siblings.setdefault(int(c.row[i]), Siblings(c.own_rule, int(c.depth[i]), *figures))
        gives[i] = asked.accept(int(c.token[i]), float(c.p_trial[i]), float(c.q_trial[i]), float(c.coin[i]))
    return can


def residuals(c: Columns) -> Iterator[Finding]:
    """Each node: what trials before it left of p and q, and what its own left."""
    check, free, by_q = partial(Check, c), _unforced_ratios(c), c.sampled & ~c.match[c.step]
    p, error = residual_p(c)
    clear = error < HOPELESS
    clear &= c.named | (c.drawn != Drawn.WITH_REPLACEMENT)  # else whether it is the elder's own token is not known
    about = "p as tried follows from p, and after a rejection from the renormalised residual"
    yield check("p at later trials", about).of(
        np.abs(c.p_trial - p) > error + LEAST + RELATIVE * p,
        c.tried & clear & free,
        lambda i: f"p as tried is {c.p_trial[i]:.6g}, but p and the earlier trials give {p[i]:.6g}",
    )
    left = np.maximum(c.q_left, 1e-12)
    slack, q = RELATIVE + WHOLE / left, np.where(by_q, c.q / left, 1.0)
    about = "q as tried is q over what earlier siblings left of it, and 1 for deterministic drafts"
    yield check("q at trials", about).of(
        (np.abs(c.q_trial - q) > slack * q + LEAST) | (c.q_trial <= 0) | (c.q_trial > 1 + WHOLE),
        c.tried & (slack < HOPELESS) & c.told[c.step],
        lambda i: f"q as tried is {c.q_trial[i]:.6g}, but q = {c.q[i]:.6g} and what was left give {q[i]:.6g}",
    )
    # Exactly 1 - p after a point mass; after a sampled node between what its token shows and 1 - p. Under rules that
    # look ahead, 1 and p are scaled by what is left of the parent's ratio
    ratio, mass, q_trial = c.parent_ratio, c.residual_mass, c.q_trial
    scaled = ratio * c.p_trial
    high = ratio - scaled + np.where(by_q, np.maximum(scaled - q_trial, 0), 0)
    low = np.where(by_q, ratio - 1 + np.maximum(q_trial - scaled, 0), high)
    yield check("residual mass", "the residual after a rejection has the mass that p and q allow").of(
        (mass > high + WHOLE) | (mass < low - WHOLE),
        c.rejected & free,
        lambda i: (
            f"mass {mass[i]:.6g}, but p = {scaled[i]:.6g} and q = {q_trial[i]:.6g} as tried allow "
            f"{low[i]:.6g} to {high[i]:.6g}"
        ),
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
            sampled, some = c.sampled[elder], mass > 0
            with np.errstate(divide="ignore", invalid="ignore"):
                q = np.where(sampled, c.q[mine] / left, 0.0)
                off = q * (RELATIVE + WHOLE / left)
                scaled = c.parent_ratio[elder] * p
                lower = np.where(sampled & ~c.match[c.step[elder]], np.maximum(scaled - q, 0), scaled)
                p, slack = np.where(some, lower / mass, p), np.where(some, (slack + off + LEAST) / mass, slack)
            same = (c.token[elder] == c.token[mine]) & some & c.named[mine] & ~(sampled & c.by_own_rule[c.step[elder]])
            p, slack = np.where(same, 0.0, p), np.where(same, LEAST, slack)
        expected[mine], error[mine] = p, slack
    return expected, np.nan_to_num(error, nan=1.0)


def outcome_of_steps(c: Columns) -> Iterator[Finding]:
    """Each step: its siblings, its path, its final token and its coins."""
    check, of_steps = partial(Check, c), partial(Check, c, unit="step")
    # Filler of a greedy tree changes no output. A sampled one is drawn once for each node that holds it
    distinct = (c.drawn != Drawn.WITH_REPLACEMENT) & ~(c.filler & c.greedy[c.step])
    least, most = int(c.token.min(initial=0)), int(c.token.max(initial=0))
    again = (previous(c.row * (most - least + 1) + c.token - least) >= 0) & c.named
    total = np.bincount(c.row[distinct], c.p[distinct], c.rows)
    about = "siblings are distinct tokens, and the target's probabilities of them sum to at most 1"
    yield check("siblings", about).of(
        again | (total[c.row] > 1 + WHOLE),
        c.told[c.step] & distinct,
        lambda i: f"token {c.token[i]} came twice" if again[i] else f"siblings' p sum to {total[c.row[i]]:.6g}",
    )
    chained = (c.above < 0) | c.on_path[c.above]
    yield of_steps("paths", "the path holds exactly the accepted nodes").of(
        c.any_in_step((c.on_path != c.accepted) | (c.on_path & ~chained)),
        c.told,
        lambda s: f"path {c.verdicts[s].path.tolist()}, accepted {np.flatnonzero(c.verdicts[s].outcome == 1).tolist()}",
    )
    drafted = c.children_at(np.ones(len(c.token), np.bool_))[c.final_row]
    kind = np.where(np.diff(c.start) == 0, TARGET, np.where(drafted, RECOVERED, BONUS))
    about = "bonus after an accepted leaf, recovered after a rejection, target if nothing was drafted"
    yield of_steps("kind of final token", about).of(
        c.kind != kind, c.told, lambda s: f"says {KINDS[c.kind[s]].value}, the verdict makes it {KINDS[kind[s]].value}"
    )
    # The residual has none of a token that was rejected just before
    same = c.rejected & (c.row == c.final_row[c.step]) & (c.token == c.final[c.step]) & (c.residual_mass > LEAST)
    same &= c.named & ~c.forced  # a token that was rejected by force alone may have a share of the residual
    # Rules that look ahead may reject a node of ratio 1 with all below it, and somebody's own may reject any node:
    # its token has a share of it too
    same &= ~((c.ahead | c.by_own_rule)[c.step] & c.sampled & (c.parent_ratio * c.p_trial > c.q_trial))
    came = c.any_in_step(same)
    about = "the final token had a probability above 0, and was not rejected at the same place"
    twice = "token {} was rejected at this place but was drawn as the final token"
    yield of_steps("final tokens", about).of(
        ~((c.final_p > 0) & (c.final_p <= 1 + WHOLE)) | came,
        c.told & ~c.forced_final,
        lambda s: twice.format(c.final[s]) if came[s] else f"drawn with probability {c.final_p[s]:.6g}",
    )
    coins, bad = CoinsOf.verdicts(c), np.zeros(len(c), np.bool_)
    bad[coins.step[coins_of(coins.right, coins.step, coins.number) != coins.value]] = True
    by_hand = "a coin set by hand in the debugger also fails this check" if (bad & c.known).any() else ""
    yield of_steps("coins", "every coin follows from the request's seed, the stream and the root's position").of(
        bad,
        c.recomputed,
        lambda s: f"not the coins of seed {c.params[s].seed} at position {c.position[s]}",
        by_hand if c.ours else "the coins come from another engine",
    )


def _unforced_ratios(c: Columns) -> Bools:
    """[N] whether the node's step can be checked and, where its rule goes by ratios, nothing in it was forced."""
    return (c.told & ~(c.ahead & c.any_in_step(c.forced)))[c.step]


def undrawn(c: Columns) -> str:
    """Why no draft has a coin; "" where one has."""
    untold = "the coins that drew drafts are not recorded"
    return "" if c.drawn_by_coin.any() else untold if c.sampled.any() else "no draft was sampled"
