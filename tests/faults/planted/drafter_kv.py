"""Faults in the drafter's own KV cache and positions."""

from __future__ import annotations

import dataclasses

import numpy as np
import torch

from specscope.analyze.diagnose.causes import Cause
from specscope.model.batch import Segment
from specscope.model.fast.decoder import Rotary
from specscope.speculate.drafters.draft_model import DraftModel
from specscope.speculate.drafters.eagle import Eagle
from specscope.speculate.drafters.model_drafter import ModelDrafter, State
from specscope.speculate.drafters.tree_builder import Level, TreeBuilder
from tests.faults.fault import Fault


def leaf_taken_for_run(patch, engine):
    """After a full acceptance the last accepted token counts as run, though the drafter never ran it."""
    commit = DraftModel.commit

    def all_of_it(self, context, tree, verdict):
        commit(self, context, tree, verdict)
        state = self.states[context.request]
        if len(verdict.path) == tree.max_depth:
            state.computed = len(context.tokens) + len(verdict.path)

    patch.setattr(DraftModel, "commit", all_of_it)


def keeps_its_count(patch, engine):
    """A preempted request's blocks are freed, but the drafter still believes that its tokens are computed."""
    release = ModelDrafter.release

    def forgetful(self, request):
        state = self.states.get(request)
        release(self, request)
        if state is not None and request in engine.requests and engine.requests[request].finish is None:
            self.states[request] = State(computed=state.computed)

    patch.setattr(ModelDrafter, "release", forgetful)


def nodes_one_further(patch, engine):
    """Drafted nodes are fed one position too far."""
    segment = TreeBuilder.segment

    def further(self, table, base):
        made = segment(self, table, base)
        made.positions = made.positions + 1
        return made

    patch.setattr(TreeBuilder, "segment", further)


def spoiled_after_rejections(patch, engine):
    """After a rejection the draft model's KV of its last two committed tokens is gone."""
    commit = DraftModel.commit

    def spoiled(self, context, tree, verdict):
        commit(self, context, tree, verdict)
        state = self.states[context.request]
        if len(verdict.path) < tree.max_depth and state.computed > 2:
            slots = state.table.slots(state.computed - 2, state.computed)
            for store in self.cache.stores:
                store[:, :, slots] = 0

    patch.setattr(DraftModel, "commit", spoiled)


def prompts_last_token(patch, engine):
    """Behind each chunk of a prompt the head is fed the prompt's last token: vLLM 0.32, and others before."""
    observe = Eagle.observe

    def fed(self, request, start, features, tokens):
        observe(self, request, start, features, tokens)
        info = engine.requests[request]
        end = start + len(features)
        if end < len(info.prompt_tokens):
            borders.setdefault(request, set()).add(end)

    borders: dict[str, set[int]] = {}
    pending = Eagle._pending

    def wrong(self, drafting, most, *, logits):
        for g in drafting:
            prompt = engine.requests[g.context.request].prompt_tokens
            tokens = list(g.context.tokens)
            for border in borders.get(g.context.request, ()):
                tokens[border] = prompt[-1]
            g.context = dataclasses.replace(g.context, tokens=tokens)
        return pending(self, drafting, most, logits=logits)

    patch.setattr(Eagle, "observe", fed)
    patch.setattr(Eagle, "_pending", wrong)


def high_while_decoding(patch, engine):
    """Behind the prompt everything lies one position too far in the head."""
    segment, of_tree = TreeBuilder.segment, Segment.of_tree

    def drafted(self, table, base):
        made = segment(self, table, base)
        made.positions = made.positions + 1
        return made

    def committed(table, context, tokens, tree, *, logits):
        made = of_tree(table, context, tokens, tree, logits=logits)
        ends = [
            len(engine.requests[name].prompt_tokens) - 1
            for name, s in engine.drafter.states.items()
            if s.table is table
        ]
        if ends:
            made.positions = made.positions + (made.positions >= ends[0])
        return made

    patch.setattr(TreeBuilder, "segment", drafted)
    patch.setattr(Segment, "of_tree", staticmethod(committed))


def own_slots(patch, engine):
    """A branch of a dynamic tree reads its own place's slots, also where it began at another's node: SGLang 0.5.23.

    The best node of each level lies in the first slot of that level, and so on.
    """
    segment, move_on = TreeBuilder.segment, TreeBuilder._move_on

    def best_first(self, frontier):
        move_on(self, sorted(frontier, key=lambda node: -self.score[node]))

    def by_place(self, table, base):
        made, branches = segment(self, table, base), len(self.frontier)
        levels = -(-made.mask.shape[1] // branches)
        made.mask = np.tile(np.eye(branches, dtype=np.bool_), levels)
        return made

    patch.setattr(TreeBuilder, "_move_on", best_first)
    patch.setattr(TreeBuilder, "segment", by_place)


def first_tokens_only(count: int):
    """The drafter chooses among the first tokens of the vocabulary."""

    def install(patch, engine):
        make = Level.__init__

        def cut(self, logits, *more, **named):
            logits = logits.clone()
            logits[:, count:] = -torch.inf
            make(self, logits, *more, **named)

        patch.setattr(Level, "__init__", cut)

    return install


def short_table(end: int):
    """The head's rotary table ends at a position; what lies beyond it gets the last row."""

    def install(patch, engine):
        runner = engine.drafter.runner
        turns = runner._turns.clone()
        turns[end:] = turns[end - 1]
        patch.setattr(runner, "_turns", turns)

    return install


def not_moved(patch, engine):
    """The draft model's KV of the accepted path stays where it was drafted."""
    patch.setattr(engine.drafter.cache, "move", lambda paths: None)


def other_base(base: float):
    """The head's rotary table is that of another base."""

    def install(patch, engine):
        runner = engine.drafter.runner
        like = runner._turns
        half = like.shape[-1]
        angle = torch.outer(torch.arange(len(like)).float(), base ** (torch.arange(half) / -half))
        both = torch.cat([angle, angle], -1)[None].to(like.dtype)
        turns = torch.stack(Rotary().tables(both.cos(), both.sin()), dim=1)
        assert turns.shape == like.shape
        patch.setattr(runner, "_turns", turns)

    return install


FAULTS = [
    Fault("drafter's KV not moved", Cause.DRAFTER_KV, not_moved, "model tree"),
    Fault("drafter's KV not moved, sampled", Cause.DRAFTER_KV, not_moved, "model tree warm"),
    Fault("another rotary base", Cause.POSITIONS, other_base(500.0), "eagle chain"),
    Fault("leaf taken for run", Cause.DRAFTER_KV, leaf_taken_for_run, "model chain"),
    Fault("leaf taken for run, sampled", Cause.DRAFTER_KV, leaf_taken_for_run, "model chain warm"),
    Fault("drafter remembers too much", Cause.DRAFTER_KV, keeps_its_count, "model chain crowded", rare=0),
    Fault("nodes one position further", Cause.POSITIONS, nodes_one_further, "eagle chain"),
    Fault("spoiled after rejections", Cause.DRAFTER_KV, spoiled_after_rejections, "model chain", rare=10),
    Fault("prompt's last token behind chunks", Cause.DRAFTER_FED, prompts_last_token, "eagle chain chunks", rare=0),
    Fault("own slots", Cause.DRAFTER_KV, own_slots, "eagle wide"),
    Fault("high while decoding", Cause.POSITIONS, high_while_decoding, "eagle chain", rare=0),
    Fault("first tokens only", Cause.DRAFT_VOCABULARY, first_tokens_only(75), "model chain"),
    Fault("rotary table too short", Cause.POSITIONS, short_table(128), "eagle chain long", rare=0),
]
