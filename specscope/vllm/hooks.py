"""How the hooks get into vLLM's processes, where its modules are imported after us, and out of them."""

from __future__ import annotations

import atexit
import logging
import multiprocessing
import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from multiprocessing.util import Finalize
from types import ModuleType
from typing import Any

from specscope.trace.inside.hooking import wrap

log = logging.getLogger("specscope.vllm")
ENDS = "vllm.v1.engine.utils"  # where its server ends its engines
GRACE_SECONDS = 1.0  # for what a worker writes within 50 ms, on a busy machine
Hook = Callable[[ModuleType], None]


class _Wrapped(Loader):
    """The module's own loader, and the hook after it."""

    def __init__(self, loader: Loader, hook: Hook) -> None:
        self._loader, self._hook = loader, hook

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """As the loader does."""
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        """Run the module, then the hook."""
        self._loader.exec_module(module)
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader  # what asks the module for its source finds the true one
        self._hook(module)


class _Finder(MetaPathFinder):
    """Lets the others find a module, and puts the hook behind its loader."""

    def __init__(self) -> None:
        self.hooks: dict[str, Hook] = {}

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        """None for every module without a hook."""
        hook = self.hooks.pop(name, None)  # taken out at once: the search below comes by here again
        if hook is None:
            return None
        for finder in sys.meta_path:
            spec = None if finder is self else finder.find_spec(name, path, target)
            if spec is not None and spec.loader is not None:
                spec.loader = _Wrapped(spec.loader, hook)
                return spec
        return None


_FINDER = _Finder()


def at_exit(close: Callable[[], object]) -> None:
    """Call it once when this process ends, but for one that is killed. A forked worker never runs what atexit has."""
    if multiprocessing.parent_process() is None:
        atexit.register(close)
    else:
        Finalize(None, close, exitpriority=0)


def on_import(name: str, hook: Hook) -> None:
    """Call the hook with the module: now where it has been imported, else when it is."""
    if name in sys.modules:
        hook(sys.modules[name])
        return
    if _FINDER not in sys.meta_path:
        sys.meta_path.insert(0, _FINDER)
    _FINDER.hooks[name] = hook


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
