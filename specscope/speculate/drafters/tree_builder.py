"""A tree while a model drafts it: from the logits of the nodes fed last to their children, level by level."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from specscope.kernels.tree_batch import put
from specscope.model.batch import Segment
from specscope.model.kv_cache import BlockTable
from specscope.plans.plan import DynamicPlan, StaticPlan, TreePlan
from specscope.speculate.drafters.base import Context, Draft, Level
from specscope.speculate.sampling import LogitRows, all_probabilities
from specscope.speculate.verify.distribution import Draw, draw_siblings
from specscope.trace.record.coins import Stream, coins
from specscope.trace.record.records import DraftNotes
from specscope.trace.record.tree import ROOT, Doubles, DraftTree, Drawn, Ints


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

    @abstractmethod
    def grow(self, level: Level, rows: Sequence[int]) -> None:
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
            mask[row, [place[node] for node in self.nodes_to(start)]] = True
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

    def move_on(self, frontier: list[int]) -> None:
        """The next frontier; each of its nodes is a child of the present one."""
        row = {node: i for i, node in enumerate(self.frontier)}
        self.origin = [row[self.parent[node]] for node in frontier]
        self.frontier = frontier

    def path(self, node: int) -> list[int]:
        return [self.token[above] for above in self.nodes_to(node)]

    def nodes_to(self, node: int) -> list[int]:
        """A node's ancestors below the root, and itself."""
        nodes: list[int] = []
        while node != ROOT:
            nodes.append(node)
            node = self.parent[node]
        return nodes[::-1]

    def best_tokens(self, level: Level, rows: Sequence[int], count: int) -> list[list[tuple[int, float]]]:
        """For each node of the frontier its likeliest tokens with their log probabilities.

        After the request's logit bias, penalties and form, where it has any: they move the target's choice too.
        """
        params, dead = self.context.params, frozenset[int]()
        if params.penalised or params.logit_bias or self.context.allowed is not None:
            logit_rows = self.rows(level, rows)
            dead, level, rows = logit_rows.dead, Level(logit_rows.shaped(), level.vocab_size), range(len(rows))
        tokens, log_probs = level.top(count)
        return [
            [(t, p) for t, p in zip(tokens[row], log_probs[row], strict=True) if p > -torch.inf and index not in dead]
            for index, row in enumerate(rows)
        ]

    def rows(self, level: Level, rows: Sequence[int]) -> LogitRows:
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


class StaticTreeBuilder(TreeBuilder):
    """A tree of a given shape, whose nodes number the draws, which are also their coins'.

    Draws from q, or top tokens where the request or the plan says so.
    """

    def __init__(self, context: Context, plan: StaticPlan) -> None:
        super().__init__(context)
        self.shape = plan.shape
        self.sampled = not plan.top and not context.params.greedy
        self.coin: Doubles = coins(context.params.seed, Stream.DRAFT, context.position, len(plan.shape))
        self._number: list[int] = []  # of each node's draw
        self._q: dict[int, Tensor] = {}
        self._draws: list[Draw] = []  # each node's

    def grow(self, level: Level, rows: Sequence[int]) -> None:
        """Top tokens: see grow_trees for draws."""
        first, wanted = len(self.token), self.wanted()
        best = self.best_tokens(level, rows, max(map(len, wanted)))
        for node, children, row in zip(self.frontier, wanted, best, strict=True):
            for shape_node, (token, log_prob) in zip(children, row, strict=False):
                self._number.append(shape_node)
                self._add(node, token, log_prob)
        self._move_on_from(first)

    def wanted(self) -> list[list[int]]:
        """For each node of the frontier the shape's nodes that are to be its children."""
        return [self.shape.children(ROOT if node == ROOT else self._number[node]) for node in self.frontier]

    def take(self, q: Sequence[Tensor], drawn: Sequence[Sequence[Draw]]) -> None:
        """Give the frontier children: q [V] at each node, and what was drawn there, as far as q had tokens to give."""
        first = len(self.token)
        for node, children, row, tokens in zip(self.frontier, self.wanted(), q, drawn, strict=True):
            self._q[node] = row
            for number, draw in zip(children, tokens, strict=False):
                self._number.append(number)
                self._draws.append(draw)
                self._add(node, draw.token, float(np.log(draw.prob)))
        self._move_on_from(first)

    def _move_on_from(self, first: int) -> None:
        self.move_on([node for node in range(first, len(self.token)) if self.shape.children(self._number[node])])

    def finish(self) -> tuple[Draft, Ints]:
        """All nodes, as they were drawn."""
        nodes = range(len(self.token))
        notes, places = self._notes(nodes), self._places(nodes)
        if not self.sampled:
            return Draft(DraftTree.build(self.token, self.parent), {}, notes), places
        _, q, margin, low, coin = np.array(self._draws).reshape(-1, 5).T
        tree = DraftTree.build(self.token, self.parent, q.tolist(), Drawn.WITHOUT_REPLACEMENT)
        return Draft(tree, self._q, replace(notes, draw_margin=margin, coin=coin, low=low)), places


def grow_trees(level: Level, growing: Sequence[tuple[TreeBuilder, Sequence[int]]]) -> None:
    """Give every tree's frontier children from its rows of `level`; those that are sampled are drawn together."""
    if sampled := [(tree, rows) for tree, rows in growing if isinstance(tree, StaticTreeBuilder) and tree.sampled]:
        grow_sampled(level, sampled)
    for tree, rows in growing:
        if not tree.sampled:
            tree.grow(level, rows)


def grow_sampled(level: Level, growing: Sequence[tuple[StaticTreeBuilder, Sequence[int]]]) -> None:
    """All children of every frontier, drawn without replacement: one read of the device, whatever the batch."""
    parts = [tree.rows(level, rows) for tree, rows in growing]
    q = all_probabilities(parts)
    if any(part.allowed is not None for part in parts):
        starts = np.cumsum([0, *(len(part.logits) for part in parts)]).tolist()
        dead = [start + row for start, part in zip(starts, parts, strict=False) for row in part.dead]
        # zeros where nothing may be drawn: no token may come, or none that the drafter knows
        q = q.index_fill_(0, put(np.array(dead, np.int64), q.device), 0).nan_to_num_(nan=0.0)
    wanted = [(tree, children) for tree, _ in growing for children in tree.wanted()]
    drawn = draw_siblings(q, [tree.coin[children].tolist() for tree, children in wanted])
    start = 0
    for tree, rows in growing:
        end = start + len(rows)
        tree.take(q[start:end].unbind(), drawn[start:end])
        start = end


class DynamicTreeBuilder(TreeBuilder):
    """EAGLE-2: expand the likeliest nodes at each depth, then keep the best of all that were seen."""

    def __init__(self, context: Context, plan: DynamicPlan) -> None:
        super().__init__(context)
        self.plan = plan
        self.level = 0  # how deep it has looked

    def grow(self, level: Level, rows: Sequence[int]) -> None:
        """Every node of the frontier is expanded; the best of the new ones are the next frontier."""
        first = len(self.token)
        for node, row in zip(self.frontier, self.best_tokens(level, rows, self.plan.top), strict=True):
            for token, log_prob in row:
                self._add(node, token, log_prob)
        self.level += 1
        self.move_on(self._best(range(first, len(self.token)), self.plan.top) if self.level < self.plan.depth else [])

    def _best(self, nodes: Sequence[int], count: int) -> list[int]:
        """The nodes of highest score, in their order. Of equal ones the earlier: a parent comes before its child."""
        return sorted(sorted(nodes, key=lambda node: (-self.score[node], node))[:count])

    def finish(self) -> tuple[Draft, Ints]:
        """The best nodes. A node's score is at most its parent's, so that what is kept is a tree."""
        best = self._best(range(len(self.token)), self.plan.nodes)
        place = {node: i for i, node in enumerate(best)} | {ROOT: ROOT}
        tree = DraftTree.build([self.token[i] for i in best], [place[self.parent[i]] for i in best])
        dropped = sorted(set(range(len(self.token))) - set(best))
        return Draft(tree, {}, self._notes(best, dropped)), self._places(best)


def start_tree(context: Context, plan: TreePlan) -> TreeBuilder:
    """An empty tree for a request, to be grown as the plan says."""
    return StaticTreeBuilder(context, plan) if isinstance(plan, StaticPlan) else DynamicTreeBuilder(context, plan)
