"""Sizer: what a draft must be worth, from what a step costs on this machine and from what was accepted. No torch.

A step of B requests with R rows and D drafting passes takes step(R) + first + (D - 1) passes seconds (costs.py). At a
rate of L tokens a second, time is worth tokens: a tree of n nodes must bring L * (step(B (1 + n)) - step(B)) / B of
them (BESIDE times as many in a batch), a pass L * its seconds / S, where S requests share it, as many as lately did. So
a request drafts another level where it expects more tokens from it than the pass costs. Of all that the requests of a
batch found, those nodes are verified for which expected tokens less the price of all together are most (share_out). L
is what the engine makes at present, which makes this the choice of the most tokens per time (Dinkelbach 1967).

What a node brings is the probability that it is accepted: a curve over the drafter's own probability of its path,
fitted to what became of the nodes verified lately. All of it follows from the tokens and from the file of costs, never
from the clock, so that a run with the same seed and the same costs drafts the same trees again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specscope.speculate.sizing.acceptance import Lately
from specscope.speculate.sizing.budget import EDGES, MIDDLES, Budget, Curve, Doubles, found_by_level
from specscope.trace.costs import Costs
from specscope.trace.history.wording import plural
from specscope.trace.plan import DynamicPlan
from specscope.trace.record.tree import ROOT, DraftTree, Floats, Ints

# Chances of the first, second, ... draw at a node by the drafter's largest probability, before anything is known.
SIBLINGS = (0.15 + 0.8 * MIDDLES, 0.12 * (1 - MIDDLES), 0.06 * (1 - MIDDLES), 0.04 * (1 - MIDDLES))
DRAW_PRIOR = 0.75  # draws of each kind that were accepted so often, before anything is known
BIN_PRIOR = 1.5  # nodes of each kind that were accepted as often as the drafter said, before anything is known
KEPT = 0.05  # nodes that never fade: a kind that nothing is known of any more is tried again
KEEP = 0.995  # of the counts of nodes, at each tree that was verified
RATE_KEEP = 0.98  # of the tokens and costs that the engine's rate is made of, at each step
RATE_PRIOR = 8.0  # steps as good as plain ones, before anything is known
FIRST = np.array([0.45, 0.1, 0.05, 0.03])  # chances of the likeliest nodes of a first level, before anything is known
LIFT = 0.3  # tokens that a level brings for each that the one above it brings, before anything is known
LIFT_WEIGHT = 0.05  # of the newest search in what a level brings
SHARE_WEIGHT = 0.1  # of the newest step in how many requests share a pass
SHARE_BACK = 0.02  # of the way to all of them, for each step without such a pass: together it may pay again
# Times what the first pass costs that a request which does not draft must bring, and one that does: what just pays on
# average loses over many a stretch of steps. In a batch rows are most of the price: a little wrong in them is much.
ALONE, TOGETHER = (1.35, 1.2), (2.0, 2.0)
BESIDE = 1.35  # times its rows' time that a node in a batch must bring: texts are looked into, notes taken, paths kept
PROBE_EVERY = 24  # steps without drafts after which a request may try again
PROBE_SHARE = 0.01  # of the time, for such probes
# Steps for which a request that finds nothing is left alone before it is asked again. In larger batches it is up to
# half as many steps as there are requests: looking into all their texts takes a twentieth of a step.
MOST_PAUSE = 4
PRIOR_SEARCHES = 2  # of a request's own that what others brought counts for
EXPLORE_EVERY = 32  # searches after which a level that was never looked at is


@dataclass
class Kind:
    """What became of nodes of one kind. One decaying count for each bin of probabilities."""

    tries: Doubles = field(default_factory=lambda: np.full(len(MIDDLES), BIN_PRIOR))
    hits: Doubles = field(default_factory=lambda: BIN_PRIOR * MIDDLES)

    def add(self, scores: Floats | Doubles, accepted: NDArray[Any]) -> None:
        """Verified nodes by the logs of their probabilities, and which of them were accepted; -inf is left out."""
        hit = np.zeros(len(scores), np.bool_)
        hit[accepted] = True
        known = np.isfinite(scores)
        bins, accepted = np.searchsorted(EDGES, np.exp(scores[known])), hit[known]
        self.tries = KEEP * self.tries + np.bincount(bins, minlength=len(MIDDLES))
        self.hits = KEEP * self.hits + np.bincount(bins[accepted], minlength=len(MIDDLES))

    def curve(self) -> Curve:
        """As counted, but that it rises: neighbours that fall are set to the higher one's rate."""
        return Curve(np.maximum.accumulate((self.hits + KEPT * MIDDLES) / (self.tries + KEPT)))

    def curve_from(self, rates: Doubles) -> Curve:
        """As counted; `rates` where next to nothing is known."""
        return Curve((self.hits + KEPT * rates) / (self.tries + KEPT))


@dataclass
class Recent:
    """A request's own figures."""

    lift: float  # tokens beyond the price of their rows and of later passes that its searches found
    size: int  # of the batches that they were priced for: see size_of
    searches: int = PRIOR_SEARCHES  # of which that is the mean: of all at first, then of the last ones
    length: int = 0  # its tokens now
    fed: int = 0  # and when it last drafted: the drafter has seen no more
    idle: int = 0  # steps since it last drafted
    drafts: bool = True  # whether it was to draft when it was last asked for, and not only to try; so is a new one
    promising: bool = False  # whether it last found more than a pass costs, though on average it does not yet
    pause: int = 0  # steps at most that it is left alone for after its text was looked into and nothing paid
    until: int = 0  # of the sizer's steps: it is left alone before this one
    reason: str = ""  # why, for the evidence

    def look(self, budget: Budget, *, paid: bool, steps: int) -> None:
        """After step number `steps`, in which it was asked for: more seldom while nothing that is found is worth a row.

        Those that are left alone for equally long are asked for in the same steps, so that others cost next to nothing.
        """
        if budget.depth or paid or self.promising:
            self.pause = self.until = 0
        else:
            most = max(MOST_PAUSE, 2**self.size // 4)
            self.pause, self.reason = min(max(2 * self.pause, 1), most), budget.reason
            self.until = (steps // (self.pause + 1) + 1) * (self.pause + 1)


@dataclass
class Learned:
    """All that changes from step to step: a copy of it brings an engine back to an earlier step."""

    kinds: dict[bool, Kind] = field(default_factory=lambda: {True: Kind(), False: Kind()})  # by: is it greedy?
    draws: list[Kind] = field(
        default_factory=lambda: [Kind(np.full(len(MIDDLES), DRAW_PRIOR), DRAW_PRIOR * rates) for rates in SIBLINGS]
    )
    candidates: Lately = field(default_factory=Lately)
    recent: dict[str, Recent] = field(default_factory=dict)
    firsts: dict[int, float] = field(default_factory=dict)  # what a search brings, by the size of the batch
    lifts: list[float] = field(default_factory=list)  # by level
    shares: list[float] = field(default_factory=list)  # of a batch, that go down to each level where somebody does
    verifying: float = 1.0  # of a batch, that have a tree where somebody has one
    unseen: list[int] = field(default_factory=list)  # searches since each level was looked at
    unprobed: int = 0  # steps since a request last tried again
    tokens: float = RATE_PRIOR  # a request's, over the last steps
    costs: float = RATE_PRIOR  # of those steps, in plain steps of their batches
    steps: int = 0  # that it has learned from


@dataclass
class Prices:
    """What all requests of a step have in common."""

    of: Learned  # and of how many steps of it, and for how many requests
    steps: int
    batch: int
    rows: Doubles  # [nodes + 1] as in Budget
    together: Doubles  # [batch * nodes + 1]
    passes: Doubles  # [depth] that each pass must bring
    asked: Doubles  # [depth] the same as in Budget: 0 at a level that is looked at for once
    lifts: Doubles  # [depth]
    size: int  # size_of(batch)
    first: float  # what a search brings in such batches, beyond its rows and later passes
    least: Sequence[float]  # that it must bring of a request that does not draft, and of one that does
    seconds: float  # of a step without drafts
    alone: float  # what a request that tries again adds to one, in seconds
    text: str
    probing: str = ""  # the request that does in this step

    @cached_property
    def beforehand(self) -> list[float]:
        """As in Budget. Worked out where somebody drafts."""
        return self.of.candidates.chances()

    @cached_property
    def curves(self) -> dict[bool, Curve]:
        """By: is it greedy? The same."""
        return {greedy: kind.curve() for greedy, kind in self.of.kinds.items()}

    @cached_property
    def siblings(self) -> tuple[Curve, ...]:
        """As in Budget, of a sampled request. The same."""
        return tuple(kind.curve_from(rates) for kind, rates in zip(self.of.draws, SIBLINGS, strict=True))


@dataclass(frozen=True)
class BudgetOutcome:
    """What came of a request's budget in a step. Filled by the engine."""

    request: str
    greedy: bool
    budget: Budget | None  # None where it could not draft
    levels: Sequence[Sequence[float]]  # scores that were found, by level; empty where nothing was looked for
    tree: DraftTree
    scores: Floats  # [n] log probability of each node's path as the model has it; -inf: the model did not draft it
    path: Ints  # its accepted nodes
    tokens: int  # committed
    candidates: Sequence[tuple[int, bool]] = ()  # of two sources: kinds, and whether each was the token that came
    sure: Sequence[float] | None = None  # as in Draft


class Sizer:
    """Sets budgets for all requests of an engine."""

    def __init__(self, plan: DynamicPlan, costs: Costs, *, draws: bool = True) -> None:
        self.plan = plan  # the largest search
        self.costs = costs
        self.draws = draws  # whether sampled requests may have draws: not where the rule takes no notice of q
        self.learned = Learned(lifts=[LIFT] * plan.depth, shares=[1.0] * plan.depth, unseen=[0] * plan.depth)
        self._prices: Prices | None = None  # of the step that was asked for last
        self._asked: dict[str, tuple[Recent, Prices]] = {}  # in this step; kept of those that decode in it
        self._seconds: dict[int, Doubles] = {}  # of a step by its nodes; by batch
        self._first_trees: dict[int, float] = {}  # and what the first tree adds

    def choose(self, request: str, batch: int, *, greedy: bool, length: int = 0) -> Budget:
        """The budget of a request of so many tokens in a batch of that many, as if all of them chose alike.

        Nothing is learned from being asked: a scheduler also asks for requests that then find no place.
        """
        known, price = self.learned, self._prices
        found = known.recent.get(request)
        if found is not None and known.steps < found.until and size_of(batch) >= found.size - 1:
            return Budget.off(found.reason)
        if price is None or price.of is not known or (price.steps, price.batch) != (known.steps, batch):
            price = self._prices = self._priced(batch)
        recent = self._recent(found, price)
        recent.length = length
        self._asked[request] = recent, price
        depth, reason, probe = self._depth(request, recent, price)
        return Budget(
            *(depth, self.plan.max_nodes, price.rows, price.asked, price.lifts, price.curves[greedy], reason),
            *(price.together, price.beforehand, probe, price.siblings if self.draws and not greedy else ()),
        )

    def _recent(self, known: Recent | None, price: Prices) -> Recent:
        """A request's figures. Where the batch is of another size, rows have other prices: its lift moves as all do."""
        if known is None:
            return Recent(price.first, price.size)
        moved = 0.0 if known.size == price.size else price.first - self.learned.firsts[known.size]
        return replace(known, lift=known.lift + moved, size=price.size)

    def _priced(self, batch: int) -> Prices:
        """What rows and passes must bring in a batch of that many."""
        known, costs, plan = self.learned, self.costs, self.plan
        seconds = self._seconds_of(batch)
        worth = max(known.tokens / known.costs, 1.0) / seconds[0]  # tokens of each request a second
        together = batch * worth * (seconds - seconds[0]) * (1.0 if batch == 1 else BESIDE)
        rows = together[::batch] / batch
        rows[1:] += worth * self._first_trees[batch] * (1 / max(known.verifying, 1 / batch) - 1)
        later = worth * costs.pass_seconds(batch * plan.top)
        passes = np.array([worth * costs.first_seconds(batch), *[later] * (plan.depth - 1)])
        passes /= np.maximum(known.shares, 1 / batch)  # whoever draft share what a pass takes
        some = min(4, plan.max_nodes)
        text = f"a pass must bring {passes[0]:.2f} tokens and {plural(some, 'node')} {rows[some]:.2f}"
        asked = passes.copy()
        for level, count in enumerate(known.unseen):
            if count >= EXPLORE_EVERY and level:
                asked[level] = 0.0  # looked at for once, at any price
                break
        size = size_of(batch)
        first = known.firsts.get(size)
        if first is None:
            worths = np.cumsum(FIRST)[:some] - rows[1 : some + 1]
            first = float(worths.max()) + self._deeper(float(FIRST[:some].sum()), passes)
        return Prices(
            of=known,
            steps=known.steps,
            batch=batch,
            rows=rows,
            together=together,
            passes=passes,
            asked=asked,
            lifts=np.array(known.lifts),
            size=size,
            first=first,
            least=[float(times * passes[0]) for times in (ALONE if batch == 1 else TOGETHER)],
            seconds=float(seconds[0]),
            alone=costs.first_seconds(1) + float(seconds[some] - seconds[0]),
            text=text,
        )

    def _seconds_of(self, batch: int) -> Doubles:
        """[batch * nodes + 1] what its steps take without drafting, by nodes in all. Worked out once."""
        if batch not in self._seconds:
            sizes = range(batch, batch * (1 + self.plan.max_nodes) + 1)
            self._seconds[batch] = np.array([self.costs.step_seconds(size, batch) for size in sizes])
            self._first_trees[batch] = self.costs.first_tree_seconds(batch)
        return self._seconds[batch]

    def _depth(self, request: str, recent: Recent, price: Prices) -> tuple[int, str, bool]:
        """How deep a search may go, why, and whether it is a probe."""
        if recent.lift > price.least[recent.drafts]:
            return self.plan.depth, f"{price.text}; lately they brought {recent.lift:.2f}", False
        if price.probing in ("", request) and (recent.promising or self._may_probe(recent, price)):
            price.probing = request  # one at a time
            return 1, f"a probe after {plural(recent.idle, 'step')} without drafts", True
        return 0, f"no draft pays: {price.text}; it would bring {recent.lift:.2f}", False

    def _may_probe(self, recent: Recent, price: Prices) -> bool:
        """So seldom that it takes PROBE_SHARE of the time: a pass of its own, a few rows, and in the drafter all tokens
        that it has not seen.
        """
        if recent.idle < PROBE_EVERY:
            return False
        unseen = max(recent.length - recent.fed, recent.idle)
        seconds = price.alone + self.costs.pass_seconds(unseen)
        return self.learned.unprobed * PROBE_SHARE * price.seconds >= seconds

    def learn(self, outcomes: Sequence[BudgetOutcome]) -> None:
        """What became of a step's budgets. `outcomes`: of all requests that decoded in it."""
        if not outcomes:
            return
        for one in outcomes:
            if one.budget is not None:
                self._learn_one(one, one.budget)
        self._asked.clear()
        probed = any(one.budget is not None and one.budget.probe for one in outcomes)
        self.learned.unprobed = 0 if probed else self.learned.unprobed + 1
        self.learned.candidates.learn([candidate for one in outcomes for candidate in one.candidates])
        self._learn_shares(outcomes)
        self._learn_rate(outcomes)
        self.learned.steps += 1

    def _learn_one(self, one: BudgetOutcome, budget: Budget) -> None:
        known = self.learned
        if budget.is_off:
            known.recent[one.request].idle += 1
            return
        recent, price = self._asked[one.request]
        known.recent[one.request] = recent
        known.firsts.setdefault(price.size, price.first)
        recent.look(budget, paid=len(one.tree) > 0, steps=known.steps)
        recent.drafts = budget.depth > 0 and not budget.probe
        if not one.levels:
            recent.idle += 1
            return
        recent.idle, recent.fed = 0, recent.length
        if one.sure is not None:
            self._learn_draws(one.tree, one.sure, one.path)
        elif len(one.tree):
            known.kinds[one.greedy].add(one.scores, one.path)
        values, above = found_by_level(one.levels, budget, self.plan.top, drawn=one.sure is not None)
        brought = values[-1] - float(price.passes[1 : len(values)].sum())
        if budget.probe:  # it may look at one level only
            brought += self._deeper(above[0], price.passes)
        known.firsts[recent.size] += LIFT_WEIGHT * (brought - known.firsts[recent.size])
        recent.searches += 1
        recent.lift += max(LIFT_WEIGHT, 1 / recent.searches) * (brought - recent.lift)
        recent.promising = bool(brought > price.least[False] >= recent.lift)
        deeper = np.diff(values) / np.maximum(above[:-1], 1e-6)
        for level, lift in enumerate(deeper, 1):
            known.lifts[level] += LIFT_WEIGHT * (lift - known.lifts[level])
        for level in range(0 if budget.probe else len(known.unseen)):
            known.unseen[level] = 0 if level < len(one.levels) else known.unseen[level] + 1

    def _deeper(self, above: float, passes: Doubles) -> float:
        """What a second level is expected to bring beyond its pass, where the first one expects `above` tokens."""
        return max(self.learned.lifts[1] * above - float(passes[1]), 0.0) if len(passes) > 1 else 0.0

    def _learn_draws(self, tree: DraftTree, sure: Sequence[float], path: Ints) -> None:
        """Of each node that was reached, which of its draws was accepted, if any."""
        accepted = {ROOT, *path.tolist()}
        order: Counter[int] = Counter()
        reached: list[list[int]] = [[] for _ in self.learned.draws]
        for node, parent in enumerate(tree.parent.tolist()):
            if parent in accepted:
                reached[order[parent]].append(node)
                order[parent] += 1
        for kind, nodes in zip(self.learned.draws, reached, strict=True):
            if nodes:
                hits = np.flatnonzero([node in accepted for node in nodes])
                kind.add(np.log([sure[node] for node in nodes]), hits)

    def _learn_shares(self, outcomes: Sequence[BudgetOutcome]) -> None:
        """Of the batch, how many went down to each level and had trees. Probes go alone, and say nothing of levels."""
        known = self.learned
        looked = [len(one.levels) for one in outcomes if one.budget is not None and not one.budget.probe]
        for level, share in enumerate(known.shares):
            known.shares[level] = _shared(share, sum(levels > level for levels in looked) / len(outcomes))
        known.verifying = _shared(known.verifying, sum(len(one.tree) > 0 for one in outcomes) / len(outcomes))

    def _learn_rate(self, outcomes: Sequence[BudgetOutcome]) -> None:
        """Tokens a request of this step, and what it cost by the file, in plain steps."""
        batch = len(outcomes)
        takes, nodes = self._seconds_of(batch), sum(len(one.tree) for one in outcomes)
        looked = [len(one.levels) for one in outcomes if one.levels]
        plain, seconds = float(takes[0]), float(takes[nodes])
        if looked:
            seconds += self.costs.first_seconds(len(looked))
            for level in range(1, max(looked)):
                seconds += self.costs.pass_seconds(self.plan.top * sum(levels > level for levels in looked))
        known = self.learned
        known.tokens = RATE_KEEP * known.tokens + sum(one.tokens for one in outcomes) / batch
        known.costs = RATE_KEEP * known.costs + seconds / plain

    def forget(self, request: str) -> None:
        """A request ended."""
        self.learned.recent.pop(request, None)


def size_of(batch: int) -> int:
    """Batches of like size: 1, 2 to 3, 4 to 7, and so on."""
    return batch.bit_length()


def _shared(before: float, now: float) -> float:
    """How many of a batch share something, by the last steps in which somebody had it."""
    return before + (SHARE_WEIGHT * (now - before) if now else SHARE_BACK * (1 - before))
