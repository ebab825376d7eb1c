"""What if: a second run of one request from one of its steps on, with something changed, beside the original."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager

from specscope.engine.build import Parts, make_drafter
from specscope.engine.engine import Engine
from specscope.engine.request import Request
from specscope.errors import UserError
from specscope.model.runner import ModelRunner
from specscope.speculate.changes import Changes
from specscope.trace.record.records import RequestStep


@contextmanager
def forked(engine: Engine, request: Request, step: RequestStep, changes: Changes) -> Iterator[Engine]:
    """An engine beside `engine` with a copy of `request` as it was before `step`, for a while.

    Both share the target's weights and its KV cache: blocks are shared until one of them writes (copy on write). What
    the fork took is free again afterwards, however it ended. Raises UserError for changes that do not fit together.
    """
    before = step.context_len + step.prefill_tokens + 1 if step.verdict is not None else len(request.prompt_tokens)
    if len(request.tokens) < before:
        raise UserError(f"step {step.index} of {request.id} no longer exists: the engine was rewound past it")
    params = dataclasses.replace(request.params, **changes.params)
    told = (request.prompt, list(request.prompt_tokens), params, request.labels, request.arrival_ns)
    twin = Request(f"{request.id}'", *told, title=request.title, allowed=engine.forms.allowed(params))
    twin.tokens = request.tokens[:before]
    twin_engine = beside(engine, changes)
    shared = min(step.context_len, len(twin.tokens) - 1)
    owns = engine.requests.get(request.id) is request and request.computed >= shared
    if owns and shared > 0 and not twin_engine.drafter.aux_layers:
        cache = engine.runner.cache
        twin.table, twin.computed = cache.fork(request.table), shared
        cache.truncate(twin.table, shared)
    twin_engine.intake.arrive(twin)
    try:
        yield twin_engine
    finally:
        twin_engine.current = None
        twin_engine.cancel_all()
        engine.runner.cache.truncate(twin.table, 0)
        twin_engine.runner.close()


def beside(engine: Engine, changes: Changes) -> Engine:
    """An engine over the same target and cache, with a scheduler and a drafter of its own."""
    # What the old drafter had is not the new one's.
    settings = {**({"draft_model": None, "tree": None} if "drafter" in changes.engine else {}), **changes.engine}
    config = dataclasses.replace(engine.config, async_scheduling=False, **settings)
    loaded, cache = engine.runner.loaded, engine.runner.cache
    same = (config.drafter, config.draft_model) == (engine.config.drafter, engine.config.draft_model)
    other = engine.drafter if same else None
    drafter = make_drafter(config, loaded, engine.tokenizer, cache.pool.blocks, cache.backend, lambda _: None, other)
    tree = "" if config.plan is None else str(config.plan)
    parts = Parts(
        runner=ModelRunner(loaded, 0, drafter.aux_layers, cache=cache),
        drafter=drafter,
        tokenizer=engine.tokenizer,
        vocabulary=engine.vocabulary,
        run_info=dataclasses.replace(engine.run_info, drafter=drafter.name, tree=tree, rule=config.rule),
    )
    return Engine(config, parts=parts, changes=changes)
