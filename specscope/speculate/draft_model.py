"""A smaller causal LM as drafter, with a paged KV cache of its own, drafting a chain or a static tree."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from specscope.model.batch import Segment
from specscope.model.kv_cache import BlockTable, OutOfBlocksError
from specscope.model.runner import ModelRunner
from specscope.speculate.coins import Stream, coins
from specscope.speculate.distribution import Dense, Point
from specscope.speculate.drafter import NO_DRAFT, Context, Draft
from specscope.speculate.sampling import distributions
from specscope.trace.records import Verdict
from specscope.trace.tree import ROOT, Doubles, DraftTree, Drawn, TreeShape

PREFILL_CHUNK = 512


@dataclass
class _State:
    """What the drafter keeps of a request between steps."""

    table: BlockTable = field(default_factory=BlockTable)
    computed: int = 0  # committed tokens whose KV is in the cache; may lag by more than the root after full acceptance


@dataclass
class _Growing:
    """A tree while it is drafted, level by level. `kept[i]` is the shape's node behind node i."""

    context: Context
    state: _State
    coin: Doubles
    token: list[int] = field(default_factory=list)
    parent: list[int] = field(default_factory=list)
    q_token: list[float] = field(default_factory=list)
    q: dict[int, Dense] = field(default_factory=dict)
    kept: list[int] = field(default_factory=list)
    fed: int = 0  # nodes whose KV is computed: those before it in `token`

    def tree(self, drawn: Drawn) -> DraftTree:
        """The tree so far."""
        return DraftTree.build(self.token, self.parent, self.q_token, drawn)

    def path_tokens(self, node: int) -> list[int]:
        """Drafted tokens down to a node."""
        path: list[int] = []
        while node != ROOT:
            path.append(self.token[node])
            node = self.parent[node]
        return path[::-1]


class DraftModel:
    """Drafts with any causal LM of the target's vocabulary.

    At temperature 0 a node's children are the model's top tokens (deterministic); above, they are sampled without
    replacement from the model's distribution after the request's own processing. Drafting passes of all requests
    run as one batch.
    """

    name = "draft_model"

    def __init__(self, runner: ModelRunner, shape: TreeShape) -> None:
        self.runner = runner
        self.shape = shape
        self.max_nodes = len(shape)
        self.max_depth = shape.max_depth
        self._states: dict[str, _State] = {}

    def propose(self, contexts: Sequence[Context]) -> list[Draft]:
        """One tree a request. A request for which the drafter's cache has no room gets none."""
        growing = {c.request: g for c in contexts if (g := self._begin(c)) is not None}
        self._prefill(list(growing.values()))
        parents: list[tuple[_Growing, int]] = [(g, ROOT) for g in growing.values()]
        rows = self._feed_roots(list(growing.values()))
        for level in range(self.shape.max_depth):
            for (tree, node), row in zip(parents, rows, strict=True):
                self._add_children(tree, node, row)
            if level + 1 == self.shape.max_depth:
                break
            parents, rows = self._feed_level(list(growing.values()))
        return [self._finish(growing[c.request]) if c.request in growing else NO_DRAFT for c in contexts]

    def _begin(self, context: Context) -> _Growing | None:
        state = self._states.setdefault(context.request, _State())
        length = len(context.tokens) + self.max_nodes
        if length > self.runner.loaded.max_context:
            return None
        try:
            self.runner.cache.reserve(state.table, length, state.computed)
        except OutOfBlocksError:
            return None
        coin = coins(context.params.seed, Stream.DRAFT, context.position, self.max_nodes)
        return _Growing(context, state, coin)

    def _prefill(self, growing: Sequence[_Growing]) -> None:
        """Bring long stretches of committed tokens into the cache, a chunk at a time."""
        for g in growing:
            tokens = g.context.tokens
            while len(tokens) - g.state.computed > PREFILL_CHUNK:
                chunk = list(tokens[g.state.computed : g.state.computed + PREFILL_CHUNK])
                self.runner.forward(
                    [Segment.of_tree(g.state.table, g.state.computed, chunk, DraftTree.empty(), logits=False)]
                )
                g.state.computed += PREFILL_CHUNK

    def _feed_roots(self, growing: Sequence[_Growing]) -> list[Tensor]:
        """Feed what is committed but not computed, the root last; the root's logits [V] for each."""
        segments = []
        for g in growing:
            pending = list(g.context.tokens[g.state.computed :])
            segment = Segment.of_tree(g.state.table, g.state.computed, pending, DraftTree.empty(), logits=True)
            segments.append(segment)
            g.state.computed = len(g.context.tokens)
        return [logits[-1] for logits in self.runner.forward(segments)] if segments else []

    def _feed_level(self, growing: Sequence[_Growing]) -> tuple[list[tuple[_Growing, int]], list[Tensor]]:
        """Feed the newest level of every tree; the nodes that have children, and their logits."""
        parents: list[tuple[_Growing, int]] = []
        segments = []
        for g in growing:
            fresh = range(g.fed, len(g.token))
            inner = [node for node in fresh if self.shape.children(g.kept[node])]
            if not inner:
                continue
            tree = g.tree(Drawn.DETERMINISTIC)
            last = inner[-1] + 1  # leaves after the last inner node need no KV
            segments.append(
                Segment(
                    table=g.state.table,
                    tokens=g.token[g.fed : last],
                    context=len(g.context.tokens),
                    positions=len(g.context.tokens) - 1 + tree.depth[:last].astype(np.int64),
                    mask=tree.ancestors[g.fed : last, :last],
                    wanted=[node - g.fed for node in inner],
                )
            )
            g.fed = last
            parents += [(g, node) for node in inner]
        rows = [row for logits in self.runner.forward(segments) for row in logits] if segments else []
        return parents, rows

    def _add_children(self, g: _Growing, node: int, logits: Tensor) -> None:
        """Draw the children of `node` (an index in the tree, or ROOT) from its logits [V]."""
        wanted = self.shape.children(g.kept[node] if node != ROOT else ROOT)
        params, context = g.context.params, g.context
        if params.greedy:
            self._add_top(g, node, wanted, logits)
            return
        output = context.tokens[context.prompt_len :]
        prompt = context.tokens[: context.prompt_len]
        (left,) = distributions(logits[None], params, prompt, output, [g.path_tokens(node)])
        assert isinstance(left, Dense)
        g.q[node] = left
        for shape_node in wanted:
            token = left.draw(float(g.coin[shape_node]))
            self._add(g, node, shape_node, token, g.q[node].prob(token))
            left, mass = left.without(token)
            if mass <= 0:
                break  # q has no further token to give

    def _add_top(self, g: _Growing, node: int, wanted: Sequence[int], logits: Tensor) -> None:
        """At temperature 0 the children are the model's top tokens after the request's processing."""
        context = g.context
        top = logits.topk(len(wanted)).indices.tolist()
        if context.params.penalised or context.params.logit_bias:
            output = context.tokens[context.prompt_len :]
            prompt = context.tokens[: context.prompt_len]
            (best,) = distributions(logits[None], context.params, prompt, output, [g.path_tokens(node)])
            assert isinstance(best, Point)
            top = [best.token, *(t for t in top if t != best.token)][: len(wanted)]
        for shape_node, token in zip(wanted, top, strict=True):
            self._add(g, node, shape_node, token, 1.0)

    def _add(self, g: _Growing, node: int, shape_node: int, token: int, q: float) -> None:
        g.kept.append(shape_node)
        g.token.append(token)
        g.parent.append(node)
        g.q_token.append(q)

    def _finish(self, g: _Growing) -> Draft:
        drawn = Drawn.DETERMINISTIC if g.context.params.greedy else Drawn.WITHOUT_REPLACEMENT
        return Draft(g.tree(drawn), g.q)

    def commit(self, context: Context, tree: DraftTree, verdict: Verdict) -> None:
        """Move the accepted path's KV to its final slots, as far as the drafter has run it.

        Nodes lie in the cache at context length + node, those that were fed: a prefix of the tree. The accepted
        leaf of a fully accepted path was never run; it is fed with the next root.
        """
        state = self._states[context.request]
        base = len(context.tokens)
        if state.computed != base:
            return  # nothing was drafted
        fed = self._fed(tree)
        path = [node for node in verdict.path.tolist() if node < fed]
        kept = len(path)
        if path != list(range(kept)):
            slots = state.table.slots(0, base + len(tree))
            self.runner.cache.move(slots[base + np.asarray(path)], slots[base : base + kept])
        state.computed = base + kept

    def _fed(self, tree: DraftTree) -> int:
        """How many nodes of a tree were fed to the drafter: up to the last that has children."""
        return int(tree.parent.max()) + 1 if len(tree) else 0

    def release(self, request: str) -> None:
        """Free the request's blocks."""
        state = self._states.pop(request, None)
        if state is not None:
            self.runner.cache.truncate(state.table, 0)
