"""What if: a second run of one request from one of its steps on, with something changed, beside the original."""

from __future__ import annotations

import dataclasses

from specscope.engine.build import Parts, drafter_blocks, make_drafter
from specscope.engine.engine import Engine
from specscope.engine.request import Request
from specscope.errors import UserError
from specscope.model.runner import ModelRunner
from specscope.speculate.tokens import Tokens
from specscope.trace.changes import Changes
from specscope.trace.records import RequestStep


def fork(engine: Engine, request: Request, step: RequestStep, changes: Changes) -> tuple[Engine, str]:
    """An engine beside `engine` with a copy of `request` as it was before `step`, and the copy's id.

    Both share the target's weights and its KV cache: blocks are shared until one of them writes (copy on write).
    Raises UserError for changes that do not fit together.
    """
    before = step.context_len + step.prefill_tokens + 1 if step.verdict is not None else len(request.prompt_tokens)
    if len(request.tokens) < before:
        raise UserError(f"step {step.index} of {request.id} is no longer part of it: it was rewound")
    twin = _twin(request, request.tokens[:before], changes)
    beside = _beside(engine, changes)
    shared = min(step.context_len, len(twin.tokens) - 1)
    if changes.tail is not None:
        shared = min(shared, before - changes.tail[0] - 1)
    owns = engine.requests.get(request.id) is request and request.computed >= shared
    if owns and shared > 0 and not beside.drafter.aux_layers:
        cache = engine.runner.cache
        twin.table, twin.computed = cache.fork(request.table), shared
        cache.truncate(twin.table, shared)
    beside.requests[twin.id] = twin
    beside.scheduler.waiting.append(twin)
    return beside, twin.id


def _twin(request: Request, tokens: list[int], changes: Changes) -> Request:
    """The copy, with its tokens and parameters."""
    try:
        params = dataclasses.replace(request.params, **changes.params)
    except TypeError:
        known = ", ".join(field.name for field in dataclasses.fields(request.params))
        raise UserError(f"unknown sampling parameter among {', '.join(changes.params)}: use {known}") from None
    twin = Request(
        id=f"{request.id}'",
        prompt=request.prompt,
        prompt_tokens=list(request.prompt_tokens),
        params=params,
        labels=request.labels,
        arrival_ns=request.arrival_ns,
        title=request.title,
    )
    whole = tokens
    if changes.tail is not None:
        gone, new = changes.tail
        if not 0 <= gone < len(tokens):
            raise UserError(f"of {len(tokens)} tokens the last {gone} cannot be replaced")
        whole = [*tokens[: len(tokens) - gone], *new]
        twin.prompt_tokens = whole[: max(len(request.prompt_tokens) - gone + len(new), 1)]
    twin.tokens = Tokens(twin.prompt_tokens, whole[len(twin.prompt_tokens) :])
    return twin


def _beside(engine: Engine, changes: Changes) -> Engine:
    """An engine over the same target and cache, with a scheduler and a drafter of its own."""
    unknown = set(changes.engine) - {"drafter", "draft_model", "tree"}
    if unknown:
        raise UserError(f"{', '.join(sorted(unknown))} cannot be changed in a fork: drafter, draft_model and tree can")
    settings = dict(changes.engine)
    if "drafter" in settings:  # what the old drafter had is not the new one's
        settings = {"draft_model": None, "tree": None, "adaptive": False, **settings}
    config = dataclasses.replace(engine.config, **settings)
    loaded, cache = engine.runner.loaded, engine.runner.cache
    blocks = drafter_blocks(config, cache.pool.blocks)
    drafter = make_drafter(config, loaded, engine.tokenizer, blocks, cache.backend, lambda _: None)
    parts = Parts(
        runner=ModelRunner(loaded, 0, drafter.aux_layers, cache=cache),
        drafter=drafter,
        tokenizer=engine.tokenizer,
        vocabulary=engine.vocabulary,
        max_context=engine.max_context,
        run_info=dataclasses.replace(
            engine.run_info, drafter=drafter.name, tree="" if config.plan is None else str(config.plan)
        ),
    )
    return Engine(config, parts=parts, changes=changes)
