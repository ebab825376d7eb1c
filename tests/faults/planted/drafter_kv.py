"""Faults in the drafter's own KV cache and positions; of DFlash heads, in their context and blocks too."""

import dataclasses

import numpy as np
import torch
from torch import nn

from specscope.analyze.diagnose.causes import Cause
from specscope.model.batch import Segment
from specscope.model.fast.decoder import Rotary
from specscope.speculate.drafters import dflash
from specscope.speculate.drafters.base import Level
from specscope.speculate.drafters.dflash import DFlash
from specscope.speculate.drafters.eagle import Eagle
from specscope.speculate.drafters.model_drafter import DraftModel, ModelDrafter, State
from specscope.speculate.drafters.tree_builder import TreeBuilder
from tests.faults.fault import Fault, altered, replaced
from tests.faults.planted.features import one_lower


@replaced(DraftModel, "commit")
def leaf_taken_for_run(commit, self, context, tree, verdict):
    """After a full acceptance the last accepted token counts as run, though the drafter never ran it."""
    commit(self, context, tree, verdict)
    if len(verdict.path) == tree.max_depth:
        self.states[context.request].computed = len(context.tokens) + len(verdict.path)


def keeps_its_count(patch, engine):
    """A preempted request's blocks are freed, but the drafter still believes that its tokens are computed."""

    def forgetful(release, self, request):
        state = self.states.get(request)
        release(self, request)
        if state is not None and request in engine.requests and engine.requests[request].finish is None:
            self.states[request] = State(computed=state.computed)

    replaced(ModelDrafter, "release")(forgetful)(patch, engine)


@replaced(TreeBuilder, "segment")
def nodes_one_further(segment, self, table, base):
    """Drafted nodes are fed one position too far."""
    made = segment(self, table, base)
    made.positions = made.positions + 1
    return made


@replaced(DraftModel, "commit")
def spoiled_after_rejections(commit, self, context, tree, verdict):
    """After a rejection the draft model's KV of its last two committed tokens is gone."""
    commit(self, context, tree, verdict)
    state = self.states[context.request]
    if len(verdict.path) < tree.max_depth and state.computed > 2:
        slots = state.table.slots(state.computed - 2, state.computed)
        for store in self.cache.stores:
            store[:, :, slots] = 0


def prompts_last_token(patch, engine):
    """Behind each chunk of a prompt the head is fed the prompt's last token: vLLM 0.32, and others before."""
    borders: dict[str, set[int]] = {}

    def fed(observe, self, request, start, features, tokens):
        observe(self, request, start, features, tokens)
        end = start + len(features)
        if end < len(engine.requests[request].prompt_tokens):
            borders.setdefault(request, set()).add(end)

    def wrong(pending, self, drafting, most, *, logits):
        for g in drafting:
            tokens = list(g.context.tokens)
            for border in borders.get(g.context.request, ()):
                tokens[border] = engine.requests[g.context.request].prompt_tokens[-1]
            g.context = dataclasses.replace(g.context, tokens=tokens)
        return pending(self, drafting, most, logits=logits)

    replaced(Eagle, "observe")(fed)(patch, engine)
    replaced(Eagle, "pending")(wrong)(patch, engine)


def high_while_decoding(patch, engine):
    """Behind the prompt everything lies one position too far in the head."""

    def committed(of_tree, table, *given, logits):
        made = of_tree(table, *given, logits=logits)
        for name in [name for name, state in engine.drafter.states.items() if state.table is table]:
            made.positions = made.positions + (made.positions >= len(engine.requests[name].prompt_tokens) - 1)
        return made

    nodes_one_further(patch, engine)
    replaced(Segment, "of_tree")(committed)(patch, engine)


def own_slots(patch, engine):
    """A branch of a dynamic tree reads its own place's slots, also where it began at another's node: SGLang 0.5.23.

    The best node of each level lies in the first slot of that level, and so on.
    """

    def best_first(move_on, self, frontier):
        move_on(self, sorted(frontier, key=lambda node: -self.score[node]))

    def by_place(segment, self, table, base):
        made, branches = segment(self, table, base), len(self.frontier)
        made.mask = np.tile(np.eye(branches, dtype=np.bool_), -(-made.mask.shape[1] // branches))
        return made

    replaced(TreeBuilder, "move_on")(best_first)(patch, engine)
    replaced(TreeBuilder, "segment")(by_place)(patch, engine)


def first_tokens_only(count: int):
    """The drafter chooses among the first tokens of the vocabulary."""

    def cut(make, self, logits, *more, **named):
        logits = logits.clone()
        logits[:, count:] = -torch.inf
        make(self, logits, *more, **named)

    return replaced(Level, "__init__")(cut)


def short_table(end: int):
    """The head's rotary table ends at a position; what lies beyond it gets the last row."""
    return altered("drafter.runner._turns", lambda turns: turns[torch.arange(len(turns)).clamp(max=end - 1)])


def other_base(base: float):
    """The head's rotary table is that of another base."""

    def turned(like):
        half = like.shape[-1]
        angle = torch.outer(torch.arange(len(like)).float(), base ** (torch.arange(half) / -half))
        both = torch.cat([angle, angle], -1)[None].to(like.dtype)
        turns = torch.stack(Rotary()(both.cos(), both.sin()), dim=1)
        assert turns.shape == like.shape
        return turns

    return altered("drafter.runner._turns", turned)


# The draft model's KV of the accepted path stays where it was drafted
not_moved = altered("drafter.cache.move", lambda move: lambda paths: None)
FAULTS = [
    Fault("drafter's KV not moved", Cause.DRAFTER_KV, not_moved, "model tree"),
    Fault("drafter's KV not moved, sampled", Cause.DRAFTER_KV, not_moved, "model tree warm"),
    Fault("another rotary base", Cause.ROTARY_POSITIONS, other_base(500.0), "eagle chain"),
    Fault("leaf taken for run", Cause.DRAFTER_KV, leaf_taken_for_run, "model chain"),
    Fault("leaf taken for run, sampled", Cause.DRAFTER_KV, leaf_taken_for_run, "model chain warm"),
    Fault("drafter remembers too much", Cause.DRAFTER_KV, keeps_its_count, "model chain crowded", rare=0),
    Fault("nodes one position further", Cause.ROTARY_POSITIONS, nodes_one_further, "eagle chain"),
    Fault("spoiled after rejections", Cause.DRAFTER_KV, spoiled_after_rejections, "model chain", rare=10),
    Fault("prompt's last token behind chunks", Cause.DRAFTER_FED, prompts_last_token, "eagle chain chunks", rare=0),
    Fault("own slots", Cause.DRAFTER_KV, own_slots, "eagle wide"),
    Fault("high while decoding", Cause.ROTARY_POSITIONS, high_while_decoding, "eagle chain", rare=0),
    Fault("first tokens only", Cause.DRAFT_VOCABULARY, first_tokens_only(75), "model chain"),
    Fault("rotary table too short", Cause.ROTARY_POSITIONS, short_table(128), "eagle chain long", rare=0),
]


# The norm of the projected features is left out
no_norm = altered("drafter.runner.head.hidden_norm", lambda norm: nn.Identity())


@replaced(dflash, "block_segment")
def other_mask(make, *given):
    """Mask rows are fed the token before the mask token."""
    made = make(*given)
    made.tokens[1:] = [token - 1 for token in made.tokens[1:]]
    return made


@replaced(dflash, "block_segment")
def one_further(make, *given):
    """A block lies one position too far."""
    made = make(*given)
    made.positions = made.positions + 1
    return made


def stale_root(patch, engine):
    """After a rejection what the block's first row left in its slot is kept, and taken for that position's context."""
    rejected: set[int] = set()  # tables

    def noted(commit, self, context, tree, verdict):
        commit(self, context, tree, verdict)
        if len(tree) and len(verdict.path) < tree.max_depth:
            rejected.add(id(self.states[context.request].table))

    def keeping(write, self, segments, features):
        first = [s.table.slots(s.context, s.context + 1)[0] for s in segments if id(s.table) in rejected]
        before = [store[:, :, first].clone() for store in self.cache.stores]
        write(self, segments, features)
        for store, rows in zip(self.cache.stores, before, strict=True):
            store[:, :, first] = rows
        rejected.difference_update(id(s.table) for s in segments)

    replaced(DFlash, "commit")(noted)(patch, engine)
    replaced(DFlash, "write")(keeping)(patch, engine)


@replaced(DFlash, "write")
def row_before(write, self, segments, features):
    """Each position's keys and values are made of the previous row in the batch."""
    self.runner.write_context(segments, self.runner.combine(features).roll(1, 0))


FAULTS += [
    Fault("block: other layers", Cause.DRAFTER_FED, one_lower, "dflash chain", rare=0),
    Fault("block: one further", Cause.ROTARY_POSITIONS, one_further, "dflash chain"),
]
