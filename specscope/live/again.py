"""An earlier step of a request, computed again in isolation: in separate KV, for a separate request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from torch import Tensor

from specscope.engine.engine import Engine
from specscope.errors import UserError
from specscope.model.batch import Segment
from specscope.model.kv_cache import BlockTable, OutOfBlocksError
from specscope.speculate.drafters.base import Context, Draft
from specscope.speculate.drafters.model_drafter import ModelDrafter
from specscope.trace.record.records import RequestStep
from specscope.trace.record.tree import DraftTree

SCRATCH = "\0scratch"  # the drafter's request: no user's request can have this name


def run_again(engine: Engine, part: RequestStep, context: Context) -> tuple[Tensor, Draft, tuple[str, ...]]:
    """The target's logits [n + 1, V] for the recorded tree, the draft with the drafter's logits, and remarks on both.

    `context`: the request before the step. Raises UserError where no KV blocks are free.
    """
    try:
        logits = target_again(engine, part, context.tokens)
        drafted = drafter_again(engine, replace(context, request=SCRATCH), part.tree)
    except OutOfBlocksError as error:
        raise UserError(f"too few free KV blocks to recompute this step ({error}): raise --kv-memory") from None
    draft = Draft(part.tree)
    if drafted is None:
        return logits, draft, ()
    draft = replace(draft, row=drafted.row)
    if all(np.array_equal(getattr(drafted.tree, name), getattr(part.tree, name)) for name in ("token", "parent")):
        return logits, replace(draft, q=drafted.q), ()
    return logits, draft, ("run again, the drafter drafts a different tree",)


def target_again(engine: Engine, part: RequestStep, tokens: Sequence[int]) -> Tensor:
    """The target over the recorded tree, on a scratch table that shares what lies before the step."""
    cache, request, start = engine.runner.cache, engine.requests.get(part.request), part.context_len
    table, shared = BlockTable(), 0
    if request is not None and request.computed >= start and request.tokens[:start] == list(tokens[:start]):
        table, shared = cache.fork(request.table), start
    try:
        cache.truncate(table, shared)
        cache.reserve(table, len(tokens) + len(part.tree), shared)
        for _ in engine.runner.compute(table, tokens[: start - shared]):
            pass
        logits = engine.runner.forward([Segment.of_tree(table, start, list(tokens[start:]), part.tree, logits=True)])
        return logits[0]
    finally:
        cache.truncate(table, 0)


def drafter_again(engine: Engine, context: Context, tree: DraftTree) -> Draft | None:
    """The draft of a drafter that is a model over the same context; None for other drafters, or an empty tree."""
    drafter = engine.drafter
    if not isinstance(drafter, ModelDrafter) or not len(tree):
        return None
    try:
        if drafter.aux_layers:
            table = BlockTable()
            try:
                engine.runner.cache.reserve(table, len(context.tokens) - 1, 0)
                for start, features in engine.runner.compute(table, context.tokens[:-1]):
                    assert features is not None
                    drafter.observe(SCRATCH, start, features, context.tokens)
            finally:
                engine.runner.cache.truncate(table, 0)
        (draft,) = drafter.propose([context])
        return draft
    finally:
        drafter.release(SCRATCH)
