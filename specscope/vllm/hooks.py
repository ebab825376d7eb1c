"""What the hooks need of vLLM's processes: to hear of a runner that is ready, and time to write when they end."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

from specscope.trace.inside.hooking import wrap

ENDS = "vllm.v1.engine.utils"  # where its server ends its engines
GRACE_SECONDS = 1.0  # for what a worker writes within 50 ms, on a busy machine


def wrap_loaded(runner: type, tell: Callable[[Any], object]) -> None:
    """Call `tell` with each of a class's model runners when it has its model and KV cache, before any request.

    A vLLM that has no such method tells with its first step.
    """

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def initialize_kv_cache(runner: Any, config: Any, *args: Any, **kwargs: Any) -> None:
            original(runner, config, *args, **kwargs)
            if not kwargs.get("is_profiling", args[0] if args else False):
                tell(runner)

        return initialize_kv_cache

    if hasattr(runner, "initialize_kv_cache"):
        wrap(runner, "initialize_kv_cache", make)


def give_grace(module: ModuleType) -> None:
    """vLLM's server kills its engines in the moment in which it tells them to end: let it wait a moment for them.

    Their workers write the rest meanwhile, whether they end by themselves or not. `module`: vllm.v1.engine.utils.
    """

    def make(original: Callable[..., None]) -> Callable[..., None]:
        def shutdown(processes: Any, timeout: float | None = None, **kwargs: Any) -> None:
            original(processes, GRACE_SECONDS if timeout == 0 else timeout, **kwargs)

        return shutdown

    if hasattr(module, "shutdown"):
        wrap(module, "shutdown", make)
