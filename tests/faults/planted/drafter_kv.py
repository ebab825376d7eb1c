"""Faults in the drafter's own KV cache and positions."""

from __future__ import annotations

import torch

from specscope.analyze.diagnose.causes import Cause
from specscope.model.decoder import Rotary
from specscope.speculate.drafters.draft_model import DraftModel
from specscope.speculate.drafters.model_drafter import ModelDrafter, State
from specscope.speculate.drafters.tree_builder import TreeBuilder
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
    Fault(
        "drafter's KV not moved",
        Cause.DRAFTER_KV_NOT_MOVED,
        not_moved,
        "model tree",
        "the drafter's KV of the accepted path stays where it lay",
    ),
    Fault(
        "drafter's KV not moved, sampled", Cause.DRAFTER_KV_NOT_MOVED, not_moved, "model tree warm", "the same, sampled"
    ),
    Fault("another rotary base", Cause.DRAFTER_ROTARY, other_base(500.0), "eagle chain", "500 for 10,000"),
    Fault(
        "leaf taken for run",
        Cause.DRAFTER_KV_FULL,
        leaf_taken_for_run,
        "model chain",
        "the last token of a fully accepted draft has no KV in the drafter",
    ),
    Fault(
        "leaf taken for run, sampled",
        Cause.DRAFTER_KV_FULL,
        leaf_taken_for_run,
        "model chain warm",
        "the same at a temperature",
    ),
    Fault(
        "drafter remembers too much",
        Cause.DRAFTER_KV_PREEMPTION,
        keeps_its_count,
        "model chain crowded",
        "after a preemption the drafter's KV is garbage",
    ),
    Fault(
        "nodes one position further",
        Cause.DRAFTER_ROTARY,
        nodes_one_further,
        "eagle chain",
        "drafted nodes have the position of their children",
    ),
    Fault(
        "rotary table too short",
        Cause.DRAFTER_ROTARY,
        short_table(128),
        "eagle chain long",
        "past position 128 every position is 127",
    ),
]
