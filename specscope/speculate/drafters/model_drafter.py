"""Drafters that are models: a paged KV cache, trees grown by passes over all requests; a smaller causal LM is one."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from specscope.model.batch import Segment
from specscope.model.kv_cache import BlockTable, KVCache, OutOfBlocksError
from specscope.model.runner import ModelRunner
from specscope.plans.plan import TreePlan
from specscope.speculate.drafters.base import NO_DRAFT, Context, Draft, Drafter, Level
from specscope.speculate.drafters.tree_builder import TreeBuilder, grow_trees, start_tree
from specscope.trace.record.notes import MethodNotes
from specscope.trace.record.records import Phase, Verdict
from specscope.trace.record.tree import DraftTree, Floats, Ints

PREFILL_CHUNK = 512


@dataclass
class State:
    """What a drafter keeps of a request between steps."""

    table: BlockTable = field(default_factory=BlockTable)
    computed: int = 0  # slots of the drafter's cache that hold committed tokens
    fed: Ints = field(default_factory=lambda: np.zeros(0, np.int32))  # of the last tree: each node's place, or -1
    drafts: list[tuple[int, int]] = field(default_factory=list)  # tokens before each draft, and what was computed then


@dataclass
class Drafting:
    """A request's tree while it is drafted."""

    context: Context
    state: State
    builder: TreeBuilder
    base: int  # slots before the tree's
    cached: int  # committed tokens that the drafter's cache held when it began
    fed: list[int] = field(default_factory=list)  # rows of each pass
    rows: Sequence[int] = ()  # of its frontier in the last pass
    passes: list[tuple[Level, Sequence[int], list[int]]] = field(default_factory=list)  # each one's rows and frontier
    first: Segment | None = None  # what its first pass fed, where that is noted
    norms: Floats = field(default_factory=lambda: np.zeros((0, 0), np.float32))  # of the features of those rows

    def row(self, path: Sequence[int]) -> Level | None:
        """The logits behind these tokens, for whoever looks at the step."""
        for level, rows, frontier in self.passes:
            for row, node in zip(rows, frontier, strict=True):
                if self.builder.path(node) == list(path):
                    return Level(level.logits[row : row + 1], level.vocab_size, level.d2t)
        return None


class ModelDrafter(Drafter, ABC):
    """Drafts by passes of a model over all requests' trees at once. Subclasses say how a pass is made."""

    behind = 0  # by how many positions a slot's token lies behind the slot's own
    again = 0  # how many of the rows that were fed last are fed once more: they hang on tokens that were guessed
    ahead: int | None = None  # where one pass gives all depths: how many rows it feeds behind those that are committed

    def __init__(self, plan: TreePlan, cache: KVCache, max_context: int) -> None:
        self.plan, self.cache, self.max_context = plan, cache, max_context
        self.max_nodes, self.max_depth = plan.max_nodes, plan.max_depth
        self.rows_fed = (1, plan.max_depth + 1, *plan.fed)  # what was committed since the last draft, then each level
        self.max_fed = sum(plan.fed)  # slots of its cache that a draft takes
        self.states: dict[str, State] = {}
        self.can_go_back = False  # whether what that takes is kept

    @abstractmethod
    def known(self, context: Context, state: State) -> int:
        """How many slots the committed tokens take in the drafter's cache; -1 where it cannot draft yet."""

    @abstractmethod
    def pending(self, drafting: Sequence[Drafting], limit: int, *, logits: bool) -> tuple[list[Segment], Tensor]:
        """Segments of what is committed but not computed, at most `limit` of each request, and the target's features.

        It counts as computed then. features [N, F], for N rows; empty where it needs none.
        """

    @abstractmethod
    def write(self, segments: list[Segment], features: Tensor) -> None:
        """Write the KV of committed tokens that nothing is drafted from."""

    @abstractmethod
    def root_level(self, drafting: Sequence[Drafting], segments: list[Segment], features: Tensor) -> Level:
        """The pass over what is committed, whose last row of each request is its root's."""

    def note(self, drafting: Sequence[Drafting], segments: Sequence[Segment], features: Tensor) -> None:
        """Keep what fed that pass, where drafts' notes say it."""

    def feed_context(self, drafting: Sequence[Drafting]) -> Level:
        """All that was committed since the last draft, of a long stretch a chunk at a time."""
        for g in drafting:
            while g.base - g.state.computed > PREFILL_CHUNK:
                self.write(*self.pending([g], PREFILL_CHUNK, logits=False))
        segments, features = self.pending(drafting, PREFILL_CHUNK, logits=True)
        level = self.root_level(drafting, segments, features)
        self.note(drafting, segments, features)
        return level

    def afresh(
        self, tokens: Sequence[int], count: int, features: Sequence[Tensor], blocks: int
    ) -> tuple[KVCache, BlockTable, Sequence[int]]:
        """What its first `count` places hold of a text, computed in a cache of so many blocks that nobody else uses.

        `features`: of the target's layers that it observes, in parts, from the text's first position on. Returns the
        cache, its table, and the token behind each place.
        """
        twin, table, end = copy(self), BlockTable(), count + self.again
        twin.runner = self.runner.beside(blocks + 1)
        states = torch.cat(list(features)) if features else torch.empty(0)
        twin.runner.cache.reserve(table, end, 0)
        for start in range(0, end, PREFILL_CHUNK):
            chunk = list(tokens[start + self.behind : end + self.behind])[: PREFILL_CHUNK + self.again]
            segment = Segment.of_tree(table, start, chunk, logits=False)
            twin.write([segment], states[start : start + len(chunk)])
        return twin.runner.cache, table, tokens[self.behind : count + self.behind]

    def feed_frontier(self, drafting: Sequence[Drafting]) -> Level:
        """Feed every tree's frontier; a row of logits for each of its nodes. Asked for where a pass is a level."""
        raise NotImplementedError

    def propose(self, contexts: Sequence[Context]) -> list[Draft]:
        """One tree for each request; none for a request for which the drafter's cache has no room."""
        self.passes = ()
        drafting = {c.request: g for c in contexts if (g := self._begin(c)) is not None}
        if drafting:
            self.grow([*drafting.values()])
        return [self._finish(drafting[c.request]) if c.request in drafting else NO_DRAFT for c in contexts]

    def grow(self, drafting: Sequence[Drafting]) -> None:
        """Grow the trees level by level: a pass for each, or one, in which the nodes of a depth share a row."""
        place, feed, depth = {g.context.request: i for i, g in enumerate(drafting)}, self.feed_context, 0
        while drafting:
            if self.ahead is None or depth == 0:
                level = self.run_pass(feed, drafting)
                for g in drafting:
                    g.fed.append(len(g.rows) if g.passes else g.base - g.cached + (self.ahead or 0))
            for g in drafting:
                if self.ahead is not None:
                    g.rows = [place[g.context.request] * self.max_depth + depth] * len(g.builder.frontier)
                g.passes.append((level, g.rows, g.builder.frontier))
            grow_trees(level, [(g.builder, g.rows) for g in drafting])
            drafting, feed, depth = [g for g in drafting if g.builder.frontier], self.feed_frontier, depth + 1

    def _begin(self, context: Context) -> Drafting | None:
        has_room = self.make_room(context)
        state, base = self._base(context)
        if base < 0 or not has_room:
            return None
        if self.can_go_back:
            state.drafts.append((len(context.tokens), state.computed))
        return Drafting(context, state, start_tree(context, self.plan), base, state.computed)

    def _base(self, context: Context) -> tuple[State, int]:
        """What is kept of a request, and the slots before its next tree; -1 where it will not draft."""
        state = self.states.get(context.request, State())
        base = self.known(context, state)
        return state, base if base + self.max_fed <= self.max_context else -1

    def make_room(self, context: Context) -> bool:
        """Hold the slots that the next draft takes; False where there are too few blocks."""
        state, base = self._base(context)
        if base < 0:
            return True
        try:
            self.cache.reserve(state.table, base + self.max_fed, state.computed)
        except OutOfBlocksError:
            return False
        self.states[context.request] = state
        return True

    def give_back(self, request: str) -> None:
        """Give back the slots that are kept for drafts."""
        state = self.states.get(request)
        if state is not None:
            self.cache.truncate(state.table, state.computed)

    def run_pass(self, feed: Callable[[Sequence[Drafting]], Level], drafting: Sequence[Drafting]) -> Level:
        """A pass of the model over all of them."""
        start = time.time_ns()
        level = feed(drafting)
        row = 0
        for g in drafting:
            g.rows = range(row, row := row + len(g.builder.frontier))
        self.passes += (Phase(f"pass {len(self.passes) + 1}", start, max(time.time_ns(), start)),)
        return level

    def _finish(self, g: Drafting) -> Draft:
        draft, g.state.fed = g.builder.finish()
        assert draft.notes is not None
        notes = replace(draft.notes, cached=g.cached, rows=np.array(g.fed, np.int32))
        if g.first is not None:
            token, position = np.array(g.first.tokens, np.int32), g.first.positions.astype(np.int32)
            notes = replace(notes, fed_token=token, fed_position=position, fed_norms=g.norms)
        if self.ahead is None or not len(draft.tree):
            return replace(draft, notes=notes, row=g.row)
        sure = np.exp(np.minimum(notes.score, 0), dtype=np.float32)  # of the path down to each node
        return replace(draft, notes=notes, row=g.row, method=MethodNotes(confidence=sure, one_pass=True))

    def rewind(self, request: str, tokens: int) -> bool:
        """Keep what was computed before the draft that followed them, so that it comes out of the same passes again."""
        state = self.states.get(request)
        if state is not None:
            place = bisect_left(state.drafts, (tokens, 0))
            before = state.drafts[place][1] if place < len(state.drafts) else state.computed
            del state.drafts[place:]
            state.computed = min(before, tokens - 1)
            self.cache.truncate(state.table, state.computed)
        return True

    def release(self, request: str) -> None:
        state = self.states.pop(request, None)
        if state is not None:
            self.cache.truncate(state.table, 0)


class DraftModel(ModelDrafter):
    """Drafts with any causal LM of the target's vocabulary.

    Committed tokens lie in its cache at their positions. The root is fed by `propose`, so that the cache then holds
    every committed token; the tree's nodes follow in the order in which they were fed.
    """

    name = "draft_model"

    def __init__(self, runner: ModelRunner, plan: TreePlan) -> None:
        super().__init__(plan, runner.cache, runner.loaded.max_context)
        self.runner: ModelRunner = runner

    def known(self, context: Context, state: State) -> int:
        return len(context.tokens)

    def pending(self, drafting: Sequence[Drafting], limit: int, *, logits: bool) -> tuple[list[Segment], Tensor]:
        segments = []
        for g in drafting:
            start, g.state.computed = g.state.computed, min(g.base, g.state.computed + limit)
            tokens = list(g.context.tokens[start : g.state.computed])
            segments.append(Segment.of_tree(g.state.table, start, tokens, logits=logits))
        return segments, torch.empty(0)

    def write(self, segments: list[Segment], features: Tensor) -> None:
        self.runner.forward(segments)

    def root_level(self, drafting: Sequence[Drafting], segments: list[Segment], features: Tensor) -> Level:
        return Level(torch.cat(self.runner.forward(segments)), self.runner.loaded.vocab_size)

    def feed_frontier(self, drafting: Sequence[Drafting]) -> Level:
        segments = [g.builder.segment(g.state.table, g.base) for g in drafting]
        return self.root_level(drafting, segments, torch.empty(0))

    def commit(self, context: Context, tree: DraftTree, verdict: Verdict) -> None:
        """Move the accepted path's KV to its final slots, as far as the drafter has run it.

        The accepted leaf of a fully accepted path was never run; it is fed with the next root.
        """
        state = self.states[context.request]
        base = len(context.tokens)
        if state.computed != base:
            return  # nothing was drafted
        places = state.fed[verdict.path]
        count = int((places >= 0).cumprod().sum())
        slots = state.table.slots(base, base + int(state.fed.max(initial=-1)) + 1)
        source, target = slots[places[:count]], slots[:count]
        if (source != target).any():
            self.cache.move([(source, target)])
        state.computed = base + count
