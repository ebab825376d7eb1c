"""How the hooks get into vLLM: nothing that goes wrong in them may reach it, and its modules are imported after us."""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

log = logging.getLogger("specscope.vllm")
MOST = 5  # errors, after which the plugin steps aside


class ErrorGuard:
    """Counts what went wrong. After `MOST` errors the plugin does nothing more, and says so once."""

    def __init__(self) -> None:
        self.errors = 0
        self.is_off = False

    def caught(self, where: str, error: BaseException) -> None:
        """Count an error and log it."""
        self.errors += 1
        log.warning("specscope: %s failed; vLLM continues without it: %r", where, error, exc_info=self.errors == 1)
        if self.errors >= MOST:
            self.step_aside(f"{self.errors} errors; what was recorded before is kept")

    def step_aside(self, why: str) -> None:
        """Do nothing more, and say so once."""
        if not self.is_off:
            self.is_off = True
            log.warning("specscope: switched off: %s", why)

    def safely(self, function: Callable[..., Any], *args: object) -> Any:
        """The function's value; None where the plugin is off or the function failed."""
        if self.is_off:
            return None
        try:
            return function(*args)
        except Exception as error:
            self.caught(getattr(function, "__qualname__", str(function)), error)
            return None


def wrap(owner: Any, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Replace a function of a module or class by what `make` makes of it. Once: a second time changes nothing."""
    original = getattr(owner, name)
    if hasattr(original, "__specscope__"):
        return
    replaced = functools.wraps(original)(make(original))
    replaced.__specscope__ = True  # type: ignore[attr-defined]
    setattr(owner, name, replaced)


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


def on_import(name: str, hook: Hook) -> None:
    """Call the hook with the module: now where it has been imported, else when it is."""
    if name in sys.modules:
        hook(sys.modules[name])
        return
    if _FINDER not in sys.meta_path:
        sys.meta_path.insert(0, _FINDER)
    _FINDER.hooks[name] = hook
