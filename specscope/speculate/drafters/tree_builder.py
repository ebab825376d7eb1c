"""A tree while a model drafts it: from the logits of the nodes fed last to their children, level by level."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from specscope.model.batch import Segment
from specscope.model.kv_cache import BlockTable
from specscope.speculate.drafters.base import Context, Draft
from specscope.speculate.drafters.level import Level
from specscope.speculate.draws import Draw, draw_siblings
from specscope.speculate.sampling import LogitRows, all_probabilities
from specscope.speculate.sizing.acceptance import Doubles
from specscope.speculate.sizing.budget import Budget, share_out
from specscope.speculate.verify.distribution import Dense
from specscope.trace.plan import DynamicPlan, StaticPlan, TreePlan
from specscope.trace.record.coins import STRIDE, Stream, coins, draw_number
from specscope.trace.record.records import DraftNotes
from specscope.trace.record.tree import ROOT, DraftTree, Drawn, Ints, TreeShape


class TreeBuilder(ABC):
    """One request's tree while it grows. Nodes are numbered as they are found, parents first."""

    sampled = False  # whether its nodes are draws, all of which are verified

    def __init__(self, context: Context) -> None:
        self.context = context
        self.token: list[int] = []
        self.parent: list[int] = []
        self.depth: list[int] = []
        self.prob: list[float] = []  # log probability of each node's token at its parent, as the drafter has it
        self.score: list[float] = []  # cumulative: of the whole path
        self.frontier: list[int] = [ROOT]  # nodes whose logits are asked for next; empty when the tree is grown
        self.origin: list[int] = []  # for each node of the frontier, the row of the last pass that its parent had
        self.fed: list[int] = []  # nodes that were run, in order: their KV lies there
        self.verified: int | None = None  # of the likeliest nodes, where that is adaptive; see share_rows

    @abstractmethod
    def grow(self, level: Level, rows: slice) -> None:
        """Give the frontier children from its rows of `level`, and move it on."""

    @abstractmethod
    def finish(self) -> tuple[Draft, Ints]:
        """The draft, and for each of its nodes its place among those fed, -1 where it never was. int32 [n]."""

    def segment(self, table: BlockTable, base: int) -> Segment:
        """The frontier as rows to feed after the first `base` slots; each sees those, its ancestors and itself."""
        fed = self.fed + self.frontier
        place = {node: i for i, node in enumerate(fed)}
        mask = np.zeros((len(self.frontier), len(fed)), dtype=np.bool_)
        for row, start in enumerate(self.frontier):
            node = start
            while node != ROOT:
                mask[row, place[node]] = True
                node = self.parent[node]
        self.fed = fed
        return Segment(
            table=table,
            tokens=[self.token[node] for node in self.frontier],
            context=base,
            positions=np.array([base - 1 + self.depth[node] for node in fed], dtype=np.int64),
            mask=mask,
            wanted=range(len(self.frontier)),
        )

    def _add(self, parent: int, token: int, log_prob: float) -> int:
        self.token.append(token)
        self.parent.append(parent)
        self.prob.append(log_prob)
        self.score.append(log_prob + (self.score[parent] if parent != ROOT else 0.0))
        self.depth.append(1 + (self.depth[parent] if parent != ROOT else 0))
        return len(self.token) - 1

    def _move_on(self, frontier: list[int]) -> None:
        """The next frontier; each of its nodes is a child of the present one."""
        row = {node: i for i, node in enumerate(self.frontier)}
        self.origin = [row[self.parent[node]] for node in frontier]
        self.frontier = frontier

    def path(self, node: int) -> list[int]:
        """Drafted tokens down to a node."""
        path: list[int] = []
        while node != ROOT:
            path.append(self.token[node])
            node = self.parent[node]
        return path[::-1]

    def _top(self, level: Level, rows: slice, count: int) -> list[list[tuple[int, float]]]:
        """For each node of the frontier its likeliest tokens with their log probabilities.

        After the request's logit bias, penalties and form, where it has any: they move the target's choice too.
        """
        params, dead = self.context.params, frozenset[int]()
        if params.penalised or params.logit_bias or self.context.allowed is not None:
            logit_rows = self.rows(level, rows)
            dead, level, rows = logit_rows.dead, Level(logit_rows.shaped(), level.vocab_size), slice(None)
        tokens, log_probs = level.top(count)
        both = enumerate(zip(tokens[rows], log_probs[rows], strict=True))
        return [
            [(t, p) for t, p in zip(*row, strict=True) if p > -torch.inf and index not in dead] for index, row in both
        ]

    def rows(self, level: Level, rows: slice) -> LogitRows:
        """The frontier's logits, and what shapes them to q: all of the request's processing."""
        return self.context.rows(level.full(rows), lambda: [self.path(node) for node in self.frontier])

    def _notes(self, nodes: Sequence[int], dropped: Sequence[int] = ()) -> DraftNotes:
        place = {node: i for i, node in enumerate([*nodes, *dropped])} | {ROOT: ROOT}
        return DraftNotes(
            prob=np.exp(np.asarray([self.prob[i] for i in nodes], dtype=np.float32)),
            score=np.asarray([self.score[i] for i in nodes], dtype=np.float32),
            dropped_token=np.asarray([self.token[i] for i in dropped], dtype=np.int32),
            dropped_parent=np.asarray([place[self.parent[i]] for i in dropped], dtype=np.int32),
            dropped_score=np.asarray([self.score[i] for i in dropped], dtype=np.float32),
        )

    def _places(self, nodes: Sequence[int]) -> Ints:
        place = {node: i for i, node in enumerate(self.fed)}
        return np.asarray([place.get(node, -1) for node in nodes], dtype=np.int32)


class SampledTreeBuilder(TreeBuilder):
    """A tree whose nodes are draws from q. Every draw has a number, which is also its coin's."""

    coin: Doubles  # [most draws]
    sampled = True

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._number: list[int] = []  # of each node's draw
        self._q: dict[int, Dense] = {}
        self._draws: list[Draw] = []  # each node's

    def look(self, level: Level, rows: slice) -> None:
        """Read from its rows of `level` how often to draw. Called before `wanted`."""

    @abstractmethod
    def wanted(self) -> list[list[int]]:
        """For each node of the frontier the draws that are to be its children."""

    def grow(self, level: Level, rows: slice) -> None:
        """Draws without replacement."""
        grow_sampled(level, [(self, rows)])

    def take(self, q: Sequence[Tensor], drawn: Sequence[Sequence[Draw]]) -> None:
        """Give the frontier children: q [V] at each node, and what was drawn there, as far as q had tokens to give."""
        first = len(self.token)
        for node, children, row, tokens in zip(self.frontier, self.wanted(), q, drawn, strict=True):
            self._q[node] = Dense(row)
            for number, draw in zip(children, tokens, strict=False):
                if draw.prob > 0:  # else q has no further token to give
                    self._number.append(number)
                    self._draws.append(draw)
                    self._add(node, draw.token, float(np.log(draw.prob)))
        self._move_on_from(first)

    def stop(self) -> None:
        """Nothing more is to be drawn."""
        self._move_on_from(len(self.token))

    @abstractmethod
    def _move_on_from(self, first: int) -> None:
        """The frontier is now those of the nodes from `first` on that are to have children."""

    def finish(self) -> tuple[Draft, Ints]:
        """All nodes, as they were drawn."""
        nodes = range(len(self.token))
        _, q, margin, low, coin = np.array(self._draws).reshape(-1, 5).T
        tree = DraftTree.build(self.token, self.parent, q.tolist(), Drawn.WITHOUT_REPLACEMENT)
        notes = replace(self._notes(nodes), draw_margin=margin, coin=coin, low=low)
        return Draft(tree, self._q, notes), self._places(nodes)


class StaticTreeBuilder(SampledTreeBuilder):
    """A tree of a given shape, whose nodes number the draws. Top tokens where the request or the plan says so."""

    def __init__(self, context: Context, plan: StaticPlan) -> None:
        super().__init__(context)
        self.shape = plan.shape
        self.sampled = not plan.top and not context.params.greedy
        if context.shape is None:
            self.coin = coins(context.params.seed, Stream.DRAFT, context.position, len(plan.shape))
        else:
            self.coin = counted_coins(context, len(plan.shape))[counted_numbers(plan.shape)]

    def grow(self, level: Level, rows: slice) -> None:
        """Top tokens, or draws without replacement."""
        if self.sampled:
            super().grow(level, rows)
            return
        first, wanted = len(self.token), self.wanted()
        best = self._top(level, rows, max(map(len, wanted)))
        for node, children, row in zip(self.frontier, wanted, best, strict=True):
            for shape_node, (token, log_prob) in zip(children, row, strict=False):
                self._number.append(shape_node)
                self._add(node, token, log_prob)
        self._move_on_from(first)

    def wanted(self) -> list[list[int]]:
        """For each node of the frontier the shape's nodes that are to be its children."""
        return [self.shape.children(ROOT if node == ROOT else self._number[node]) for node in self.frontier]

    def _move_on_from(self, first: int) -> None:
        self._move_on([node for node in range(first, len(self.token)) if self.shape.children(self._number[node])])

    def finish(self) -> tuple[Draft, Ints]:
        """All nodes, as they were drawn."""
        if self.sampled:
            return super().finish()
        nodes = range(len(self.token))
        return Draft(DraftTree.build(self.token, self.parent), {}, self._notes(nodes)), self._places(nodes)


class CountedTreeBuilder(SampledTreeBuilder):
    """As many draws at each node as are expected to pay, of a request with a budget.

    How often to draw follows from how sure the drafter is there, never from what was drawn: all draws are verified, or
    what is emitted would not have the target's distribution.
    """

    def __init__(self, context: Context, plan: DynamicPlan, budget: Budget) -> None:
        super().__init__(context)
        self.plan, self.budget = plan, budget
        self.coin = counted_coins(context, plan.max_nodes)
        self.levels: list[list[float]] = []  # log chances of the nodes drawn at each depth
        self._chance: dict[int, float] = {}  # by number of a draw: that it and all above it are accepted
        self._sure: dict[int, float] = {}  # and the drafter's largest probability at its parent
        self._wanted: list[list[int]] = []

    def look(self, level: Level, rows: slice) -> None:
        """Count the draws: the likeliest to be accepted, for as long as they pay for their rows."""
        log_sure = [row[0] for row in level.top(self.plan.top)[1][rows]]
        above = np.array([1.0 if node == ROOT else self._chance[self._number[node]] for node in self.frontier])
        curves = self.budget.siblings[: min(self.plan.top, STRIDE)]
        chance = above[:, None] * np.stack([curve.at(log_sure) for curve in curves], axis=1)
        chance = np.minimum.accumulate(chance, axis=1)  # the next draw comes after the one before it
        drawn = len(self.token)
        prices = self.budget.prices[drawn : self.plan.max_nodes + 1]
        order = np.argsort(-chance, axis=None, kind="stable")[: len(prices) - 1]
        worth = np.append(0.0, np.cumsum(chance.flat[order]) - (prices[1 : len(order) + 1] - prices[0]))
        least = int(self.budget.probe and not drawn)  # a probe that draws nothing shows nothing
        draws = max(int(worth.argmax()), least)
        counts = np.bincount(order[:draws] // chance.shape[1], minlength=len(chance))
        self._wanted = []
        each = zip(self.frontier, counts.tolist(), chance.tolist(), log_sure, strict=True)
        for node, count, chances, log_prob in each:
            numbers = [draw_number(node, rank) for rank in range(count)]
            self._wanted.append(numbers)
            self._chance |= zip(numbers, chances, strict=False)
            self._sure |= dict.fromkeys(numbers, float(np.exp(log_prob)))

    def wanted(self) -> list[list[int]]:
        """As counted."""
        return self._wanted

    def _move_on_from(self, first: int) -> None:
        """Where another pass is expected to pay."""
        drawn = sorted(range(first, len(self.token)), key=lambda node: (-self._chance[self._number[node]], node))
        self.levels.append([float(np.log(self._chance[self._number[node]])) for node in drawn])
        best = sorted(drawn[: self.plan.top])
        expected = sum(self._chance[self._number[node]] for node in best)
        self._move_on(best if self.budget.goes_on(len(self.levels), expected) else [])

    def finish(self) -> tuple[Draft, Ints]:
        """All nodes, as they were drawn."""
        draft, places = super().finish()
        sure = [self._sure[number] for number in self._number]
        return replace(draft, levels=self.levels, sure=sure), places


def counted_coins(context: Context, nodes: int) -> Doubles:
    """The coins of the counted draws in a tree of at most `nodes` nodes, by number."""
    return coins(context.params.seed, Stream.DRAFT, context.position, draw_number(nodes, 0))


def counted_numbers(shape: TreeShape) -> list[int]:
    """The numbers of the counted draws that the shape's nodes come from."""
    return [draw_number(above, shape.children(above).index(node)) for node, above in enumerate(shape.parent)]


def grow_trees(level: Level, growing: Sequence[tuple[TreeBuilder, slice]]) -> None:
    """Give every tree's frontier children from its rows of `level`; those that are sampled are drawn together."""
    sampled = [(tree, rows) for tree, rows in growing if isinstance(tree, SampledTreeBuilder) and tree.sampled]
    if sampled:
        grow_sampled(level, sampled)
    for tree, rows in growing:
        if not tree.sampled:
            tree.grow(level, rows)


def grow_sampled(level: Level, growing: Sequence[tuple[SampledTreeBuilder, slice]]) -> None:
    """All children of every frontier, drawn without replacement: one read of the device, whatever the batch."""
    for tree, rows in growing:
        tree.look(level, rows)
    idle = [tree for tree, _ in growing if not any(tree.wanted())]
    growing = [(tree, rows) for tree, rows in growing if tree not in idle]
    for tree in idle:
        tree.stop()
    if not growing:
        return
    parts = [tree.rows(level, rows) for tree, rows in growing]
    q = all_probabilities(parts)
    if any(part.allowed is not None for part in parts):
        q = _with_nothing(q, parts)
    wanted = [(tree, children) for tree, _ in growing for children in tree.wanted()]
    coin = np.full((len(wanted), max(len(children) for _, children in wanted)), 0.5)
    for row, (tree, children) in zip(coin, wanted, strict=True):
        row[: len(children)] = tree.coin[children]
    by_node = zip(*draw_siblings(q, coin), coin.tolist(), strict=True)
    drawn = [list(map(Draw, *draws))[: len(children)] for draws, (_, children) in zip(by_node, wanted, strict=True)]
    start = 0
    for tree, rows in growing:
        end = start + rows.stop - rows.start
        tree.take(q[start:end].unbind(), drawn[start:end])
        start = end


def _with_nothing(q: Tensor, parts: Sequence[LogitRows]) -> Tensor:
    """q [F, V] with zeros in rows that nothing may be drawn from: no token may come, or none that the drafter knows."""
    starts = np.cumsum([0, *(len(part.logits) for part in parts)]).tolist()
    dead = [start + row for start, part in zip(starts, parts, strict=False) for row in part.dead]
    q[dead] = 0
    return q.nan_to_num_(nan=0.0)


class DynamicTreeBuilder(TreeBuilder):
    """EAGLE-2: expand the likeliest nodes at each depth, then keep the best of all that were seen."""

    def __init__(self, context: Context, plan: DynamicPlan) -> None:
        super().__init__(context)
        self.plan = plan
        self.levels: list[list[float]] = []  # scores of the nodes found at each depth

    def grow(self, level: Level, rows: slice) -> None:
        """Every node of the frontier is expanded; the best of the new ones are the next frontier."""
        first = len(self.token)
        for node, row in zip(self.frontier, self._top(level, rows, self.plan.top), strict=True):
            for token, log_prob in row:
                self._add(node, token, log_prob)
        self.levels.append(self.score[first:])
        best = self._best(range(first, len(self.token)), self.plan.top)
        self._move_on(best if self._goes_on(best) else [])

    def _goes_on(self, frontier: Sequence[int]) -> bool:
        """Whether to look below these nodes: the plan is deeper, and where there is a budget it expects to gain."""
        level, budget = len(self.levels), self.context.budget
        if level >= self.plan.depth:
            return False
        return budget is None or budget.goes_on(level, budget.curve.at([self.score[node] for node in frontier]).sum())

    def _best(self, nodes: Sequence[int], count: int) -> list[int]:
        """The nodes of highest score, in their order. Of equal ones the earlier: a parent comes before its child."""
        return sorted(sorted(nodes, key=lambda node: (-self.score[node], node))[:count])

    def finish(self) -> tuple[Draft, Ints]:
        """The best nodes. A node's score is at most its parent's, so that what is kept is a tree."""
        count = self.plan.nodes if self.verified is None else self.verified
        best = self._best(range(len(self.token)), count)
        place = {node: i for i, node in enumerate(best)} | {ROOT: ROOT}
        tree = DraftTree.build([self.token[i] for i in best], [place[self.parent[i]] for i in best])
        dropped = sorted(set(range(len(self.token))) - set(best))
        return Draft(tree, {}, self._notes(best, dropped), levels=self.levels), self._places(best)


def share_rows(trees: Sequence[TreeBuilder]) -> None:
    """Set how many nodes of each tree are verified: all budgets decide together."""
    adaptive = [tree for tree in trees if tree.context.budget is not None and not tree.sampled]
    budgets = [tree.context.budget for tree in adaptive if tree.context.budget is not None]
    chances = [b.curve.at(sorted(tree.score, reverse=True)) for tree, b in zip(adaptive, budgets, strict=True)]
    for tree, count in zip(adaptive, share_out(budgets, chances), strict=True):
        tree.verified = count


def start_tree(context: Context, plan: TreePlan) -> TreeBuilder:
    """An empty tree for a request, to be grown as the plan says."""
    if isinstance(plan, StaticPlan):
        return StaticTreeBuilder(context, plan)
    if context.budget is not None and context.budget.siblings:
        return CountedTreeBuilder(context, plan, context.budget)
    return DynamicTreeBuilder(context, plan)
