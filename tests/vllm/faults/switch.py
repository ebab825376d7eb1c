"""Which faults there are, and which are on. A fault is a wrong function in the place of a right one, which it gets."""

import functools
import importlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Fault:
    """A wrong function, or several; `right`: labels of the causes that would be right, of which one is to be named."""

    right: tuple[str, ...] = ()
    changes: list[tuple[str, Callable[..., Any]]] = field(default_factory=list)  # where: module:path


FAULTS: dict[str, Fault] = {}
ON: set[str] = set()
TIMES: Counter[str] = Counter()


def fault(where: str, *right: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Put before a function of its fault's name: what vLLM calls there, with vLLM's own function as first argument."""

    def told(wrong: Callable[..., Any]) -> Callable[..., Any]:
        known = FAULTS.setdefault(wrong.__name__, Fault())
        known.right = known.right or right
        known.changes.append((where, wrong))
        return wrong

    return told


def every(times: int, name: str) -> bool:
    """Whether this is one of so many calls."""
    TIMES[name] += 1
    return TIMES[name] % times == 0


def plant(names: list[str] | None = None) -> None:
    """Put all faults in their places, where each waits for its name to be in ON.

    `names`: these alone, without switches: as somebody who patches vLLM would.
    """
    for name in FAULTS if names is None else names:
        for where, wrong in FAULTS[name].changes:
            module, _, path = where.partition(":")
            owner: Any = importlib.import_module(module)
            *outer, last = path.split(".")
            for part in outer:
                owner = getattr(owner, part)
            function = _wrong(wrong, getattr(owner, last), always=names is not None)
            is_static = isinstance(vars(owner).get(last), staticmethod)
            setattr(owner, last, staticmethod(function) if is_static else function)


def _wrong(wrong: Callable[..., Any], original: Any, *, always: bool) -> Callable[..., Any]:
    name = wrong.__name__

    @functools.wraps(original, updated=())
    def function(*args: Any, **kwargs: Any) -> Any:
        return wrong(original, *args, **kwargs) if always or name in ON else original(*args, **kwargs)

    if hasattr(original, "register_warmup"):  # a kernel: vLLM replaces those that it finds in its modules' names
        function.register_warmup = original.register_warmup  # type: ignore[attr-defined]
        globals()[f"_kernel_{name}"] = original
    return function
