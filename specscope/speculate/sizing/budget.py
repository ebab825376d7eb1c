"""Budget: what a request may draft in a step, and how a batch shares out the rows that it verifies. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from specscope.speculate.sizing.acceptance import MIDDLES, PRIOR, Curve, Doubles

FREE = Curve(np.ones(len(MIDDLES)))  # all that is drafted is accepted
NOTHING, NO_LEVELS = np.zeros(1), np.zeros(0)


@dataclass(frozen=True)
class Budget:
    """What a request may draft in a step, and what it must bring. Filled by Sizer.choose; a drafter reads it."""

    depth: int  # at most; 0: nothing
    nodes: int  # at most
    prices: Doubles  # [nodes + 1] tokens that so many nodes must bring to be worth their rows
    passes: Doubles  # [depth] tokens that each pass must bring
    lifts: Doubles  # [depth] tokens that each level brings for each that the one above it brings
    curve: Curve
    reason: str  # for the evidence
    together: Doubles | None = None  # [...] tokens that so many nodes of the whole batch must bring; None: nothing
    beforehand: Sequence[float] = PRIOR  # chances of candidates from two sources, by kind (acceptance.py)
    probe: bool = False  # whether it is there to see if drafting pays again
    # That the first, second, ... draw at a node is accepted, by the drafter's largest probability there; (): no draws,
    # but the likeliest tokens.
    siblings: tuple[Curve, ...] = ()
    looks: bool = True  # whether texts are looked into, where the request has two sources

    @property
    def is_off(self) -> bool:
        """Whether nothing at all is asked of a drafter."""
        return not (self.depth or self.looks)

    def best(self, scores: Sequence[float]) -> tuple[int, float]:
        """How many of the best nodes to verify, and the tokens that they bring beyond their price.

        `scores`: log probabilities of their paths, falling.
        """
        return self.best_of(self.curve.at(scores))

    def best_of(self, chances: Doubles) -> tuple[int, float]:
        """The same of nodes that are accepted with these probabilities, falling."""
        count = min(len(chances), self.nodes)
        if not count:
            return 0, 0.0
        worth = np.cumsum(chances[:count]) - self.prices[1 : count + 1]
        best = int(worth.argmax())
        return (best + 1, float(worth[best])) if worth[best] > 0 else (0, 0.0)

    def with_free_rows(self, nodes: int) -> Budget:
        """The same for a drafter whose nodes another one chooses from: `nodes` of them, at no price."""
        return replace(self, nodes=nodes, prices=np.zeros(nodes + 1), together=None, siblings=())

    def goes_on(self, level: int, expected: float) -> bool:
        """Whether to draft another level, `level` levels down. `expected`: accepted nodes of those it begins at."""
        return level < self.depth and bool(self.lifts[level] * expected > self.passes[level])

    @staticmethod
    def off(reason: str) -> Budget:
        """A budget that asks nothing of a drafter."""
        return Budget(0, 0, NOTHING, NO_LEVELS, NO_LEVELS, FREE, reason, looks=False)

    @staticmethod
    def whole(depth: int, nodes: int, reason: str = "") -> Budget:
        """A budget under which everything pays."""
        return Budget(depth, nodes, np.zeros(nodes + 1), np.full(depth, -1.0), np.ones(depth), FREE, reason)


def share_out(budgets: Sequence[Budget], chances: Sequence[Doubles]) -> list[int]:
    """How many of its best nodes each request of a batch verifies, so that tokens less their price are most for all.

    `chances`: that they are accepted, of each request, falling. Of equal nodes an earlier request's come first.
    """
    counts = [0] * len(budgets)
    priced = [i for i, budget in enumerate(budgets) if budget.together is not None]
    for i in set(range(len(budgets))) - set(priced):
        counts[i] = budgets[i].best_of(chances[i])[0]
    each = [chances[i][: budgets[i].nodes] for i in priced]
    if not sum(map(len, each)):
        return counts
    every = np.concatenate(each)
    order = np.argsort(-every, kind="stable")
    price = budgets[priced[0]].together
    assert price is not None
    worth = np.cumsum(every[order])[: len(price) - 1] - price[1 : len(every) + 1]
    best = int(worth.argmax())
    if worth[best] > 0:
        whose = np.repeat(priced, [len(part) for part in each])
        for i in whose[order[: best + 1]].tolist():
            counts[i] += 1
    return counts


def found_by_level(
    levels: Sequence[Sequence[float]], budget: Budget, top: int, *, drawn: bool = False
) -> tuple[list[float], list[float]]:
    """(tokens of all nodes down to each level beyond the price of their rows, those expected where it goes on).

    `drawn`: the levels are the logs of chances, not of the drafter's probabilities.
    """
    values: list[float] = []
    above: list[float] = []
    nodes: list[float] = []
    for scores in levels:
        nodes = sorted([*nodes, *scores], reverse=True)
        values.append(budget.best_of(np.exp(nodes) if drawn else budget.curve.at(nodes))[1])
        best = sorted(scores, reverse=True)[:top]
        above.append(float((np.exp(best) if drawn else budget.curve.at(best)).sum()))
    return values, above
