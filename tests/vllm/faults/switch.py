"""Which faults there are, and which are on. A fault makes a wrong function of a right one."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

Make = Callable[[Callable[..., Any]], Callable[..., Any]]

FAULTS: dict[str, list[tuple[str, Make]]] = {}  # by name: the functions that it changes (module:path), and how
ON: set[str] = set()


def fault(where: str) -> Callable[[Make], Make]:
    """Put before a function of the name of its fault, which gets vLLM's function and gives the wrong one."""

    def told(make: Make) -> Make:
        FAULTS.setdefault(make.__name__, []).append((where, make))
        return make

    return told


def plant() -> None:
    """Put every fault in its place, where it waits for its name to be in ON."""
    for name, changes in FAULTS.items():
        for where, make in changes:
            module, _, path = where.partition(":")
            owner: Any = importlib.import_module(module)
            *outer, last = path.split(".")
            for part in outer:
                owner = getattr(owner, part)
            function = _switched(name, getattr(owner, last), make)
            is_static = isinstance(vars(owner).get(last), staticmethod)
            setattr(owner, last, staticmethod(function) if is_static else function)


def plant_alone(names: list[str]) -> None:
    """Put these faults alone in their places, without switches: as somebody who patches vLLM would."""
    for name in names:
        for where, make in FAULTS[name]:
            module, _, path = where.partition(":")
            owner: Any = importlib.import_module(module)
            *outer, last = path.split(".")
            for part in outer:
                owner = getattr(owner, part)
            wrong = make(getattr(owner, last))
            setattr(owner, last, staticmethod(wrong) if isinstance(vars(owner).get(last), staticmethod) else wrong)


def _switched(name: str, original: Any, make: Make) -> Callable[..., Any]:
    wrong = make(original)

    @functools.wraps(original, updated=())
    def function(*args: Any, **kwargs: Any) -> Any:
        return (wrong if name in ON else original)(*args, **kwargs)

    if hasattr(original, "register_warmup"):  # a kernel: vLLM replaces those that it finds in its modules' names
        function.register_warmup = original.register_warmup  # type: ignore[attr-defined]
        globals()[f"_kernel_{name}"] = original
    return function
