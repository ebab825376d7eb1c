"""Guard: nothing that goes wrong in the plugin may reach vLLM."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

log = logging.getLogger("specscope.vllm")
MOST = 5  # errors, after which the plugin steps aside


class ErrorGuard:
    """Counts what went wrong. After `MOST` errors the plugin does nothing more, and says so once."""

    def __init__(self) -> None:
        self.errors = 0
        self.is_off = False

    def caught(self, where: str, error: BaseException) -> None:
        """Count it, and tell the log."""
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
