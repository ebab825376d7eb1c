"""Hooks inside another engine: they wrap only what is as they know it, and what goes wrong in them never reaches it."""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Iterator, Mapping
from types import ModuleType
from typing import Any

from specscope.errors import UserError

log = logging.getLogger("specscope")
MOST = 5  # errors, after which specscope steps aside
# By "function" or "Class.function": its parameters by name, * before a star's; several where versions differ, the
# oldest first
Functions = Mapping[str, str | tuple[str, ...]]


class ErrorGuard:
    """Counts what went wrong. After `MOST` errors specscope does nothing more, and says so once."""

    def __init__(self) -> None:
        self.errors = 0
        self.is_off = False

    def caught(self, where: str, error: BaseException) -> None:
        """Count an error and log it."""
        self.errors += 1
        trace = self.errors == 1 and not isinstance(error, UserError)  # whose line is for people
        log.warning("specscope: %s failed; the engine continues without it: %r", where, error, exc_info=trace)
        if self.errors >= MOST:
            self.step_aside(f"{self.errors} errors; what was recorded before is kept")

    def step_aside(self, why: str) -> None:
        """Do nothing more, and say so once."""
        if not self.is_off:
            self.is_off = True
            log.warning("specscope: switched off: %s", why)

    def safely(self, function: Callable[..., Any], *args: object) -> Any:  # noqa: ANN401
        """The function's value; None where the plugin is off or the function failed."""
        if self.is_off:
            return None
        try:
            return function(*args)
        except Exception as error:
            self.caught(getattr(function, "__qualname__", type(function).__name__), error)  # a repr may fail itself
            return None


class HookedCall:
    """One call of a function that is wrapped. Called itself, it calls the function, with what that was given."""

    __slots__ = ("_names", "args", "kwargs", "original")

    def __init__(
        self, original: Callable[..., Any], names: tuple[str, ...], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        self.original, self._names, self.args, self.kwargs = original, names, args, kwargs

    def __call__(self) -> Any:  # noqa: ANN401
        """The function's own value."""
        return self.original(*self.args, **self.kwargs)

    @property
    def given(self) -> dict[str, Any]:
        """The arguments by the names of the function's parameters, whichever way they were given."""
        return dict(zip(self._names, self.args, strict=False)) | self.kwargs


def names_of(function: Callable[..., Any], known: tuple[str, ...] = ()) -> tuple[str, ...]:
    """Of its parameters. `known`: the engine's own names: who replaced its function may call them otherwise."""
    names = tuple(inspect.signature(function).parameters)
    return names if set(known) <= set(names) else known


def around(hook: Callable[[HookedCall], Any]) -> Callable[..., Any]:
    """The hook as a function of what it goes around, and that one's arguments."""
    names = functools.cache(names_of)
    return lambda original, *args, **kwargs: hook(HookedCall(original, names(original), args, kwargs))


def wrapped(original: Callable[..., Any], hook: Callable[[HookedCall], Any], known: tuple[str, ...] = ()) -> Any:  # noqa: ANN401
    """The function as it goes through the hook."""
    names = names_of(original, known)

    @functools.wraps(original)
    def through(*args: object, **kwargs: object) -> Any:  # noqa: ANN401
        return hook(HookedCall(original, names, args, kwargs))

    return through


def wrap(
    owner: object, name: str, hook: Callable[[HookedCall], Any], known: tuple[str, ...] = (), *, again: bool = False
) -> None:
    """Have a function of a module, class or object go through the hook. Once: another time changes nothing, unless it
    is to go through several (`again`).
    """
    original = getattr(owner, name)
    if again or not hasattr(original, "__specscope__"):
        replaced = wrapped(original, hook, known)
        replaced.__specscope__ = True
        setattr(owner, name, replaced)


def signatures(functions: Functions, name: str) -> list[tuple[str, ...]]:
    """Those that are known of a function, the oldest first."""
    written = functions[name]
    return [tuple(each.split()) for each in ((written,) if isinstance(written, str) else written)]


def differing(module: ModuleType, functions: Functions) -> Iterator[str]:
    """What is not as known in a module, a line each: a function is to have one of its known signatures.

    One that somebody else put there is passed over: what counts is how the engine calls it, which has not changed.
    """
    for name in functions:
        known = signatures(functions, name)
        member: object = module
        for part in name.split("."):
            member = getattr(member, part, None)
        if not callable(member):
            yield f"{module.__name__}.{name} is missing"
        elif member.__module__ == module.__name__ and (there := _parameters(member)) not in known:
            yield f"{module.__name__}.{name} takes ({', '.join(there)}), not ({', '.join(known[-1])})"


def _parameters(function: Callable[..., Any]) -> tuple[str, ...]:
    """By name, with their stars."""
    parameters = inspect.signature(function).parameters.values()
    return tuple(str(each).split("=")[0].split(":")[0].strip() for each in parameters)
