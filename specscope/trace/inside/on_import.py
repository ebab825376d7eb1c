"""How hooks get into the processes of an engine whose modules are imported after us, and out of them."""

from __future__ import annotations

import atexit
import multiprocessing
import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from multiprocessing.util import Finalize
from threading import local
from types import ModuleType

Hook = Callable[[ModuleType], None]


class _Wrapped(Loader):
    """The module's own loader, and the hook after it."""

    def __init__(self, loader: Loader, hook: Hook) -> None:
        self._loader, self._hook = loader, hook

    def __getattr__(self, name: str) -> object:
        """What else a loader has, for a tool that looks a module up and reads its source."""
        return getattr(self._loader, name)

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
        self._searches = local()  # of each thread: the module that it searches, as another finder may ask us for it

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        """None for every module without a hook. Looking a module up is not importing it: the hook stays."""
        hook = self.hooks.get(name)
        if hook is None or getattr(self._searches, "name", None) == name:
            return None
        self._searches.name = name
        try:
            for finder in sys.meta_path:
                spec = None if finder is self else finder.find_spec(name, path, target)
                if spec is not None and spec.loader is not None:
                    spec.loader = _Wrapped(spec.loader, hook)
                    return spec
        finally:
            self._searches.name = None
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
