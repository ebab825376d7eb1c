"""Faults in the target: masks, positions, and its KV cache."""

import heapq
from itertools import count

import numpy as np
import torch

from specscope.analyze.diagnose.causes import Cause
from specscope.engine.scheduler import Scheduler
from specscope.model.batch import NO_TREE, Segment
from specscope.model.kv_cache import BlockPool
from tests.faults.fault import Fault, altered, replaced


def changed_segment(change):
    """The target's segments of trees, after `change(segment, pending tokens, tree)`."""

    def changed(of_tree, table, context, tokens, tree=NO_TREE, *, logits):
        segment = of_tree(table, context, tokens, tree, logits=logits)
        if len(tree):
            change(segment, len(tokens), tree)
        return segment

    return replaced(Segment, "of_tree")(changed)


def sees_siblings(segment, pending, tree):
    """A node sees the elder siblings of itself and of its ancestors."""
    elder = (tree.parent[:, None] == tree.parent[None]) & np.tri(len(tree), dtype=np.bool_)
    segment.mask[pending:, pending:] = tree.ancestors | (tree.ancestors.astype(int) @ elder.astype(int) > 0)


def causal(segment, pending, tree):
    """A node sees all nodes before it."""
    segment.mask[pending:, pending:] = np.tri(len(tree), dtype=np.bool_)


def by_index(segment, pending, tree):
    """A node's position is its place in the tree."""
    segment.positions[pending:] = segment.context + pending + np.arange(len(tree))


def depth_twice(segment, pending, tree):
    """A node's depth counts twice."""
    segment.positions[pending:] = segment.context + pending - 1 + 2 * tree.depth


def parents_alone(segment, pending, tree):
    """Of its ancestors in the tree a node sees its parent alone."""
    near = tree.depth[:, None] - tree.depth < 2
    segment.mask[pending:, pending:] = tree.ancestors & near


def root_unseen(segment, pending, tree):
    """Nodes do not see the root."""
    segment.mask[pending:, pending - 1] = False


def at_the_root(segment, pending, tree):
    """Every node has the position of the first level."""
    segment.positions[pending:] = segment.context + pending


def chunks_from_zero(patch, engine):
    """Each prefill chunk but the first lies at positions from 0."""

    def from_zero(of_tree, table, context, tokens, tree=NO_TREE, *, logits):
        segment = of_tree(table, context, tokens, tree, logits=logits)
        if len(tokens) > 1 and context and any(table is request.table for request in engine.scheduler.running):
            segment.positions[: len(tokens)] -= context
        return segment

    replaced(Segment, "of_tree")(from_zero)(patch, engine)


@replaced(BlockPool, "drop")
def lenient(drop, self, block):
    """A block that was given away twice is dropped once."""
    if self.refs[block] > 0:
        drop(self, block)


def given_to_two(patch, engine):
    """Now and then a block that another request holds is handed out as free."""
    drop, asked = BlockPool.drop, [0]

    def careless(take, self, count, after=None):
        taken, is_targets = take(self, count, after), self is engine.runner.cache.pool
        asked[0] += count if is_targets else 0
        held = [request.table.blocks[-1] for request in engine.scheduler.running if request.table.blocks]
        if is_targets and taken and asked[0] >= 5 and len(held) > 1:
            asked[0] = 0
            drop(self, taken[-1])
            taken[-1] = held[0]
        return taken

    replaced(BlockPool, "take")(careless)(patch, engine)
    lenient(patch, engine)


def freed_early(patch, engine):
    """A running request's newest block is put back into the pool while the request goes on using it."""
    step, pool, calls = engine.scheduler.schedule, engine.runner.cache.pool, count(1)

    def schedule(*given, **named):
        running = [request for request in engine.scheduler.running if request.table.blocks]
        if next(calls) % 15 == 0 and running:
            block = running[0].table.blocks[0]
            if pool.refs[block] == 1:
                pool.refs[block] = 0
                heapq.heappush(pool._free, block)
        return step(*given, **named)

    patch.setattr(engine.scheduler, "schedule", schedule)
    lenient(patch, engine)


def worse_with_time(patch, engine):
    """From some step on prompts' KV is what the blocks happened to hold: vLLM 41838, in short."""
    forward, calls = engine.runner.forward_with_features, count(1)

    def spoiled(segments):
        call, out = next(calls), forward(segments)
        for segment in segments:
            if segment.context == 0 and len(segment.tokens) > 32 and call > 60:
                slots = segment.table.slots(0, 64)
                for store in engine.runner.cache.stores:
                    noise = torch.randn(64, 1, generator=torch.Generator().manual_seed(call))
                    store[:, :, slots] = store[:, :, :1] * noise
        return out

    patch.setattr(engine.runner, "forward_with_features", spoiled)


def astray_after_preemption(patch, engine):
    """What is computed again after a preemption lies at positions that run too fast."""
    lost = {}  # kept, so that no later table has the id of one

    def noted(preempt, self, victim, plan):
        lost[id(victim.table)] = victim.table
        preempt(self, victim, plan)

    def further(of_tree, table, context, *given, logits):
        segment = of_tree(table, context, *given, logits=logits)
        if id(table) in lost and not context:
            segment.positions = segment.positions + np.arange(len(segment.positions)) // 8
        return segment

    replaced(Scheduler, "preempt")(noted)(patch, engine)
    replaced(Segment, "of_tree")(further)(patch, engine)


# The accepted path's KV stays among the tree's slots
left_where_it_lay = altered("runner.cache.move", lambda move: lambda paths: None)
FAULTS = [
    Fault("positions after a preemption", Cause.TARGET_KV, astray_after_preemption, "model chain crowded", rare=0),
    Fault("mask shows siblings", Cause.MASK_SIBLINGS, changed_segment(sees_siblings), "model tree", rare=30),
    Fault("mask is causal", Cause.MASK_SIBLINGS, changed_segment(causal), "eagle tree warm"),
    Fault("positions by index", Cause.ROTARY_POSITIONS, changed_segment(by_index), "model tree warm"),
    Fault("parents alone", Cause.MASK_SIBLINGS, changed_segment(parents_alone), "model chain"),
    Fault("root unseen", Cause.MASK_SIBLINGS, changed_segment(root_unseen), "model tree"),
    Fault("depth twice", Cause.ROTARY_POSITIONS, changed_segment(depth_twice), "model chain"),
    Fault("positions all alike", Cause.ROTARY_POSITIONS, changed_segment(at_the_root), "eagle chain"),
    Fault("chunks from zero", Cause.TARGET_KV, chunks_from_zero, "model chain chunks", rare=0),
    Fault("KV not moved", Cause.TARGET_KV, left_where_it_lay, "model tree"),
    Fault("KV not moved, sampled", Cause.TARGET_KV, left_where_it_lay, "eagle tree warm"),
    Fault("block given to two", Cause.BLOCKS_SHARED, given_to_two, "model chain", rare=0),
    Fault("block freed early", Cause.BLOCKS_SHARED, freed_early, "ngram", rare=0),
    Fault("worse with time", Cause.TARGET_KV, worse_with_time, "model chain", rare=0),
]
