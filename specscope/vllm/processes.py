"""vLLM's processes: which one this is, when its runner is ready, and how it ends."""

from __future__ import annotations

import logging
import multiprocessing
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from specscope.trace.inside.hooking import HookedCall, wrap

ENDS = "vllm.v1.engine.utils"  # where its server ends its engines
GRACE_SECONDS = 1.0  # for what a worker writes within 50 ms, on a busy machine


@contextmanager
def first_process_tells() -> Iterator[None]:
    """Every process of a vLLM finds the same while the plugin is installed: the first one says so."""
    logger = logging.getLogger("specscope")
    before = logger.level
    if multiprocessing.parent_process() is not None:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


def rank_of_worker() -> int | None:
    """This worker's place in its tensor-parallel group; None before the last pipeline stage, which alone samples."""
    from vllm.distributed.parallel_state import get_pp_group, get_tp_group

    return get_tp_group().rank_in_group if get_pp_group().is_last_rank else None


def engine_number(runner: Any) -> int:
    """The number of this worker's engine. Every engine of a dense model has the data-parallel rank 0."""
    config = runner.vllm_config.parallel_config
    return int(getattr(config, "data_parallel_index", config.data_parallel_rank))


def wrap_loaded(runner: type, tell: Callable[[Any], object]) -> None:
    """Call `tell` with each of a class's model runners when it has its model and KV cache, before any request.

    A vLLM that has no such method tells with its first step.
    """

    def loaded(call: HookedCall) -> Any:
        made = call()
        if not call.given.get("is_profiling", False):
            tell(call.args[0])
        return made

    if hasattr(runner, "initialize_kv_cache"):
        wrap(runner, "initialize_kv_cache", loaded)


def give_grace(module: ModuleType) -> None:
    """vLLM's server kills its engines in the moment in which it tells them to end: let it wait a moment for them.

    Their workers write the rest meanwhile, whether they end by themselves or not. `module`: vllm.v1.engine.utils.
    """

    def shutdown(call: HookedCall) -> Any:
        if call.given.get("timeout") != 0:
            return call()
        return call.original(*call.args[:1], **call.kwargs | {"timeout": GRACE_SECONDS})

    if hasattr(module, "shutdown"):
        wrap(module, "shutdown", shutdown, ("procs", "timeout"))
