"""Recorded steps run again by our own engine: from their tokens alone, in fresh KV, with the same coins."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from specscope.engine.engine import Engine
from specscope.errors import UserError
from specscope.live.again import SCRATCH, drafter_again, target_again
from specscope.model.kv_cache import OutOfBlocksError
from specscope.speculate.drafters.base import NO_DRAFT, Context, Draft
from specscope.speculate.drafters.combined import CombinedDrafter, model_of
from specscope.speculate.sampling import distributions
from specscope.trace.history.history import RequestHistory
from specscope.trace.record.records import ROUNDING, RequestStep
from specscope.trace.record.tree import ROOT, DraftTree


@dataclass(frozen=True)
class StepAgain:
    """A step and its second run."""

    request: str
    index: int
    step: int  # the engine's
    tree: bool | None  # whether the drafter drafts the same tree; None where that cannot be said
    drafted: tuple[int, ...]  # the tokens that it drafts now
    p: tuple[tuple[int, float, float], ...]  # each node's p as it was recorded, and now; near ties left out
    tokens: bool | None  # whether the verdict commits the same tokens; None where another tree or a near tie decides
    committed: tuple[int, ...]  # the tokens that it commits now


def steps_again(
    engine: Engine, request: RequestHistory, steps: Sequence[int], places: Sequence[int]
) -> Iterator[StepAgain]:
    """Run the steps at `places` of a request again. `steps`: the engine's step number of each of its steps.

    Steps whose context is not known are left out. Raises UserError where the KV cache is too small.
    """
    info = request.info
    for place in places if info is not None else ():
        assert info is not None
        part = request.steps[place]
        tokens = request.before(place, part.position + 1)
        if part.verdict is None or len(tokens) != part.position + 1:
            continue
        allowed = engine.forms.allowed(info.params)
        context = Context(SCRATCH, tokens, len(info.prompt_tokens), info.params, allowed=allowed)
        try:
            yield _again(engine, part, context, steps[place])
        except OutOfBlocksError as error:
            raise UserError(f"the KV cache is too small to run a step again ({error}): raise --kv-memory") from None


def _again(engine: Engine, part: RequestStep, context: Context, step: int) -> StepAgain:
    logits = target_again(engine, part, context.tokens)
    redraft = _drafted(engine, context, part.tree)
    sampled = redraft is not None and part.tree.is_sampled
    same = None if redraft is None or (part.sizing and not sampled) else _alike(redraft.tree, part.tree)
    if redraft is not None and not same and part.parts_at_near_draw(redraft.tree, engine.run_info.dtype):
        same = None
    judged = redraft if sampled and redraft is not None else Draft(part.tree)  # of drawn nodes the verdict asks for q
    tokens, committed = _tokens(engine, part, context, logits, judged)
    return StepAgain(
        request=part.request,
        index=part.index,
        step=step,
        tree=same,
        drafted=() if redraft is None else tuple(redraft.tree.token.tolist()),
        p=tuple(_p(engine, part, context, logits)),
        tokens=tokens,
        committed=committed,
    )


def _drafted(engine: Engine, context: Context, tree: DraftTree) -> Draft | None:
    """What the drafter drafts now; None where it drafted nothing then, for reasons that may lie outside the step."""
    drafter = engine.drafter
    if not len(tree):
        return None
    if isinstance(drafter, CombinedDrafter) and not tree.is_sampled:  # ranked by what was accepted before
        return None
    if model_of(drafter) is not None:
        return drafter_again(engine, context, tree) or NO_DRAFT
    try:
        return drafter.propose([context])[0]
    finally:
        drafter.release(context.request)


def _p(engine: Engine, part: RequestStep, context: Context, logits: Tensor) -> Iterator[tuple[int, float, float]]:
    """Each node's p as it was recorded, and its p now."""
    assert part.verdict is not None
    paths = _paths(part.tree)
    allowed = context.rows(logits, lambda: paths).allowed
    p = distributions(logits, context.params, context.counts, paths, engine.runner.cache.backend, allowed)
    near = _near_ties(engine, context, logits, paths)
    for node, (token, above) in enumerate(zip(part.tree.token.tolist(), part.tree.parent.tolist(), strict=True)):
        if not near[above - ROOT]:
            yield node, float(part.verdict.p[node]), p[above - ROOT].prob(token)


def _tokens(
    engine: Engine, part: RequestStep, context: Context, logits: Tensor, draft: Draft
) -> tuple[bool | None, tuple[int, ...]]:
    """Whether the recorded tree, judged again with the same coins, gives the same tokens; and the tokens it gives."""
    assert part.verdict is not None
    if len(part.verdict.forced) or not _alike(draft.tree, part.tree):
        return None, ()
    ((verdict, _),) = engine.verifier.verify([(context, draft, logits)])
    committed = [*part.tree.token[verdict.path].tolist(), verdict.token]
    same = committed == part.tokens()
    dtype = engine.run_info.dtype
    near = any(_near_ties(engine, context, logits, _paths(part.tree)))
    near = near or bool(part.verdict.near_ties(dtype) or verdict.near_ties(dtype))
    return (None if near and not same else same), tuple(committed)


def _near_ties(engine: Engine, context: Context, logits: Tensor, paths: Sequence[Sequence[int]]) -> list[bool]:
    """Rows at which a greedy target's choice is one that rounding could change."""
    if not context.params.greedy:
        return [False] * len(paths)
    best = context.rows(logits, lambda: paths).shaped().float().topk(2).values
    gaps: list[float] = (best[:, 0] - best[:, 1]).tolist()
    return [gap <= 4 * ROUNDING.get(engine.run_info.dtype, 0.0) for gap in gaps]


def _paths(tree: DraftTree) -> list[list[int]]:
    """The drafted tokens on the way to the root's row and to each node's."""
    return [[], *(tree.token[tree.path_to(node)].tolist() for node in range(len(tree)))]


def _alike(tree: DraftTree, other: DraftTree) -> bool:
    return np.array_equal(tree.token, other.token) and np.array_equal(tree.parent, other.parent)
