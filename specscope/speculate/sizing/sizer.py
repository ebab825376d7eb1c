"""Sizer: how much a request drafts in a step. No torch.

The rule. A node is expected to bring as many tokens as it is likely to be accepted: the drafter's own probability of
its path, calibrated by one curve of what was accepted lately (acceptance.py). A step takes what the file of costs says:
rows, a first drafting pass, later ones. At the rate at which the engine makes tokens at present that time is worth
tokens, too; and a node is verified, another level drafted, and anything drafted at all, where more tokens are expected
than the time is worth, for all requests of a batch together. That is the choice of the most tokens per time (Dinkelbach
1967). A request begins to draft where its searches lately brought MARGIN squared times what a first pass is worth, and
stops below MARGIN times (hysteresis). While it does not draft it is tried again so seldom that this takes PROBE_SHARE
of the time.

All of it follows from the tokens and from the costs, never from the clock, so that a run with the same seed and the
same costs drafts the same trees again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from specscope.speculate.sizing.acceptance import MEMORY, MIDDLES, PRIOR_NODES, Curve, Doubles, Kind, Lately
from specscope.speculate.sizing.budget import Budget, found_by_level
from specscope.trace.costs import Costs
from specscope.trace.history.wording import plural, unpaid
from specscope.trace.plan import DynamicPlan
from specscope.trace.record.tree import ROOT, DraftTree, Floats, Ints

# The constants of the rule, beside those of what is counted (acceptance.py).
LIFT = 0.3  # tokens that a level brings for each one above it, before anything is known: the default head's
# Times what its first pass costs that a request must bring which drafts, and this squared one that does not: what
# just pays on average loses over many a stretch of steps.
MARGIN = 1.2
PROBE_SHARE = 0.01  # of the time, for trying again: half of what drafting may lose where it never pays
MOST_PAUSE = 4  # steps that a text in which nothing was found is left alone: looking takes a twentieth of a step
# Of what the drafter's likeliest token leaves, a second draw's share: the first has as much besides that token's, and
# each further one has its part of it.
DRAW = 0.15
DRAWS = (MIDDLES + DRAW * (1 - MIDDLES), *(DRAW / k * (1 - MIDDLES) for k in (1, 2, 3)))


@dataclass
class Recent:
    """A request's own figures."""

    gain: float  # tokens that its searches brought lately, beyond the price of their rows and of later passes
    size: int  # of the batches that they were priced for: see size_of
    searches: float = PRIOR_NODES  # that this is the mean of
    drafts: bool = True  # whether it was to draft when it was last asked for, and not only to try; so is a new one
    length: int = 0  # its tokens now
    fed: int = 0  # and when it last drafted: the drafter has seen no more
    idle: int = 0  # steps since it last drafted
    pause: int = 0  # steps at most that it is left alone for after its text was looked into and nothing paid
    until: int = 0  # of the sizer's steps: it is left alone before this one
    reason: str = ""  # why, for the evidence

    def look(self, budget: Budget, *, paid: bool, steps: int) -> None:
        """After step number `steps`, in which it was asked for: more seldom while nothing that is found is worth a row.

        Those that are left alone for equally long are asked for in the same steps, so that others cost next to nothing.
        In larger batches that is up to half as many steps as there are requests.
        """
        if budget.depth or paid:
            self.pause = self.until = 0
        else:
            longest = max(MOST_PAUSE, 2**self.size // 4)
            self.pause, self.reason = min(max(2 * self.pause, 1), longest), budget.reason
            self.until = (steps // (self.pause + 1) + 1) * (self.pause + 1)

    def learn(self, brought: float) -> None:
        """Take in what a search brought. After steps without drafts the mean is of other text: it weighs as a prior."""
        self.searches = min(PRIOR_NODES if self.idle else self.searches, MEMORY) + 1
        self.gain += (brought - self.gain) / self.searches
        self.idle, self.fed = 0, self.length


@dataclass
class Learned:
    """All that changes from step to step: a copy of it brings an engine back to an earlier step."""

    kinds: dict[bool, Kind] = field(default_factory=lambda: {True: Kind(), False: Kind()})  # by: is it greedy?
    draws: list[Kind] = field(default_factory=lambda: [Kind(expected) for expected in DRAWS])
    candidates: Lately = field(default_factory=Lately)
    recent: dict[str, Recent] = field(default_factory=dict)
    gains: dict[int, float] = field(default_factory=dict)  # of all requests' searches, by the size of the batch
    lifts: list[float] = field(default_factory=list)  # by level
    unseen: list[int] = field(default_factory=list)  # searches since each level was looked at
    shares: list[float] = field(default_factory=list)  # of a batch, that go down to each level where somebody does
    unprobed: int = 0  # steps since a request last tried again
    tokens: float = MEMORY  # a request's, over the last steps: as if they had been plain ones
    costs: float = MEMORY  # of those steps, in plain steps of their batches
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
    asked: Doubles  # [depth] as in Budget: 0 at a level that was not looked at for long, so that it is once
    lifts: Doubles  # [depth]
    gain: float  # what a search brings in such batches, beyond its rows and later passes
    text: str
    probing: str  # the request that may try again in this step, if there is one

    @cached_property
    def beforehand(self) -> list[float]:
        """As in Budget. Worked out where somebody drafts."""
        return self.of.candidates.chances()

    @cached_property
    def curves(self) -> dict[bool, Curve]:
        """The acceptance curves, by whether a request is greedy. Also worked out where somebody drafts."""
        return {greedy: kind.curve() for greedy, kind in self.of.kinds.items()}

    @cached_property
    def siblings(self) -> tuple[Curve, ...]:
        """As in Budget, of a sampled request. Also worked out where somebody drafts."""
        return tuple(kind.curve(rises=False) for kind in self.of.draws)


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

    def __init__(self, plan: DynamicPlan, costs: Costs, *, draws: bool = True, model: str = "model") -> None:
        self.plan = plan  # the largest search
        self.costs = costs
        self.model = model  # what drafts: a head, or a draft model
        self.draws = draws  # whether sampled requests may have draws: not where the rule takes no notice of q
        self.learned = Learned(lifts=[LIFT] * plan.depth, unseen=[0] * plan.depth, shares=[1.0] * plan.depth)
        self._prices: Prices | None = None  # of the step that was asked for last
        self._asked: dict[str, tuple[Recent, Prices]] = {}  # in this step; kept of those that decode in it
        self._seconds: dict[int, Doubles] = {}  # of a step by its nodes; by batch

    def choose(self, request: str, batch: int, *, greedy: bool, length: int = 0) -> Budget:
        """The budget of a request of so many tokens in a batch of that many, as if all of them chose alike.

        Nothing is learned from being asked: a scheduler also asks for requests that then find no place.
        """
        known, price, size = self.learned, self._prices, size_of(batch)
        recent = known.recent.get(request)
        if recent is not None and known.steps < recent.until and size >= recent.size - 1:
            return Budget.off(recent.reason)
        if price is None or price.of is not known or (price.steps, price.batch) != (known.steps, batch):
            price = self._prices = self._priced(batch)
        if recent is None:
            recent = Recent(price.gain, size)
        elif recent.size != size:  # rows have other prices: it begins anew
            recent = replace(recent, gain=price.gain, size=size, searches=PRIOR_NODES)
        else:
            recent = replace(recent)
        recent.length = length
        self._asked[request] = recent, price
        depth, reason, probe = self._depth(request, recent, price)
        return Budget(
            *(depth, self.plan.max_nodes, price.rows, price.asked, price.lifts, price.curves[greedy], reason),
            *(price.together, price.beforehand, probe, price.siblings if self.draws and not greedy else ()),
        )

    def _depth(self, request: str, recent: Recent, price: Prices) -> tuple[int, str, bool]:
        """How deep a search may go, why, and whether it is a probe."""
        if recent.gain > price.passes[0] * (MARGIN if recent.drafts else MARGIN**2):
            return self.plan.depth, f"{price.text}; lately they brought {recent.gain:.2f}", False
        if price.probing == request:
            return self.plan.depth, f"a probe after {plural(recent.idle, 'step')} without drafts", True
        return 0, f"{unpaid(self.model)}: {price.text}; it would bring {recent.gain:.2f}", False

    def _priced(self, batch: int) -> Prices:
        """What rows and passes must bring in a batch of that many."""
        known, costs, plan = self.learned, self.costs, self.plan
        seconds = self._seconds_of(batch)
        worth = max(known.tokens / known.costs, 1.0) / seconds[0]  # tokens of each request a second
        together = batch * worth * (seconds - seconds[0])
        rows = together[::batch] / batch
        later = costs.pass_seconds(batch * plan.top)
        passes = worth * np.array([costs.first_seconds(batch), *[later] * (plan.depth - 1)])
        passes /= np.maximum(known.shares, 1 / batch)  # whoever draft share what a pass takes
        some = min(4, plan.max_nodes)
        asked, late = passes.copy(), np.array(known.unseen) >= MEMORY
        if late.any():
            asked[late.argmax()] = 0.0
        return Prices(
            of=known,
            steps=known.steps,
            batch=batch,
            rows=rows,
            together=together,
            passes=passes,
            asked=asked,
            lifts=np.array(known.lifts),
            gain=known.gains.get(size_of(batch), LIFT / (1 - LIFT) - float(rows[1])),
            text=f"a pass must bring {passes[0]:.2f} tokens and {plural(some, 'node')} {rows[some]:.2f}",
            probing=self._may_probe(seconds),
        )

    def _may_probe(self, seconds: Doubles) -> str:
        """The request that has not drafted for longest, where a probe would take at most PROBE_SHARE of the time since.

        It takes a pass, a few rows, and in the drafter all tokens that it has not seen.
        """
        waiting = {name: recent for name, recent in self.learned.recent.items() if recent.idle and not recent.drafts}
        name = max(waiting, key=lambda name: waiting[name].idle, default="")
        if not name:
            return ""
        unseen = max(waiting[name].length - waiting[name].fed, waiting[name].idle)
        some = min(4, self.plan.max_nodes)
        takes = self.costs.first_seconds(1) + self.costs.pass_seconds(unseen) + seconds[some] - seconds[0]
        return name if self.learned.unprobed * PROBE_SHARE * seconds[0] >= takes else ""

    def _seconds_of(self, batch: int) -> Doubles:
        """[batch * nodes + 1] what its steps take without drafting, by nodes in all. Worked out once."""
        if batch not in self._seconds:
            sizes = range(batch, batch * (1 + self.plan.max_nodes) + 1)
            self._seconds[batch] = np.array([self.costs.step_seconds(size, batch) for size in sizes])
        return self._seconds[batch]

    def learn(self, outcomes: Sequence[BudgetOutcome]) -> None:
        """Learn from what became of a step's budgets. `outcomes`: of all requests that decoded in it."""
        if not outcomes:
            return
        for outcome in outcomes:
            if outcome.budget is not None:
                self._learn_one(outcome, outcome.budget)
        self._asked.clear()
        probed = any(outcome.budget is not None and outcome.budget.probe for outcome in outcomes)
        self.learned.unprobed = 0 if probed else self.learned.unprobed + 1
        self.learned.candidates.learn([candidate for outcome in outcomes for candidate in outcome.candidates])
        self._learn_shares(outcomes)
        self._learn_rate(outcomes)
        self.learned.steps += 1

    def _learn_one(self, outcome: BudgetOutcome, budget: Budget) -> None:
        known = self.learned
        if budget.is_off:
            known.recent[outcome.request].idle += 1
            return
        recent, price = self._asked[outcome.request]
        known.recent[outcome.request] = recent
        known.gains.setdefault(recent.size, price.gain)
        recent.look(budget, paid=len(outcome.tree) > 0, steps=known.steps)
        recent.drafts = budget.depth > 0 and not budget.probe
        if not outcome.levels:
            recent.idle += 1
            return
        if outcome.sure is not None:
            self._learn_draws(outcome.tree, outcome.sure, outcome.path)
        elif len(outcome.tree):
            known.kinds[outcome.greedy].add(outcome.scores, outcome.path)
        values, above = found_by_level(outcome.levels, budget, self.plan.top, drawn=outcome.sure is not None)
        brought = values[-1] - float(price.passes[1 : len(values)].sum())
        known.gains[recent.size] = _mean(known.gains[recent.size], brought)
        recent.learn(brought)
        for level, lift in enumerate(np.diff(values) / np.maximum(above[:-1], 1e-6), 1):
            known.lifts[level] = _mean(known.lifts[level], float(lift))
        known.unseen = [0 if level < len(values) else count + 1 for level, count in enumerate(known.unseen)]

    def _learn_draws(self, tree: DraftTree, sure: Sequence[float], path: Ints) -> None:
        """Count, for each node that was reached, which of its draws was accepted, if any."""
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
        """Of the batch, how many went down to each level; where nobody did, together it may pay again.

        Probes go alone, and say nothing of it.
        """
        looked = [
            len(outcome.levels) for outcome in outcomes if outcome.budget is not None and not outcome.budget.probe
        ]
        for level, share in enumerate(self.learned.shares):
            now = sum(levels > level for levels in looked) / len(outcomes)
            self.learned.shares[level] = _mean(share, now or 1.0)

    def _learn_rate(self, outcomes: Sequence[BudgetOutcome]) -> None:
        """Tokens a request of this step, and what it cost by the file, in plain steps."""
        batch = len(outcomes)
        takes, nodes = self._seconds_of(batch), sum(len(outcome.tree) for outcome in outcomes)
        looked = [len(outcome.levels) for outcome in outcomes if outcome.levels]
        plain, seconds = float(takes[0]), float(takes[nodes])
        if looked:
            seconds += self.costs.first_seconds(len(looked))
            for level in range(1, max(looked)):
                seconds += self.costs.pass_seconds(self.plan.top * sum(levels > level for levels in looked))
        known = self.learned
        known.tokens += sum(outcome.tokens for outcome in outcomes) / batch - known.tokens / MEMORY
        known.costs += seconds / plain - known.costs / MEMORY

    def forget(self, request: str) -> None:
        """Forget a request that ended."""
        self.learned.recent.pop(request, None)


def size_of(batch: int) -> int:
    """Batches of like size: 1, 2 to 3, 4 to 7, and so on."""
    return batch.bit_length()


def _mean(before: float, now: float) -> float:
    """The running mean with the newest value taken in."""
    return before + (now - before) / MEMORY
